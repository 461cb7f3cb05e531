"""Orthogonalization by Newton–Schulz: the standard iteration, and the Gram form on the small side.

With ``X`` the normalised matrix, small side first, a standard step is ``R = XXᵀ; Z = bR + cR²; X ← ZX + aX``.
The Gram form carries ``R`` and the accumulated polynomial ``Q`` instead, and applies ``Q`` to ``X``
once per restart block; it is the same polynomial, exactly, and rounds differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .coefficients import Coefficients, checked_restarts, coefficient_sequence
from .products import HALF, Arithmetic, full_accumulation

Method: TypeAlias = Literal["auto", "standard", "gram"]
Backend: TypeAlias = Literal["auto", "torch"]
CoefficientsArg: TypeAlias = "str | Sequence[float] | Sequence[Sequence[float]]"

_METHODS = ("auto", "standard", "gram")
_BACKENDS = ("auto", "torch")
_STORAGE = (*HALF, torch.float32, torch.float64)

# CPU: matrices that run as one product together hold at most so many elements; more fall out of the cache.
_CPU_BATCH_ELEMENTS = 1 << 16

# Norms are accumulated in fp64, which casts: so many elements at a time, so that the cast stays small.
_NORM_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}


@dataclass(frozen=True, slots=True)
class Iteration:
    """What a Newton–Schulz run does, decided once; ``restarts`` are the Gram form's, ``dtype`` is storage."""

    coefficients: Coefficients
    method: Literal["standard", "gram"]
    restarts: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    *,
    coefficients: CoefficientsArg = "polar_express",
    steps: int = 5,
    method: Method = "auto",
    restarts: Literal["auto"] | Sequence[int] = "auto",
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    eps: float = 0.0,
) -> Tensor:
    """The orthogonal factor ``U Vᵀ`` of each matrix, approximately: singular values near one.

    Each matrix is divided by its Frobenius norm first, so its scale does not matter; a zero matrix gives
    exact zeros, and NaN or inf stays in its own matrix.

    Args:
        x: ``(..., m, n)``, floating point, any strides; not modified.
        coefficients: ``"polar_express"``, ``"classic"``, ``"you"``, one ``(a, b, c)``, or a sequence of them.
        steps: number of Newton–Schulz steps.
        method: ``"standard"``, ``"gram"``, or ``"auto"``: the one with fewer operations; standard in bf16.
        restarts: Gram form: the 0-based steps before which it restarts from ``X``. ``"auto"`` takes the
            fewest that are safe for these coefficients in ``dtype``; others select the Gram form.
        dtype: dtype that intermediate matrices are stored in; products of halves accumulate in fp32. ``None``:
            fp64 for fp64 input, else fp32 on CPU and fp16 elsewhere. On CPU, fp16 and bf16 are emulated.
        backend: what multiplies matrices: ``"torch"``, or ``"auto"``: the fastest available.
        eps: lower clamp of the norm; 0 is exact.

    Returns:
        Tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is no floating-point tensor, ``steps`` no int, or ``dtype`` no supported dtype.
        ValueError: ``x`` has fewer than two dimensions; an option is unknown or contradicts another;
            restarts are unsafe in ``dtype``.

    Reference: Jordan et al., https://kellerjordan.github.io/posts/muon; Zhang et al., "Gram Newton-Schulz".
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating-point tensor, got {kind}; convert it, for example with x.float()")
    if x.ndim < 2:
        raise ValueError(f"x must have two or more dimensions, got shape {tuple(x.shape)}; vectors belong on AdamW")
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(_BACKENDS)}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps!r} must be finite and non-negative; 0 is exact")
    iteration = choose_iteration(
        (x.shape[-2], x.shape[-1]),
        coefficients=coefficients,
        steps=steps,
        method=method,
        restarts=restarts,
        dtype=storage_dtype(x.dtype, x.device, dtype),
    )
    if x.numel() == 0:
        return torch.empty_like(x)

    batch = x.reshape(-1, *x.shape[-2:])
    arithmetic = Arithmetic.on(x.device, iteration.dtype)
    piece = batch_size((x.shape[-2], x.shape[-1]), len(batch), x.device)
    with full_accumulation(x.device):
        if piece == len(batch):
            result = iterate(normalize(batch, arithmetic, eps), iteration, arithmetic).to(x.dtype)
        else:
            result = torch.empty(batch.shape, dtype=x.dtype, device=x.device)
            for source, target in zip(torch.split(batch, piece), torch.split(result, piece), strict=True):
                target.copy_(iterate(normalize(source, arithmetic, eps), iteration, arithmetic))
    return result.reshape(x.shape)


def batch_size(shape: tuple[int, int], k: int, device: torch.device) -> int:
    """How many of ``k`` matrices of ``shape`` run as one batch on ``device``."""
    return k if device.type != "cpu" else min(k, max(1, _CPU_BATCH_ELEMENTS // (shape[0] * shape[1])))


def newton_schulz_flops(
    shape: tuple[int, int], coefficients: CoefficientsArg, steps: int, dtype: torch.dtype | None, device: torch.device
) -> int:
    """Operations that :func:`orthogonalize` takes for one fp32 matrix of ``shape`` on ``device``."""
    storage = storage_dtype(torch.float32, device, dtype)
    iteration = choose_iteration(
        shape, coefficients=coefficients, steps=steps, method="auto", restarts="auto", dtype=storage
    )
    return iteration_flops(shape, steps, iteration.restarts if iteration.method == "gram" else None)


def storage_dtype(x_dtype: torch.dtype, device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to store intermediate matrices in; ``None`` is the default for input of ``x_dtype`` on ``device``."""
    if dtype is None:
        if x_dtype == torch.float64:
            return torch.float64
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype not in _STORAGE:
        raise TypeError(f"dtype={dtype!r} is not supported; use None or one of {', '.join(map(str, _STORAGE))}")
    return dtype


