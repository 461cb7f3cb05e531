"""The Muon update of one batch of ``k`` matrices of one shape: momentum, orthogonalization, weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .newton_schulz import CoefficientsArg, orthogonalize

AdjustLr: TypeAlias = "Literal['original', 'match_rms_adamw', 'spectral'] | Callable[[Sequence[int]], float] | None"

_MOMENTUM_DTYPES = (torch.float32, torch.float64)


def update_scale(adjust_lr_fn: AdjustLr, shape: Sequence[int]) -> float:
    """The factor on the learning rate for a matrix of ``shape`` ``(m, n)``, as Newton–Schulz saw it.

    ``"original"`` (also None) is ``√max(1, m/n)`` and ``"match_rms_adamw"`` ``0.2 √max(m, n)``, as in
    ``torch.optim.Muon``; ``"spectral"`` is ``√(m/n)``; a callable gets ``shape`` and returns the factor.

    Raises:
        ValueError: unknown name, not two positive dimensions, or a negative or non-finite factor.
    """
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"shape must be two positive dimensions (m, n), got {tuple(shape)}; flatten the tensor first")
    m, n = shape
    if callable(adjust_lr_fn):
        scale = float(adjust_lr_fn((m, n)))
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"adjust_lr_fn returned {scale} for shape {(m, n)}; it must be finite and non-negative")
        return scale
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return math.sqrt(max(1.0, m / n))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if adjust_lr_fn == "spectral":
        return math.sqrt(m / n)
    raise ValueError(
        f"adjust_lr_fn={adjust_lr_fn!r} is unknown; use 'original', 'match_rms_adamw', 'spectral' or a function"
    )


@torch.no_grad()
def momentum_update(
    grads: Sequence[Tensor],  # k of (m, n)
    momentum: Tensor,  # (k, m, n)
    *,
    beta: float,
    nesterov: bool,
) -> Tensor:  # (k, m, n)
    """Fold gradients into ``momentum`` in place, as ``torch.optim.Muon`` does; return what to orthogonalize.

    ``momentum ← beta · momentum + (1 - beta) · grad``; the result is that, or with ``nesterov`` the same
    average of the gradient and the new momentum. It is a new tensor in momentum's dtype; gradients are not
    modified.

    Raises:
        ValueError: momentum not fp32 or fp64, or a gradient of another shape than its momentum.
    """
    if momentum.dtype not in _MOMENTUM_DTYPES:
        raise ValueError(f"momentum must be fp32 or fp64, got {momentum.dtype}; keep optimizer state in fp32")
    if momentum.ndim != 3 or len(grads) != momentum.shape[0]:
        raise ValueError(
            f"momentum must be ({len(grads)}, m, n) for {len(grads)} gradients, got {tuple(momentum.shape)}"
        )
    update = torch.empty_like(momentum, memory_format=torch.contiguous_format)
    for index, (grad, row) in enumerate(zip(grads, update, strict=True)):
        if grad.shape != row.shape:  # copy_ would broadcast
            raise ValueError(
                f"gradient {index} is {tuple(grad.shape)}, momentum {tuple(row.shape)}; batch equal shapes"
            )
    torch._foreach_copy_(list(update.unbind(0)), list(grads))
    momentum.lerp_(update, 1 - beta)
    return update.lerp_(momentum, beta) if nesterov else update.copy_(momentum)


@torch.no_grad()
def apply_update_(
    params: Sequence[Tensor],  # k of (m, n)
    update: Tensor,  # (k, m, n)
    *,
    lr: float,
    weight_decay: float,
    scale: float,
) -> None:
    """``param ← (1 - lr · weight_decay) · param - lr · scale · update``, in place.

    Raises:
        ValueError: a parameter of another shape than its update.
    """
    weights = list(params)
    if update.ndim != 3 or len(weights) != update.shape[0]:
        raise ValueError(
            f"update must be ({len(weights)}, m, n) for {len(weights)} parameters, got {tuple(update.shape)}"
        )
    for index, weight in enumerate(weights):
        if weight.shape != update.shape[1:]:  # add_ would broadcast
            raise ValueError(
                f"parameter {index} is {tuple(weight.shape)}, update {tuple(update.shape[1:])}; batch equal shapes"
            )
    if not weights:
        return
    torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_add_(weights, list(update.unbind(0)), alpha=-lr * scale)


@torch.no_grad()
def muon_update_(
    params: Sequence[Tensor],  # k of (m, n)
    grads: Sequence[Tensor],  # k of (m, n)
    momentum: Tensor,  # (k, m, n)
    *,
    lr: float,
    weight_decay: float,
    beta: float,
    nesterov: bool,
    scale: float,
    eps: float = 0.0,
    coefficients: CoefficientsArg = "polar_express",
    steps: int = 5,
    dtype: torch.dtype | None = None,
) -> None:
    """One Muon update of ``k`` matrices: ``momentum_update``, ``orthogonalize``, ``apply_update_``."""
    update = momentum_update(grads, momentum, beta=beta, nesterov=nesterov)
    update = orthogonalize(update, coefficients=coefficients, steps=steps, dtype=dtype, eps=eps)
    apply_update_(params, update, lr=lr, weight_decay=weight_decay, scale=scale)
