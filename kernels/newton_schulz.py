"""Orthogonalization by Newton–Schulz: the standard iteration, and the Gram form on the small side.

With ``X`` the normalised matrix, small side first, a standard step is ``R = XXᵀ; Z = bR + cR²; X ← ZX + aX``.
The Gram form carries ``R`` and the accumulated polynomial ``Q`` instead, and applies ``Q`` to ``X``
once per restart block; it is the same polynomial, exactly, and rounds differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .arithmetic import Arithmetic, make_arithmetic
from .coefficients import Coefficients, Polynomial, Square, Squares, checked_restarts, coefficient_sequence
from .device import carrier_dtype, full_precision, storage_dtype, streams_of
from .replay import replayed
from .variant import Backend, Method, Variant, backend_fault, choose_variant, is_thin, relative_cost

# Matrices that must be scaled first: so many elements at a time, which bounds the scaled copy.
_CHUNK = 1 << 22
# What norms are computed in as it is.
_ITSELF = (torch.float32, torch.float64)
# Norms between these come from entries whose squares are in fp32's range, but for some that are too small to matter.
_SAFE_NORMS = (1e-10, 1e18)
# Squares of so few elements are added up in one call.
_FEW = 1 << 14

_CONVERT = "convert it, for example with x.float()"

CoefficientsArg: TypeAlias = "str | Sequence[float] | Sequence[Sequence[float]]"
Total: TypeAlias = Callable[[Tensor], None]  # adds, in place, what the Gram matrices of all slices are


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
    variant: Variant | None = None,
) -> Tensor:
    """The orthogonal factor ``U Vᵀ`` of each matrix, approximately: singular values near one.

    Each matrix is divided by its Frobenius norm first, so its scale does not matter; a zero matrix gives
    exact zeros, and NaN or inf stays in its own matrix.

    Args:
        x: ``(..., m, n)``, floating point, any strides; not modified.
        coefficients: ``"polar_express"``, ``"classic"``, ``"you"``, ``"squares"``, one ``(a, b, c)``, or a sequence
            of them.
        steps: number of Newton–Schulz steps; ``"squares"`` stands for five.
        method: ``"standard"``, ``"gram"``, or ``"auto"``: the cheaper one by rule; standard in bf16. ``"squares"`` has
            one form.
        restarts: Gram form: the 0-based steps before which it restarts from ``X``. ``"auto"`` takes the
            fewest that are safe for these coefficients in ``dtype``; others select the Gram form.
        dtype: dtype that intermediate matrices are stored in; products of halves accumulate in fp32. ``None``:
            fp64 for fp64 input, else fp32 on CPU and fp16 elsewhere. On CPU fp16 is emulated, and bf16 where the CPU
            does not multiply it.
        backend: what computes products whose result is symmetric: ``"torch"`` all of it, ``"split"`` (CPU) block
            rows up to the diagonal, ``"triton"`` (CUDA) lower tiles; ``"auto"`` by rule.
        eps: lower clamp of the norm; 0 is exact.
        variant: in place of the rules'; excludes method, restarts and backend.

    Returns:
        Tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is no floating-point tensor, ``steps`` no int, or ``dtype`` no supported dtype.
        ValueError: ``x`` has fewer than two dimensions; an option is unknown or contradicts another;
            restarts are unsafe in ``dtype``; a back end cannot run on this device in ``dtype``.

    Reference: Jordan et al., https://kellerjordan.github.io/posts/muon; Zhang et al., "Gram Newton-Schulz".
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a floating-point tensor, got {type(x).__name__}; {_CONVERT}")
    size = x.shape
    variant, sequence, storage = planned_call(
        size,
        x.dtype,
        x.device,
        coefficients if isinstance(coefficients, str) else coefficient_sequence(coefficients, steps),
        steps,
        method,
        restarts if isinstance(restarts, str) else tuple(restarts),
        dtype,
        backend,
        eps,
        variant,
    )
    if x.requires_grad:
        x = x.detach()  # no graph; less than entering no_grad takes
    if not x.numel():
        return torch.empty_like(x)
    if len(size) > 3:
        x = x.reshape(-1, *size[-2:])
    normalized, _ = normalize(x, storage, eps)
    if normalized.ndim == 2 and not variant.replay:  # it may be small, where every call counts
        with full_precision(x.device):
            result = iterate(normalized, variant, sequence, make_arithmetic(variant.backend, x.device, storage))
    else:
        result = run(normalized if normalized.ndim == 3 else normalized[None], variant, sequence, storage)
    result = result if result.dtype == x.dtype else result.to(x.dtype)
    return result if result.shape == size else result.reshape(size)