def choose_iteration(
    shape: tuple[int, int],
    *,
    coefficients: CoefficientsArg,
    steps: int,
    method: Method,
    restarts: Literal["auto"] | Sequence[int],
    dtype: torch.dtype,
) -> Iteration:
    """Decide form and restarts for matrices of ``shape`` ``(m, n)``; raises as :func:`orthogonalize` does."""
    if method not in _METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(_METHODS)}")
    sequence = coefficient_sequence(coefficients, steps)
    explicit = not isinstance(restarts, str)
    if method == "standard" and explicit:
        raise ValueError(f"restarts={restarts!r} needs the Gram form; use method='gram' or restarts='auto'")
    schedule = checked_restarts(restarts, sequence, dtype)
    if method == "auto":
        cheaper = iteration_flops(shape, steps, schedule) < iteration_flops(shape, steps, None)
        method = "gram" if explicit or (cheaper and dtype != torch.bfloat16) else "standard"
    if method == "standard":
        return Iteration(sequence, "standard", (), dtype)
    return Iteration(sequence, "gram", schedule, dtype)


def iteration_flops(shape: tuple[int, int], steps: int, restarts: Sequence[int] | None) -> int:
    """Operations for one matrix with full products in the Gram form; ``restarts=None``: the standard form."""
    small, large = min(shape), max(shape)
    wide, square = 2 * small * small * large, 2 * small**3
    if restarts is None:
        return steps * (2 * wide + square)
    blocks = len(restarts) + 1
    # Per block: XXᵀ and QX. Per step: R²; except a block's first: QZ; except a block's last: RZ and ZV.
    return 2 * blocks * wide + (steps + 3 * (steps - blocks)) * square


