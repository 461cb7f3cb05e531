"""AdamW for whatever Muon does not take, on this rank's parts."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dmuon.platform.torch_private import local_tensor


def init_adamw_state(param: Tensor, state: MutableMapping[str, Any]) -> None:
    """Create ``step`` (0-D fp32 on the parameter's device), ``exp_avg`` and ``exp_avg_sq`` (as ``param``)."""
    state["step"] = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)
    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)


def adopt_adamw_state(optimizer: torch.optim.Optimizer) -> None:
    """After a load: make the state that AdamW's parameters lack, and ``step`` a tensor on their device."""
    for group in optimizer.param_groups:
        for param in [] if group["use_muon"] else group["params"]:
            state = optimizer.state[param]
            if "step" not in state:
                init_adamw_state(param, state)
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(local_tensor(param).device)


@torch.no_grad()
def adamw_step(
    params: Sequence[Tensor],
    states: Sequence[MutableMapping[str, Any]],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of decoupled weight decay Adam (arXiv 1711.05101) on every parameter that has a gradient.

    AdamW is elementwise, so a sharded parameter is updated exactly by updating its local shard. One fused call per
    device and dtype; tensors of different kinds never meet in one call because only local tensors do.
    """
    batches: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, ...]]] = {}
    for param, state in zip(params, states, strict=True):
        if param.grad is None:
            continue
        if not state:  # it was cleared
            init_adamw_state(param, state)
        local = local_tensor(param)
        if local.numel() == 0:
            state["step"] += 1
            continue
        row = tuple(local_tensor(t) for t in (param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]))
        batches.setdefault((local.device, local.dtype), []).append(row)
    for rows in batches.values():
        local_params, grads, averages, squares, steps = (list(column) for column in zip(*rows, strict=True))
        adamw(
            [p.detach() for p in local_params],
            grads,
            averages,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