def run(
    x: Tensor,  # (k, m, n)
    variant: Variant,
    coefficients: Polynomial,
    storage: torch.dtype,
    total: Total | None = None,
) -> Tensor:  # (k, m, n)
    """Orthogonalize matrices that :func:`normalize` made, piece by piece; ``x`` is overwritten or returned.

    The result is in ``x``'s dtype.

    Args:
        total: ``x`` is a slice of matrices, along their long side, which comes second. Others have the other slices,
            and each Gram matrix is the sum of theirs: ``total`` gets this one's part in fp32 (or wider), once a restart
            block and piece. Everything else is of one slice, or of the small side.
    """
    if not x.numel() and total is None:
        return x
    if variant.replay:
        eager = replace(variant, replay=False)
        return replayed(lambda source: run(source, eager, coefficients, storage), x, (eager, coefficients, storage))
    arithmetic = make_arithmetic(variant.backend, x.device, storage)
    with full_precision(x.device):
        if x.shape[0] == 1:  # it may be small, where every call counts
            return iterate(x[0], variant, coefficients, arithmetic, total=total).unsqueeze(0)
        if variant.piece >= len(x):
            return iterate(x, variant, coefficients, arithmetic, total=total)
        spare, free = torch.empty(0), list[Tensor]()
        for piece in torch.split(x, variant.piece):
            source = piece if len(piece) > 1 else piece[0]
            if spare.shape != source.shape:  # the last piece may be smaller
                spare, free = torch.empty_like(source), []
            result = iterate(source, variant, coefficients, arithmetic, spare, free, total)
            if result is not source:
                source.copy_(result)
    return x


@lru_cache(maxsize=4096, typed=True)  # a flag is no number
def planned_call(
    size: torch.Size,
    x_dtype: torch.dtype,
    device: torch.device,
    coefficients: str | Polynomial,
    steps: int,
    method: Method,
    restarts: Literal["auto"] | tuple[int, ...],
    dtype: torch.dtype | None,
    backend: Backend,
    eps: float,
    variant: Variant | None,
) -> tuple[Variant, Polynomial, torch.dtype]:
    """How a call of :func:`orthogonalize` runs, and the dtype that it stores.

    Checks what does not change from call to call, which for a small matrix takes as long as its products.
    """
    if not x_dtype.is_floating_point:
        raise TypeError(f"x must be a floating-point tensor, got {x_dtype}; {_CONVERT}")
    if len(size) < 2:
        raise ValueError(f"x must have two or more dimensions, got shape {tuple(size)}; vectors belong on AdamW")
    check_eps(eps)
    if variant is not None and not (method == restarts == backend == "auto"):
        raise ValueError(f"variant={variant} excludes method, restarts and backend; leave them at 'auto'")
    storage = storage_dtype(x_dtype, device, dtype)
    sequence = coefficient_sequence(coefficients, steps) if isinstance(coefficients, str) else coefficients
    if variant is None:
        shape, k = (size[-2], size[-1]), max(1, math.prod(size[:-2]))
        variant = choose_variant(shape, k, sequence, storage, device, method=method, restarts=restarts, backend=backend)
        return variant, sequence, storage
    fault = backend_fault(variant.backend, device, storage)
    if variant.replay and device.type != "cuda":
        fault = f"CUDA graphs are not replayed on {device.type}"
    if fault is not None:
        raise ValueError(f"variant={str(variant)!r} cannot run: {fault}; leave it out")
    if variant.method == "gram":
        checked_restarts(variant.restarts, sequence, storage)
    return variant, sequence, storage


