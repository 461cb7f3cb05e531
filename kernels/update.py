"""The Muon update of one batch of ``k`` matrices of one shape: momentum, orthogonalization, weight."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .coefficients import coefficient_sequence
from .device import INTERPRETED, carrier_dtype, is_capturing, kernels_of, storage_dtype
from .newton_schulz import CoefficientsArg, check_eps, divide_by, normalize, run
from .variant import Variant, choose_variant

AdjustLr: TypeAlias = (
    "Literal['original', 'match_rms_adamw', 'spectral'] | float | Callable[[Sequence[int]], float] | None"
)


def update_scale(adjust_lr_fn: AdjustLr, shape: Sequence[int]) -> float:
    """The factor on the learning rate for a matrix of ``shape`` ``(m, n)``, as Newton–Schulz saw it.

    ``"original"`` (also None) is ``√max(1, m/n)`` and ``"match_rms_adamw"`` ``0.2 √max(m, n)``, as in
    ``torch.optim.Muon``; ``"spectral"`` is ``√(m/n)``; a number ``r`` is ``r √max(m, n)``, which gives the update of
    an orthogonal factor that root mean square; a callable gets ``shape`` and returns the factor.

    Raises:
        ValueError: unknown name, not two positive dimensions, or a number or factor that is negative or not finite.
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
    is_number = isinstance(adjust_lr_fn, (float, int, Real)) and not isinstance(adjust_lr_fn, bool)
    if is_number and 0 <= adjust_lr_fn < math.inf:
        return float(adjust_lr_fn) * math.sqrt(max(m, n))
    raise ValueError(
        f"adjust_lr_fn={adjust_lr_fn!r} is unknown; use 'original', 'match_rms_adamw', 'spectral', a number (the root "
        "mean square of an update) or a function"
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
    modified. One pass on CUDA.

    Raises:
        ValueError: momentum not fp32 or fp64, or a gradient of another shape than its momentum.
    """
    return _fold(grads, momentum, beta, nesterov, _fused_fold(grads, momentum))


@torch.no_grad()
def normalized_momentum(
    grads: Sequence[Tensor],  # k of (m, n)
    momentum: Tensor,  # (k, m, n)
    *,
    beta: float,
    nesterov: bool,
    storage: torch.dtype,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:  # (k, m, n), (k,)
    """:func:`momentum_update`, divided by the norm and rounded to ``storage`` once: what ``run`` takes.

    On CUDA two passes: one writes momentum and sums squares, the other reads gradient and momentum again and writes
    the result, for which no fp32 copy of the update is kept.

    Returns:
        The matrices, and their norms before that in fp64, which are not finite where an entry is not.

    Raises:
        ValueError: as :func:`momentum_update`; ``eps`` negative or not finite.
    """
    check_eps(eps)
    fused = _fused_fold(grads, momentum)
    kept = carrier_dtype(momentum.device, storage)
    if fused is not None and kept != torch.float64:
        norms = fused.momentum_norms(grads, momentum, beta=beta, nesterov=nesterov)
        return fused.normalized_update(grads, momentum, norms, beta=beta, nesterov=nesterov, eps=eps, dtype=kept), norms
    update = _fold(grads, momentum, beta, nesterov, fused)
    return normalize(update, storage, eps, out=update if update.dtype == kept else None)


@torch.no_grad()
def momentum_norms(
    grads: Sequence[Tensor],  # k of (m, n)
    momentum: Tensor,  # (k, m, n)
    *,
    beta: float,
    nesterov: bool,
) -> Tensor:  # (k,)
    """Fold gradients into ``momentum`` as :func:`momentum_update` does; return the norms of what to orthogonalize.

    They are fp64, and right for any scale of fp32. Of parts of matrices they are those of the parts: the squares of
    all parts' add up to that of the whole.

    Raises:
        ValueError: as :func:`momentum_update`.
    """
    fused = _fused_fold(grads, momentum)
    if fused is not None:
        found: Tensor = fused.momentum_norms(grads, momentum, beta=beta, nesterov=nesterov)
        return found
    update = _fold(grads, momentum, beta, nesterov, None)
    norms: Tensor = torch.linalg.vector_norm(update.flatten(1), dim=1, dtype=torch.float64)
    return norms


@torch.no_grad()
def normalized_update(
    grads: Sequence[Tensor],  # k of (m, n)
    momentum: Tensor,  # (k, m, n)
    norms: Tensor,  # (k,), fp64
    *,
    beta: float,
    nesterov: bool,
    storage: torch.dtype,
    eps: float = 0.0,
) -> Tensor:  # (k, m, n)
    """What to orthogonalize over ``max(norm, eps)``, rounded once to ``storage``.

    After :func:`momentum_norms`, which has folded the gradients into ``momentum``; ``norms`` are of whole matrices,
    of which these may be parts. Zero norms give zeros.

    Raises:
        ValueError: as :func:`momentum_update`; ``eps`` negative or not finite.
    """
    check_eps(eps)
    if norms.shape != momentum.shape[:1] or norms.dtype != torch.float64 or norms.device != momentum.device:
        raise ValueError(
            f"norms must be fp64 ({len(momentum)},) on {momentum.device}, one of each matrix as momentum_norms returns "
            f"them; got {tuple(norms.shape)} of {norms.dtype} on {norms.device}"
        )
    norms = norms.contiguous()
    fused = _fused_fold(grads, momentum)
    if fused is not None and storage != torch.float64:
        found: Tensor = fused.normalized_update(
            grads, momentum, norms, beta=beta, nesterov=nesterov, eps=eps, dtype=storage
        )
        return found
    update = _stacked(grads, momentum)
    update = update.lerp_(momentum, beta) if nesterov else update.copy_(momentum)
    return divide_by(update, norms.reshape(-1, 1, 1), eps).to(storage)


@torch.no_grad()
def normalized(
    x: Tensor,  # (k, m, n)
    *,
    storage: torch.dtype,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:  # (k, m, n), (k,)
    """Gathered matrices, divided by their norms and rounded to ``storage`` once, and the norms in fp64.

    On CUDA two passes: one sums squares, the other divides.

    Raises:
        ValueError: ``eps`` negative or not finite.
    """
    check_eps(eps)
    kept = carrier_dtype(x.device, storage)
    fused = _fused(x.device)
    if fused is not None and x.dtype == torch.float32 and kept != torch.float64 and fused.takes((), x):
        norms = fused.momentum_norms((), x, beta=0.0, nesterov=False)
        return fused.normalized_update((), x, norms, beta=0.0, nesterov=False, eps=eps, dtype=kept), norms
    return normalize(x, storage, eps)


@torch.no_grad()
def apply_update_(
    params: Sequence[Tensor],  # k of (m, n)
    update: Tensor | Sequence[Tensor],  # (k, m, n), or several (j, m, n), k together
    *,
    lr: float,
    weight_decay: float,
    scale: float,
) -> None:
    """``param ← (1 - lr · weight_decay) · param - lr · scale · update``, in place; in one pass on CUDA.

    Raises:
        ValueError: a parameter of another shape than its update.
    """
    params = list(params)
    stacks = [update] if isinstance(update, Tensor) else list(update)
    updates, fit = list[Tensor](), True
    for stack in stacks:
        fit = fit and stack.ndim == 3
        updates += stack.unbind(0)
    if not fit or len(params) != len(updates):
        found = ", ".join(str(tuple(stack.shape)) for stack in stacks)
        raise ValueError(f"update must be ({len(params)}, m, n) for {len(params)} parameters, got {found}")
    for index, (param, matrix) in enumerate(zip(params, updates, strict=True)):
        if param.shape != matrix.shape:  # add_ would broadcast
            shapes = f"{tuple(param.shape)}, update {tuple(matrix.shape)}"
            raise ValueError(f"parameter {index} is {shapes}; batch equal shapes")
    if not updates:
        return
    fused = _fused(params[0].device)
    if fused is not None and all(tensor.dtype in fused.DTYPES for tensor in (*params, *stacks)):
        # An owner's own part is a view of the whole: all ranks must round alike, and so take one way.
        whole = stacks[0].contiguous() if len(stacks) == 1 else torch.cat(stacks)
        if fused.takes(params, whole):
            fused.apply_update(params, whole, lr=lr, weight_decay=weight_decay, scale=scale)
            return
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, updates, alpha=-lr * scale)


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
    variant: Variant | None = None,
) -> None:
    """One Muon update of ``k`` matrices: ``normalized_momentum``, Newton–Schulz, ``apply_update_``.

    Args:
        variant: how Newton–Schulz runs; ``None`` is the rule's choice.
    """
    storage = storage_dtype(momentum.dtype, momentum.device, dtype)
    sequence = coefficient_sequence(coefficients, steps)
    if variant is None:
        variant = choose_variant(
            (momentum.shape[-2], momentum.shape[-1]), max(1, len(momentum)), sequence, storage, momentum.device
        )
    x, _ = normalized_momentum(grads, momentum, beta=beta, nesterov=nesterov, storage=storage, eps=eps)
    update = run(x, variant, sequence, storage)
    apply_update_(params, update, lr=lr, weight_decay=weight_decay, scale=scale)


def _fused_fold(grads: Sequence[Tensor], momentum: Tensor) -> Any:
    """The Triton kernels, where they take these tensors, or ``None``; raises where nothing takes them."""
    if momentum.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"momentum must be fp32 or fp64, got {momentum.dtype}; keep optimizer state in fp32")
    if momentum.ndim != 3 or len(grads) != momentum.shape[0]:
        raise ValueError(
            f"momentum must be ({len(grads)}, m, n) for {len(grads)} gradients, got {tuple(momentum.shape)}"
        )
    shape = momentum.shape[1:]
    for index, grad in enumerate(grads):
        if grad.shape != shape:  # copy_ would broadcast
            raise ValueError(f"gradient {index} is {tuple(grad.shape)}, momentum {tuple(shape)}; batch equal shapes")
    fused = _fused(momentum.device)
    return fused if fused is not None and grads and fused.takes(grads, momentum) else None


def _fold(grads: Sequence[Tensor], momentum: Tensor, beta: float, nesterov: bool, fused: Any) -> Tensor:
    """:func:`momentum_update` of checked arguments, by ``fused`` if that is not ``None``."""
    if fused is not None:
        folded: Tensor = fused.momentum_update(grads, momentum, beta=beta, nesterov=nesterov)
        return folded
    update = _stacked(grads, momentum)
    momentum.lerp_(update, 1 - beta)
    return update.lerp_(momentum, beta) if nesterov else update.copy_(momentum)


def _stacked(grads: Sequence[Tensor], momentum: Tensor) -> Tensor:
    """A new tensor in momentum's dtype; it converts more slowly in one call than copies do."""
    update = torch.empty_like(momentum, memory_format=torch.contiguous_format)
    for grad in grads:
        if grad.dtype != update.dtype:
            torch._foreach_copy_(list(update.unbind(0)), list(grads))
            return update
    if grads:  # of none torch makes an error
        torch.stack(list(grads), out=update)
    return update


def _fused(device: torch.device) -> Any:
    """The Triton kernels, where they run. A user's CUDA graph would outlive the addresses that they read."""
    if device.type == "cpu":
        return kernels_of("update_triton") if INTERPRETED else None
    if device.type != "cuda" or torch.version.hip is not None or is_capturing(device):
        return None
    return built_passes(device)


@cache
def built_passes(device: torch.device) -> Any:
    """The kernels, or ``None``: on old devices, and with a warning where they do not build, as without a C compiler."""
    try:
        if torch.cuda.get_device_capability(device) < (8, 0):
            return None
        fused = kernels_of("update_triton")
        matrix, stacked = torch.ones(4, 4, device=device), torch.ones(1, 4, 4, device=device)
        norms = fused.momentum_norms([matrix], stacked, beta=0.5, nesterov=True)
        fused.normalized_update([matrix], stacked, norms, beta=0.5, nesterov=True, eps=0.0, dtype=torch.float32)
        fused.momentum_update([matrix], stacked, beta=0.5, nesterov=True)
        fused.momentum_norms((), stacked, beta=0.5, nesterov=False)
        fused.apply_update([matrix], stacked, lr=0.1, weight_decay=0.1, scale=1.0)
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(
            f"the fused update kernels do not run on {device} ({type(error).__name__}: {error}); slower without"
        )
        return None
    return fused
