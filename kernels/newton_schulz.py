"""Orthogonalization by Newton–Schulz: the standard iteration, and the Gram form on the small side.

With ``X`` the normalised matrix, small side first, a standard step is ``R = XXᵀ; Z = bR + cR²; X ← ZX + aX``.
The Gram form carries ``R`` and the accumulated polynomial ``Q`` instead, and applies ``Q`` to ``X``
once per restart block; it is the same polynomial, exactly, and rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .arithmetic import Arithmetic, make_arithmetic
from .coefficients import Polynomial, coefficient_sequence, span_restarts
from .iteration import Iteration, Workspace, iterate, make_iteration
from .normalization import check_eps, divide
from .precision import full_precision
from .replay import replayed
from .squares import Squares
from .storage import Storage, storage_dtype, storage_spans
from .variant import Backend, Method, Variant, adapted, choose_variant, relative_cost, squares_cost, variant_fault

_CONVERT = "convert it, for example with x.float()"

CoefficientsArg: TypeAlias = "str | Sequence[float] | Sequence[Sequence[float]]"


def orthogonalize(
    x: Tensor,
    *,
    coefficients: CoefficientsArg = "polar_express",
    steps: int = 5,
    method: Method = "auto",
    restarts: Literal["auto"] | Sequence[int] = "auto",
    dtype: Storage | None = None,
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
            does not multiply it. ``"mixed"``, on CPU: the first two steps in fp32, the others in bf16.
        backend: what computes products whose result is symmetric: ``"torch"`` all of it, ``"split"`` (CPU) block
            rows up to the diagonal, ``"triton"`` (CUDA) lower tiles; ``"auto"`` by rule.
        eps: lower clamp of the norm; 0 is exact.
        variant: what a measurement chose instead of the rules; excludes method, restarts and backend.

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
    plan = _plan(
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
    if plan.spans is not None:
        with full_precision(x.device):
            result = _through(normalized, plan.spans)
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
    storage: Storage,
) -> Tensor:  # (k, m, n)
    """Orthogonalize matrices that :func:`normalize` made, piece by piece; ``x`` is overwritten or returned.

    The result is in ``x``'s dtype.
    """
    if not x.numel():
        return x
    if variant.replay:
        eager = replace(variant, replay=False)
        return replayed(lambda source: run(source, eager, coefficients, storage), x, (eager, coefficients, storage))
    spans = _spans(variant, coefficients, storage, x.device)
    with full_precision(x.device):
        if x.shape[0] == 1:  # it may be small, where every call counts
            result = _through(x[0], spans).unsqueeze(0)
            return result if result.dtype == x.dtype else result.to(x.dtype)
        if variant.piece >= len(x):
            return _through(x, spans).to(x.dtype)
        workspaces: list[Workspace] = []
        for piece in torch.split(x, variant.piece):
            source = piece if len(piece) > 1 else piece[0]
            if not workspaces or workspaces[0].spare.shape != source.shape:  # the last piece may be smaller
                empty = (torch.empty_like(source, dtype=arithmetic.carrier) for _, arithmetic in spans)
                workspaces = [Workspace(spare, []) for spare in empty]
            result = _through(source, spans, workspaces)
            if result is not source:
                source.copy_(result)
    return x


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a call of :func:`orthogonalize` runs; ``spans`` are those of a single matrix."""

    sequence: Polynomial
    storage: Storage
    variant: Variant
    spans: _Spans | None


@lru_cache(maxsize=4096, typed=True)  # a flag is no number
def _plan(
    size: torch.Size,
    x_dtype: torch.dtype,
    device: torch.device,
    coefficients: str | Polynomial,
    steps: int,
    method: Method,
    restarts: Literal["auto"] | tuple[int, ...],
    dtype: Storage | None,
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
        variant = _usable(variant, shape, sequence, storage, device)
    alone = len(size) == 2 and not variant.replay
    return _Plan(sequence, storage, variant, _spans(variant, sequence, storage, device) if alone else None)


_Spans: TypeAlias = "tuple[tuple[Iteration, Arithmetic], ...]"


@lru_cache(maxsize=4096)
def _spans(variant: Variant, coefficients: Polynomial, storage: Storage, device: torch.device) -> _Spans:
    """What computes the steps that are stored in one dtype, one after the other."""
    if isinstance(storage, torch.dtype):
        return ((make_iteration(variant, coefficients, storage), make_arithmetic(variant, device, storage)),)
    assert not isinstance(coefficients, Squares)
    found = []
    for dtype, start, stop in storage_spans(storage, len(coefficients)):
        own = replace(variant, restarts=span_restarts(variant.restarts, start, stop))
        found.append((make_iteration(own, coefficients[start:stop], dtype), make_arithmetic(own, device, dtype)))
    return tuple(found)


def _through(x: Tensor, spans: _Spans, workspaces: Sequence[Workspace] | None = None) -> Tensor:
    for index, (iteration, arithmetic) in enumerate(spans):
        if index:
            x = arithmetic.round_(x.to(arithmetic.carrier))
        x = iterate(x, iteration, arithmetic, workspaces[index] if workspaces else None)
    return x


def _usable(
    variant: Variant,
    shape: tuple[int, int],
    coefficients: Polynomial,
    storage: Storage,
    device: torch.device,
) -> Variant:
    """``variant`` with restarts that are safe for these coefficients.

    Raises:
        ValueError: it cannot run on ``device`` in ``storage``.
    """
    fault = variant_fault(variant, device, storage)
    if fault is not None:
        raise ValueError(f"variant={str(variant)!r} cannot run: {fault}; leave it out, or measure on this device")
    return adapted(variant, shape, coefficients, storage, device)


def newton_schulz_flops(
    shape: tuple[int, int], coefficients: CoefficientsArg, steps: int, dtype: Storage | None, device: torch.device
) -> int:
    """Operations that :func:`orthogonalize` takes for one fp32 matrix of ``shape``, with whole products."""
    storage = storage_dtype(torch.float32, device, dtype)
    sequence = coefficient_sequence(coefficients, steps)
    if isinstance(sequence, Squares):
        return 2 * int(squares_cost(shape, sequence))
    variant = choose_variant(shape, 1, sequence, storage, device, backend="torch")
    return iteration_flops(shape, steps, variant.restarts if variant.method == "gram" else None)


def iteration_flops(shape: tuple[int, int], steps: int, restarts: Sequence[int] | None) -> int:
    """Operations for one matrix with whole products in the Gram form; ``restarts=None``: the standard form."""
    return 2 * int(relative_cost(shape, steps, restarts))