def newton_schulz_flops(
    shape: tuple[int, int], coefficients: CoefficientsArg, steps: int, dtype: torch.dtype | None, device: torch.device
) -> int:
    """Operations that :func:`orthogonalize` takes for one fp32 matrix of ``shape``, with whole products."""
    storage = storage_dtype(torch.float32, device, dtype)
    sequence = coefficient_sequence(coefficients, steps)
    variant = choose_variant(shape, 1, sequence, storage, device, backend="torch")
    return 2 * int(relative_cost(shape, sequence, variant, storage))


# -- dividing by the Frobenius norm, at any scale -----------------------------------------------------------------


def check_eps(eps: float) -> None:
    """Raise ``ValueError`` where ``eps`` cannot clamp a norm."""
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps!r} must be finite and non-negative; 0 is exact")


def normalize(
    x: Tensor,  # (k, m, n) or (m, n)
    storage: torch.dtype,
    eps: float,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x / max(‖x‖, eps)`` of each matrix, rounded once to ``storage``, and the norms, fp64 ``(k,)`` or ``()``.

    Zero stays exact zero. A norm is not finite where an entry is not. The cast is last: fp16 has no 1e-8. ``out`` may
    be ``x``.
    """
    waits = streams_of(x.device) is not None  # where reading a norm would wait for the device
    low, high = _SAFE_NORMS
    if x.ndim == 2 and not waits and x.dtype == storage and storage in _ITSELF and 0 < x.numel() <= _FEW:
        norms: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
        if low < (norm := norms.item()) < high and norm > eps:  # it may be small, so that each call counts
            return torch.div(x, norms, out=out), norms
    carrier = carrier_dtype(x.device, storage)
    if out is None:  # a transposed matrix may stay one, a batch is multiplied faster if it does not
        layout = torch.preserve_format if x.ndim == 2 else torch.contiguous_format
        out = torch.empty_like(x, dtype=carrier, memory_format=layout)
    if not x.numel():
        return out, torch.zeros(x.shape[:-2], dtype=torch.float64, device=x.device)
    compute = x.dtype if x.dtype in _ITSELF else torch.promote_types(x.dtype, torch.float32)
    found = None if waits else _norms(x.to(compute))
    for norm in [] if found is None else found.flatten().tolist():
        if not (low < norm < high and norm > eps):
            found = None
            break
    if found is not None:
        torch.div(x, found.to(compute), out=out)
    else:
        found = _divide_at_any_scale(*((x, out) if x.ndim == 3 else (x[None], out[None])), compute, eps)
    return (out if carrier == storage else out.copy_(out.to(storage))), found.reshape(x.shape[:-2])


def divide_by(
    x: Tensor,  # (k, m, n), fp32 or fp64
    norms: Tensor,  # (k, 1, 1), fp64
    eps: float | Tensor,
) -> Tensor:  # (k, m, n)
    """``x / max(norm, eps)`` in place, where ``norms`` are of matrices that ``x`` may be parts of. Zero stays zero.

    As :func:`normalize`, at any scale: both are divided by a power of two first.
    """
    clamped = norms.clamp(min=eps)
    exponent = torch.frexp(clamped).exponent.clamp(-126, 126)
    inverse = _power_of_two(-torch.where(clamped.isfinite(), exponent, 0))
    divisor = (clamped * inverse).to(x.dtype)  # in which a small eps may be zero; NaN stays
    return x.mul_(inverse.to(x.dtype)).div_(torch.where(divisor == 0, 1.0, divisor))


def _divide_at_any_scale(x: Tensor, out: Tensor, compute: torch.dtype, eps: float) -> Tensor:
    """:func:`normalize` without its last rounding; returns the norms, fp64, and waits for no device.

    Squares of 1e±30 leave fp32's range, and so does 1e40, which 1e-40 is to be multiplied with. So matrices are scaled
    by a power of two first, which changes no bit of the result.
    """
    rows = max(1, _CHUNK * x.shape[-2] // x.numel())
    chunks = torch.split(x, rows, dim=-2)
    largest = torch.stack([chunk.abs().amax(dim=(-2, -1), keepdim=True) for chunk in chunks]).amax(dim=0).to(compute)
    widest = 126 if compute == torch.float32 else 1022  # a power of two whose inverse is one as well
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent.clamp(-widest, widest), 0)
    power, inverse = _power_of_two(exponent), _power_of_two(-exponent)
    scale = inverse.to(compute)
    parts = torch.stack([_norms(chunk.to(compute) * scale) for chunk in chunks])
    norms: Tensor = torch.linalg.vector_norm(parts, dim=0, dtype=torch.float64)  # of the scaled matrices
    for chunk, part in zip(chunks, torch.split(out, rows, dim=-2), strict=True):
        part.copy_(divide_by(chunk.to(compute) * scale, norms, eps * inverse))
    return norms * power


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly, in fp64; of integers from -1022 to 1023. ``torch.ldexp`` goes by fp32."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _norms(x: Tensor) -> Tensor:  # (..., m, n) -> (..., 1, 1)
    """Norms of matrices, fp64: of small ones in one call, else of rows, and of these."""
    rows = x if x.shape[-2] * x.shape[-1] <= _FEW else torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=(-2, -1), dtype=torch.float64, keepdim=True)
    return norms


# -- the iteration -------------------------------------------------------------------------------------------


def iterate(
    x: Tensor,
    variant: Variant,
    steps: Polynomial,
    arithmetic: Arithmetic,
    spare: Tensor | None = None,
    free: list[Tensor] | None = None,
    total: Total | None = None,
) -> Tensor:
    """Run ``steps`` in the form of ``variant`` on normalised ``x``, ``(m, n)`` or ``(k, m, n)``, in the carrier.

    The result is in ``x`` or in ``spare``, which is as ``x``, and both are overwritten. Beside these two, intermediate
    matrices take four squares of the small side, or with blocks of squares as many as the longest has.

    Args:
        spare, free: what a call before has left, with the squares that hold nothing any more: fresh memory costs the
            CPU more than a product of small matrices.
    """
    spare = torch.empty_like(x) if spare is None else spare
    free = [] if free is None else free
    if isinstance(steps, Squares):
        for squares in steps.blocks:
            x, spare = _block_of_squares(x, squares, arithmetic, spare, free, total), x
        return x
    if variant.method == "standard":
        return _standard_steps(x, steps, arithmetic, spare, free, total)
    for start, stop in itertools.pairwise((0, *variant.restarts, len(steps))):
        x, spare = _gram_block(x, steps[start:stop], arithmetic, start > 0, spare, free, total), x
    return x


# Below, ``free`` are squares to write to. Where there is none, ``out=None`` makes a new one.


def _add_up(gram: Tensor, arithmetic: Arithmetic, total: Total) -> None:
    """The sum over all slices of what ``storage`` holds of each, in place; added up in fp32 or wider, then rounded."""
    wide = gram if gram.dtype in (torch.float32, torch.float64) else gram.float()
    total(wide)
    if wide is not gram:
        gram.copy_(wide)
    arithmetic.round_(gram)


def _standard_steps(
    x: Tensor,
    steps: Coefficients,
    arithmetic: Arithmetic,
    spare: Tensor,
    free: list[Tensor],
    total: Total | None,
) -> Tensor:
    """Steps of the standard form; the result is in ``x`` or ``spare``."""
    _, add, gram, symmetric = arithmetic.operations(x.ndim)
    wide = total is not None or x.shape[-2] <= x.shape[-1]
    x_t, spare_t = x.mT, spare.mT
    r, z, y = free.pop() if free else None, free.pop() if free else None, None
    thin = total is not None and is_thin(x.shape[-2], x.shape[-1], arithmetic.storage)
    for a, b, c in steps:
        r = gram(x, x_t, out=r) if wide else gram(x_t, x, out=r)
        if total is not None:
            _add_up(r, arithmetic, total)
        if thin:  # aX + R (bX + cRX), of this slice alone, where every rank would compute all of R²
            y = add(x, r, x, beta=b, alpha=c, out=y)
            add(x, r, y, beta=a, out=spare)
            x, x_t, spare, spare_t = spare, spare_t, x, x_t
            continue
        z = symmetric(r, r, r, alpha=c, beta=b, out=z)
        if wide:
            add(x, z, x, beta=a, out=spare)
        else:
            add(x, x, z.mT, beta=a, out=spare)
        x, x_t, spare, spare_t = spare, spare_t, x, x_t
    free += () if r is None or z is None else (r, z)  # without a step there are none
    return x


def _gram_block(
    x: Tensor,
    coefficients: Coefficients,
    arithmetic: Arithmetic,
    restarted: bool,
    out: Tensor,
    free: list[Tensor],
    total: Total | None,
) -> Tensor:
    """``X`` after the steps of one restart block, in ``out``.

    A factor ``Z + aI`` is not multiplied with: the identity's share is added inside the product instead, as
    in half precision ``a`` costs the small entries of ``Z`` their last digits. The accumulated ``Q`` is kept
    whole: kept as ``Q - sI`` it cancels where ``Q`` is small, which measured ten times worse.
    """
    if len(coefficients) == 1:
        _standard_steps(x, coefficients, arithmetic, out, free, total)
        return out
    multiply, add, gram, symmetric = arithmetic.operations(x.ndim)
    wide = total is not None or x.shape[-2] <= x.shape[-1]
    last = len(coefficients) - 1
    r = gram(x, x.mT, out=free.pop() if free else None) if wide else gram(x.mT, x, out=free.pop() if free else None)
    if total is not None:
        _add_up(r, arithmetic, total)
    q: Tensor | None = None
    for index, (a, b, c) in enumerate(coefficients):
        z = symmetric(r, r, r, alpha=c, beta=b, out=free.pop() if free else None)
        if index < last:
            if restarted and index == 0 and arithmetic.whole_v:
                v = add(r, r, z, beta=a, out=free.pop() if free else None)
                r = symmetric(v, z, v, beta=a, out=r, b_symmetric=False)
            else:
                v = symmetric(r, r, z, beta=a, out=free.pop() if free else None)
                r = symmetric(v, z, v, beta=a, out=r)
            free.append(v)
        if q is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q = arithmetic.round_(z)
        else:
            before, q = q, symmetric(q, q, z, beta=a, out=free.pop() if free else None)
            free += (before, z)
    assert q is not None
    free += (r, q)
    return multiply(q, x, out=out) if wide else multiply(x, q.mT, out=out)


def _block_of_squares(
    x: Tensor,
    squares: Sequence[Square],
    arithmetic: Arithmetic,
    out: Tensor,
    free: list[Tensor],
    total: Total | None,
) -> Tensor:
    """``X`` after one block, in ``out``. Each ``S`` is stored once, as the next factor and a later addend."""
    wide = total is not None or x.shape[-2] <= x.shape[-1]
    x_t = x.mT
    stored = [arithmetic.gram(*((x, x_t) if wide else (x_t, x)), out=free.pop() if free else None)]
    if total is not None:
        _add_up(stored[0], arithmetic, total)
    for square in squares[:-1]:
        stored.append(arithmetic.square(stored[-1], square, stored, out=free.pop() if free else None))
    q = arithmetic.square(stored[-1], squares[-1], stored, out=stored[0])  # R is read there for the last time
    free += stored
    return arithmetic.multiply(q, x, out=out) if wide else arithmetic.multiply(x, q.mT, out=out)