def normalize(x: Tensor, arithmetic: Arithmetic, eps: float) -> Tensor:
    """``x / max(‖x‖, eps)`` of each matrix ``(..., m, n)``, rounded once to storage; zero stays exact zero.

    The norm is accumulated in fp64: squares of 1e±30 leave fp32's range. The cast is last: fp16 has no 1e-8.
    """
    norm = _frobenius_norm(x).clamp(min=eps)
    compute = torch.promote_types(x.dtype, torch.float32)
    # A finite nonzero factor: a norm outside fp32's range must not turn numbers into zeros or NaN.
    limits = torch.finfo(compute)
    in_range = norm.reciprocal().clamp(limits.smallest_normal * 2.0**-20, limits.max)
    factor = torch.where(norm == 0, 0.0, in_range).to(compute)
    result = torch.empty(x.shape, dtype=arithmetic.carrier, device=x.device)
    return arithmetic.round_(torch.mul(x, factor, out=result))


def _frobenius_norm(x: Tensor) -> Tensor:
    """fp64 norms ``(..., 1, 1)`` of the matrices of ``x``."""
    limit = _NORM_CHUNK.get(x.device.type, _NORM_CHUNK["cuda"])
    rows = max(1, limit * x.shape[-2] // x.numel())
    chunks = torch.split(x, rows, dim=-2)
    norms = [torch.linalg.vector_norm(chunk, dim=(-2, -1), dtype=torch.float64) for chunk in chunks]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return norm[..., None, None]


def iterate(x: Tensor, iteration: Iteration, arithmetic: Arithmetic) -> Tensor:
    """Run ``iteration`` on normalised ``x``, ``(m, n)`` or ``(k, m, n)``, in ``arithmetic``'s carrier."""
    if iteration.method == "standard":
        return _standard(x, iteration.coefficients, arithmetic)
    return _gram_form(x, iteration.coefficients, iteration.restarts, arithmetic)


def _standard(x: Tensor, coefficients: Coefficients, arithmetic: Arithmetic) -> Tensor:
    for a, b, c in coefficients:
        r = _gram(x, arithmetic)
        z = arithmetic.product(r, r, r, alpha=c, beta=b)
        x = _apply(z, a, x, arithmetic)
    return x


def _gram_form(x: Tensor, coefficients: Coefficients, restarts: Sequence[int], arithmetic: Arithmetic) -> Tensor:
    for start, stop in itertools.pairwise((0, *restarts, len(coefficients))):
        x = _gram_block(x, coefficients[start:stop], arithmetic)
    return x


def _gram_block(x: Tensor, coefficients: Coefficients, arithmetic: Arithmetic) -> Tensor:
    """``X`` after the steps of one restart block.

    A factor ``Z + aI`` is not multiplied with: the identity's share is added inside the product instead, as
    in half precision ``a`` costs the small entries of ``Z`` their last digits. The accumulated ``Q`` is kept
    whole: kept as ``Q - sI`` it cancels where ``Q`` is small, which measured ten times worse.
    """
    r = _gram(x, arithmetic)
    q = r
    for index, (a, b, c) in enumerate(coefficients):
        z = arithmetic.product(r, r, r, alpha=c, beta=b)
        if index + 1 == len(coefficients) == 1:
            return _apply(z, a, x, arithmetic)
        if index + 1 < len(coefficients):
            v = arithmetic.product(r, z, r, beta=a)
            r = arithmetic.product(z, v, v, beta=a)
        if index == 0:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q = arithmetic.round_(z)
        else:
            q = arithmetic.product(q, z, q, beta=a)
    return _apply(q, 0.0, x, arithmetic)


def _gram(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The smaller of ``XXᵀ`` and ``XᵀX``."""
    return arithmetic.product(x, x.mT) if x.shape[-2] <= x.shape[-1] else arithmetic.product(x.mT, x)


def _apply(q: Tensor, scale: float, x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """``(q + scale · I)`` times ``x`` on its small side; ``q`` is symmetric."""
    addend = x if scale else None
    if x.shape[-2] <= x.shape[-1]:
        return arithmetic.product(q, x, addend, beta=scale)
    return arithmetic.product(x, q.mT, addend, beta=scale)
