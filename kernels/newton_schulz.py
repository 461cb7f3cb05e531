"""Orthogonalization by Newton–Schulz: the standard iteration, and the Gram form on the small side.

With ``X`` the normalised matrix, small side first, a standard step is ``R = XXᵀ; Z = bR + cR²; X ← ZX + aX``.
The Gram form carries ``R`` and the accumulated polynomial ``Q`` instead, and applies ``Q`` to ``X``
once per restart block; it is the same polynomial, exactly, and rounds differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .arithmetic import Arithmetic, make_arithmetic
from .coefficients import Coefficients, Polynomial, Square, Squares, checked_restarts, coefficient_sequence
from .device import full_precision, storage_dtype
from .normalization import check_eps, divide
from .replay import replayed
from .variant import (
    Backend,
    Method,
    Variant,
    choose_variant,
    is_thin,
    relative_cost,
    squares_cost,
    variant_fault,
    whole_v,
)

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
    plan = planned_call(
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
    normalized, _ = divide(x, plan.storage, eps)
    if plan.alone is not None:
        with full_precision(x.device):
            result = iterate(normalized, *plan.alone)
    else:
        stack = normalized if normalized.ndim == 3 else normalized[None]
        result = run(stack, plan.variant, plan.sequence, plan.storage)
        result = result if normalized.ndim == 3 else result[0]
    result = result if result.dtype == x.dtype else result.to(x.dtype)
    return result if len(size) <= 3 else result.reshape(size)


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
    iteration, arithmetic = computation(variant, coefficients, storage, x.device)
    with full_precision(x.device):
        if x.shape[0] == 1:  # it may be small, where every call counts
            return iterate(x[0], iteration, arithmetic, None, total).unsqueeze(0)
        if variant.piece >= len(x):
            return iterate(x, iteration, arithmetic, None, total)
        workspace: Workspace | None = None
        for piece in torch.split(x, variant.piece):
            source = piece if len(piece) > 1 else piece[0]
            if workspace is None or workspace.spare.shape != source.shape:  # the last piece may be smaller
                workspace = Workspace(torch.empty_like(source), [])
            result = iterate(source, iteration, arithmetic, workspace, total)
            if result is not source:
                source.copy_(result)
    return x


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a call of :func:`orthogonalize` runs; ``alone`` is what computes a single matrix."""

    sequence: Polynomial
    storage: torch.dtype
    variant: Variant
    alone: tuple[Iteration, Arithmetic] | None


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
) -> _Plan:
    """Checks what does not change from call to call, which for a small matrix takes as long as its products."""
    if not x_dtype.is_floating_point:
        raise TypeError(f"x must be a floating-point tensor, got {x_dtype}; {_CONVERT}")
    if len(size) < 2:
        raise ValueError(f"x must have two or more dimensions, got shape {tuple(size)}; vectors belong on AdamW")
    check_eps(eps)
    if variant is not None and not (method == restarts == backend == "auto"):
        raise ValueError(f"variant={variant} excludes method, restarts and backend; leave them at 'auto'")
    storage = storage_dtype(x_dtype, device, dtype)
    sequence = coefficient_sequence(coefficients, steps) if isinstance(coefficients, str) else coefficients
    shape = (size[-2], size[-1])
    if variant is None:
        k = max(1, math.prod(size[:-2]))
        variant = choose_variant(shape, k, sequence, storage, device, method=method, restarts=restarts, backend=backend)
    else:
        _require_usable(variant, sequence, storage, device)
    alone = len(size) == 2 and not variant.replay
    return _Plan(sequence, storage, variant, computation(variant, sequence, storage, device) if alone else None)


@lru_cache(maxsize=4096)
def computation(
    variant: Variant, coefficients: Polynomial, storage: torch.dtype, device: torch.device
) -> tuple[Iteration, Arithmetic]:
    """What computes the steps."""
    return make_iteration(variant, coefficients, storage), make_arithmetic(variant, device, storage)


