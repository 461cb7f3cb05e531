"""The baseline that everybody writes first: Muon that gathers every matrix on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dmuon.kernels import orthogonalize, update_scale


class GatherMuon(torch.optim.Optimizer):
    """Gather-then-compute Muon over FSDP2, for matrices sharded by rows: the common baseline.

    Momentum stays sharded; every rank gathers every momentum-smoothed update, orthogonalizes all of them, and applies
    its own rows. Newton–Schulz is dmuon's, the update ``torch.optim.Muon``'s with the coefficients of ``dmuon.Muon``.

    Args:
        textbook: one matrix after the other, in the standard form.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        textbook: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._textbook = textbook

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    shapes.setdefault(param.shape, []).append(param)
            for shape, params in shapes.items():
                self._step_shape(shape, params, group)

    def _step_shape(self, shape: torch.Size, params: list[Tensor], group: dict[str, Any]) -> None:
        whole = torch.empty((len(params), *shape), dtype=torch.float32, device=params[0].device)
        for param, slot in zip(params, whole, strict=True):
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffer = state["momentum_buffer"]
            buffer.lerp_(param.grad, 1 - group["momentum"])
            update = param.grad.lerp(buffer, group["momentum"])
            slot.copy_(update.full_tensor())
        if self._textbook:
            orthogonal = torch.stack([orthogonalize(one, method="standard", backend="torch") for one in whole])
        else:
            orthogonal = orthogonalize(whole)
        scale = update_scale("match_rms_adamw", shape)
        for param, slot in zip(params, orthogonal, strict=True):
            assert isinstance(param, DTensor) and param.placements == (Shard(0),)
            rows = slot.chunk(param.device_mesh.size())
            rank = param.device_mesh.get_local_rank()
            param.mul_(1 - group["lr"] * group["weight_decay"])
            if rank < len(rows):
                param.to_local().add_(rows[rank], alpha=-group["lr"] * scale)
