"""One process's weights, from the formulas: what every topology must arrive at."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon.check.model import SMALL, batch, build, is_matrix, loss_of
from dmuon.kernels import coefficient_sequence

LR, DECAY, MOMENTUM = 2e-3, 0.1, 0.95
# AdamW's first step is the sign of a gradient unless eps says otherwise: rounding then decides where it is nearly zero.
ADAMW_EPS = 1e-4
CONTEXT = 64  # tokens per row
STEPS = 3  # before the one that accumulates and clips
MAX_NORM = 0.5  # below the norm of these gradients, so that clipping acts


@dataclass(frozen=True, slots=True)
class Twin:
    """A single process.

    Attributes:
        initial, trained: weights before and after ``STEPS`` steps.
        clipped: after one more whose gradients were clipped to ``MAX_NORM``.
        norm: of these gradients before.
    """

    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    clipped: dict[str, Tensor]
    norm: float


class _Reference:
    """Muon with Newton-Schulz in fp64, and ``torch.optim.AdamW``."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._matrices = {name: param for name, param in named.items() if is_matrix(name)}
        self._momentum = {name: torch.zeros_like(param) for name, param in self._matrices.items()}
        self._coefficients = coefficient_sequence("polar_express", 5)
        rest = [param for name, param in named.items() if not is_matrix(name)]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": DECAY},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=LR,
            betas=(0.9, 0.95),
            eps=ADAMW_EPS,
        )

    @torch.no_grad()
    def step(self) -> None:
        for name, param in self._matrices.items():
            assert param.grad is not None
            momentum = self._momentum[name].lerp_(param.grad, 1 - MOMENTUM)
            update = self._orthogonalized(param.grad.lerp(momentum, MOMENTUM))
            param.mul_(1 - LR * DECAY).sub_(update, alpha=LR * 0.2 * math.sqrt(max(param.shape)))
        self._adamw.step()

    def _orthogonalized(self, matrix: Tensor) -> Tensor:
        x = matrix.double()
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm()
        for a, b, c in self._coefficients:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        update: Tensor = (x.T if tall else x).to(matrix.dtype)
        return update


def train_alone(rows: int, device: torch.device, dtype: torch.dtype) -> Twin:
    """``STEPS`` steps, and a clipped one, over global batches of ``rows`` rows."""
    model = build(SMALL, device)
    optimizer = _Reference(model)
    initial = _weights(model)
    trained: dict[str, Tensor] = {}
    norm = math.nan
    for step in range(STEPS + 1):
        model.zero_grad()
        loss_of(model, *batch(SMALL, rows, CONTEXT, step, device), dtype).backward()
        if step == STEPS:
            trained = _weights(model)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
    return Twin(initial, trained, _weights(model), norm)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))