def _require_usable(variant: Variant, coefficients: Polynomial, storage: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for a variant that cannot run here, or whose restarts are not safe for these coefficients."""
    fault = variant_fault(variant, device, storage)
    if fault is not None:
        raise ValueError(f"variant={str(variant)!r} cannot run: {fault}; leave it out")
    if variant.method == "gram":
        checked_restarts(variant.restarts, coefficients, storage)


def newton_schulz_flops(
    shape: tuple[int, int], coefficients: CoefficientsArg, steps: int, dtype: torch.dtype | None, device: torch.device
) -> int:
    """Operations that :func:`orthogonalize` takes for one fp32 matrix of ``shape``, with whole products."""
    storage = storage_dtype(torch.float32, device, dtype)
    sequence = coefficient_sequence(coefficients, steps)
    if isinstance(sequence, Squares):
        return 2 * int(squares_cost(shape, sequence))
    variant = choose_variant(shape, 1, sequence, storage, device, backend="torch")
    return 2 * int(relative_cost(shape, steps, variant.restarts if variant.method == "gram" else None))


# -- the iteration -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Iteration:
    """What a Newton–Schulz run computes; ``restarts`` are the Gram form's, ``dtype`` is storage.

    ``whole_v``: the first ``V`` after a restart is computed whole, not as a symmetric product. Blocks of squares are
    the same in both forms.
    """

    coefficients: Polynomial
    method: Literal["standard", "gram"]
    restarts: tuple[int, ...]
    dtype: torch.dtype
    whole_v: bool = False


def make_iteration(variant: Variant, coefficients: Polynomial, storage: torch.dtype) -> Iteration:
    """What ``variant`` computes."""
    return Iteration(coefficients, variant.method, variant.restarts, storage, whole_v=whole_v(variant.backend, storage))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers that are written again and again: fresh memory costs the CPU more than a product of small matrices.

    ``spare`` is of the shape of the matrices, ``squares`` of their small side, those that hold nothing any more.
    """

    spare: Tensor
    squares: list[Tensor]


def iterate(
    x: Tensor,
    iteration: Iteration,
    arithmetic: Arithmetic,
    workspace: Workspace | None = None,
    total: Total | None = None,
) -> Tensor:
    """Run ``iteration`` on normalised ``x``, ``(m, n)`` or ``(k, m, n)``, in ``arithmetic``'s carrier.

    The result is in ``x`` or in the workspace's ``spare``, and both are overwritten. Beside these two, intermediate
    matrices take four squares of the small side, or with blocks of squares as many as the longest has.
    """
    steps = iteration.coefficients
    spare = torch.empty_like(x) if workspace is None else workspace.spare
    free: list[Tensor] = [] if workspace is None else workspace.squares
    if isinstance(steps, Squares):
        for squares in steps.blocks:
            x, spare = _block_of_squares(x, squares, arithmetic, spare, free, total), x
        return x
    if iteration.method == "standard":
        return _standard_steps(x, steps, arithmetic, spare, free, total)
    for start, stop in itertools.pairwise((0, *iteration.restarts, len(steps))):
        block = steps[start:stop]
        x, spare = _gram_block(x, block, arithmetic, iteration.whole_v and start > 0, spare, free, total), x
    return x


# Below, ``free`` are squares of a workspace to write to. Where there is none, ``out=None`` makes a new one.


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
    total: Total | None = None,
) -> Tensor:
    """Steps of the standard form; the result is in ``x`` or ``spare``."""
    _, add, gram, symmetric = arithmetic.matrices if x.ndim == 2 else arithmetic.batches
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
    whole_v: bool,
    out: Tensor,
    free: list[Tensor],
    total: Total | None = None,
) -> Tensor:
    """``X`` after the steps of one restart block, in ``out``.

    A factor ``Z + aI`` is not multiplied with: the identity's share is added inside the product instead, as
    in half precision ``a`` costs the small entries of ``Z`` their last digits. The accumulated ``Q`` is kept
    whole: kept as ``Q - sI`` it cancels where ``Q`` is small, which measured ten times worse.
    """
    if len(coefficients) == 1:
        _standard_steps(x, coefficients, arithmetic, out, free, total)
        return out
    multiply, _, gram, symmetric = arithmetic.matrices if x.ndim == 2 else arithmetic.batches
    wide = total is not None or x.shape[-2] <= x.shape[-1]
    last = len(coefficients) - 1
    r = gram(x, x.mT, out=free.pop() if free else None) if wide else gram(x.mT, x, out=free.pop() if free else None)
    if total is not None:
        _add_up(r, arithmetic, total)
    q: Tensor | None = None
    for index, (a, b, c) in enumerate(coefficients):
        z = symmetric(r, r, r, alpha=c, beta=b, out=free.pop() if free else None)
        if index < last:
            if whole_v and index == 0:
                v = arithmetic.product(r, z, r, beta=a, out=free.pop() if free else None)
                r = arithmetic.symmetric(z, v, v, beta=a, out=r, b_symmetric=False)
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
    total: Total | None = None,
) -> Tensor:
    """``X`` after one block, in ``out``. Each ``S`` is stored once, as the next factor and a later addend."""
    wide = total is not None or x.shape[-2] <= x.shape[-1]
    stored = [arithmetic.gram(x if wide else x.mT, out=free.pop() if free else None)]
    if total is not None:
        _add_up(stored[0], arithmetic, total)
    for square in squares[:-1]:
        stored.append(arithmetic.square(stored[-1], square, stored, out=free.pop() if free else None))
    q = arithmetic.square(stored[-1], squares[-1], stored, out=stored[0])  # R is read there for the last time
    free += stored
    return arithmetic.product(q, x, out=out) if wide else arithmetic.product(x, q.mT, out=out)
