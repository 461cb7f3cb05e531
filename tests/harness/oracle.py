"""The single process that every distributed run must equal: ``torch.optim.Muon`` and ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from harness.network import is_matrix, loss_of
from harness.toy import DECAY, LR, batch, build

Coefficients = tuple[float, float, float]


def newton_schulz(x: Tensor, coefficients: Sequence[Coefficients], eps: float = 0.0) -> Tensor:
    """As a loop in the dtype of ``x``; zeros stay zeros if ``eps`` is not."""
    is_tall = len(x) > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


@contextmanager
def fp32_newton_schulz() -> Any:
    """``torch.optim.Muon`` with the same loop in fp32; its own is wired to bf16."""
    from torch.optim import _muon

    def loop(grad: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
        return newton_schulz(grad.float(), [coefficients] * steps, eps)

    original = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = loop
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = original


class Reference:
    """``torch.optim.Muon`` + ``torch.optim.AdamW`` in one process, with the groups that ``dmuon.Muon`` documents."""

    def __init__(
        self,
        model: nn.Module,
        matrix: Callable[[str], bool] = is_matrix,
        lr: float = LR,
        adamw_lr: float | None = None,
        decay: float = DECAY,
        nesterov: bool = True,
    ) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        muon = [p for n, p in named if matrix(n)]
        rest = [p for n, p in named if not matrix(n)]
        # Of a kernel a matrix in the same memory.
        self.kernels = [(p, nn.Parameter(p.detach().flatten(1))) for p in muon if p.ndim > 2]
        self.muon = torch.optim.Muon(
            [*(p for p in muon if p.ndim == 2), *(matrix for _, matrix in self.kernels)],
            lr=lr,
            weight_decay=decay,
            momentum=0.95,
            nesterov=nesterov,
            adjust_lr_fn="match_rms_adamw",
            eps=1e-30,
        )
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decay},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=lr if adamw_lr is None else adamw_lr,
            betas=(0.9, 0.95),
        )

    def step(self) -> None:
        for kernel, matrix in self.kernels:
            matrix.grad = None if kernel.grad is None else kernel.grad.flatten(1)
        for param in (param for group in self.adamw.param_groups for param in group["params"]):
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        with fp32_newton_schulz():
            self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for kernel, _ in self.kernels:
            kernel.grad = None
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


def reference_weights(
    steps: int = 5,
    matrix: Callable[[str], bool] = is_matrix,
    nesterov: bool = True,
    clip: float = torch.inf,
    **building: Any,
) -> dict[str, Tensor]:
    """Weights of a single process after ``steps`` on the global batches, computed once for equal arguments.

    Args:
        clip: the largest norm of all gradients of a step.
        building: what :func:`build` takes.
    """
    return dict(_reference_weights(steps, matrix, nesterov, clip, **building))


@cache
def _reference_weights(
    steps: int, matrix: Callable[[str], bool], nesterov: bool, clip: float, **building: Any
) -> dict[str, Tensor]:
    model = build(**building)
    optimizer = Reference(model, matrix=matrix, nesterov=nesterov)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        if clip < torch.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


class Twin:
    """``torch.optim.Muon`` over plain copies; each matrix of a stack is a parameter of its own."""

    def __init__(self, values: Sequence[Tensor], lr: float = LR, decay: float = DECAY) -> None:
        self.options = {
            "lr": lr, "weight_decay": decay, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw", "eps": 1e-30,
        }  # fmt: skip
        self.params: list[list[nn.Parameter]] = []
        self.cuts: list[Callable[[Tensor], list[Tensor]]] = []
        self.shapes: list[torch.Size] = []
        self.optimizers: list[torch.optim.Muon] = []
        for value in values:
            self.add(value)

    def add(self, value: Tensor, cut: Callable[[Tensor], list[Tensor]] | None = None) -> None:
        """``cut`` takes a tensor apart into its matrices ``(out, in)``; by default it is one, or a stack."""
        cut = cut or _of_stack
        params = [nn.Parameter(matrix.clone().contiguous()) for matrix in cut(value)]
        self.params.append(params)
        self.cuts.append(cut)
        self.shapes.append(value.shape)
        self.optimizers.append(torch.optim.Muon(params, **self.options))

    def step(self, grads: Sequence[Tensor | None]) -> int:
        """One gradient for each value, in order; None leaves it as it is. How many matrices were orthogonalized."""
        count = 0
        for params, cut, optimizer, grad in zip(self.params, self.cuts, self.optimizers, grads, strict=True):
            if grad is None:
                continue
            for param, of_matrix in zip(params, cut(grad), strict=True):
                param.grad = of_matrix.clone().contiguous()
            with fp32_newton_schulz():
                optimizer.step()
            count += len(params)
        return count

    def weights(self) -> list[Tensor]:
        return [self.joined(i, [p.detach() for p in params]) for i, params in enumerate(self.params)]

    def momentum(self, index: int) -> Tensor:
        state = self.optimizers[index].state
        return self.joined(index, [state[p]["momentum_buffer"] for p in self.params[index]])

    def joined(self, index: int, matrices: Sequence[Tensor]) -> Tensor:
        """The matrices where they were before they were cut."""
        shape = self.shapes[index]
        places = self.cuts[index](torch.arange(shape.numel()).view(shape))
        whole = matrices[0].new_full((shape.numel(),), float("nan"))
        for place, matrix in zip(places, matrices, strict=True):
            whole[place.flatten()] = matrix.flatten()
        return whole.view(shape)


def _of_stack(value: Tensor) -> list[Tensor]:
    return list(value if value.ndim == 3 else value[None])
