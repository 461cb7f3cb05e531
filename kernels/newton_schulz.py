"""Orthogonalization by Newton–Schulz: the standard iteration, and the Gram form on the small side.

With ``X`` the normalised matrix, small side first, a standard step is ``R = XXᵀ; Z = bR + cR²; X ← ZX + aX``.
The Gram form carries ``R`` and the accumulated polynomial ``Q`` instead, and applies ``Q`` to ``X``
once per restart block; it is the same polynomial, exactly, and rounds differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .coefficients import Coefficients, coefficient_sequence
from .products import Arithmetic, carrier_dtype, full_accumulation, make_arithmetic
from .variant import HALF, Backend, Method, Variant, adapted, choose_variant, relative_cost, variant_fault, whole_v

CoefficientsArg: TypeAlias = "str | Sequence[float] | Sequence[Sequence[float]]"

_STORAGE = (*HALF, torch.float32, torch.float64)

# Norms of matrices that must be scaled first: so many elements at a time, which bounds the scaled copy.
_NORM_CHUNK = 1 << 22

# Norms between these come from entries whose squares are in fp32's range, but for some that are too small to matter.
_SAFE_NORMS = (1e-10, 1e18)


@dataclass(frozen=True, slots=True)
class Iteration:
    """What a Newton–Schulz run computes; ``restarts`` are the Gram form's, ``dtype`` is storage.

    ``whole_v``: the first ``V`` after a restart is computed whole, not as a symmetric product.
    """

    coefficients: Coefficients
    method: Literal["standard", "gram"]
    restarts: tuple[int, ...]
    dtype: torch.dtype
    whole_v: bool = False


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
    variant: Variant | None = None,
) -> Tensor:
    """The orthogonal factor ``U Vᵀ`` of each matrix, approximately: singular values near one.

    Each matrix is divided by its Frobenius norm first, so its scale does not matter; a zero matrix gives
    exact zeros, and NaN or inf stays in its own matrix.

    Args:
        x: ``(..., m, n)``, floating point, any strides; not modified.
        coefficients: ``"polar_express"``, ``"classic"``, ``"you"``, one ``(a, b, c)``, or a sequence of them.
        steps: number of Newton–Schulz steps.
        method: ``"standard"``, ``"gram"``, or ``"auto"``: the cheaper one by rule; standard in bf16.
        restarts: Gram form: the 0-based steps before which it restarts from ``X``. ``"auto"`` takes the
            fewest that are safe for these coefficients in ``dtype``; others select the Gram form.
        dtype: dtype that intermediate matrices are stored in; products of halves accumulate in fp32. ``None``:
            fp64 for fp64 input, else fp32 on CPU and fp16 elsewhere. On CPU, fp16 and bf16 are emulated.
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
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating-point tensor, got {kind}; convert it, for example with x.float()")
    if x.ndim < 2:
        raise ValueError(f"x must have two or more dimensions, got shape {tuple(x.shape)}; vectors belong on AdamW")
    check_eps(eps)
    if variant is not None and not (method == restarts == backend == "auto"):
        raise ValueError(f"variant={variant} excludes method, restarts and backend; leave them at 'auto'")
    storage = storage_dtype(x.dtype, x.device, dtype)
    sequence = coefficient_sequence(coefficients, steps)
    shape = (x.shape[-2], x.shape[-1])
    k = math.prod(x.shape[:-2])
    if variant is None:
        variant = choose_variant(
            shape,
            max(1, k),
            sequence,
            storage,
            x.device,
            method=method,
            restarts=restarts if isinstance(restarts, str) else tuple(restarts),
            backend=backend,
        )
    else:
        variant = usable(variant, shape, sequence, storage, x.device)
    if x.numel() == 0:
        return torch.empty_like(x)
    normalized, _ = normalize(x.reshape(k, *shape), storage, eps)
    result = run(normalized, variant, sequence, storage)
    # What a graph wrote is overwritten by its next replay.
    return result.to(x.dtype, copy=variant.replay).reshape(x.shape)


def run(
    x: Tensor,  # (k, m, n)
    variant: Variant,
    coefficients: Coefficients,
    storage: torch.dtype,
) -> Tensor:  # (k, m, n)
    """Orthogonalize matrices that :func:`normalize` made, piece by piece; ``x`` is overwritten or returned.

    The result is in ``x``'s dtype. One that was replayed from a CUDA graph stays valid until the next replay.
    """
    if variant.replay:
        from .replay import replayed

        return replayed(x, variant, coefficients, storage)
    arithmetic = make_arithmetic(variant, x.device, storage)
    iteration = make_iteration(variant, coefficients, storage)
    with full_accumulation() if x.device.type == "cuda" else nullcontext():
        if variant.piece >= len(x):
            return iterate(x if len(x) > 1 else x[0], iteration, arithmetic).view(x.shape)
        workspace: Workspace | None = None
        for piece in torch.split(x, variant.piece):
            source = piece if len(piece) > 1 else piece[0]
            if workspace is None or workspace.spare.shape != source.shape:  # the last piece may be smaller
                workspace = Workspace(torch.empty_like(source), [])
            result = iterate(source, iteration, arithmetic, workspace)
            if result is not source:
                source.copy_(result)
    return x


@lru_cache(maxsize=4096)
def make_iteration(variant: Variant, coefficients: Coefficients, storage: torch.dtype) -> Iteration:
    """What ``variant`` computes."""
    return Iteration(coefficients, variant.method, variant.restarts, storage, whole_v=whole_v(variant.backend, storage))


def usable(
    variant: Variant,
    shape: tuple[int, int],
    coefficients: Coefficients,
    storage: torch.dtype,
    device: torch.device,
) -> Variant:
    """``variant`` with restarts that are safe for these coefficients.

    Raises:
        ValueError: it cannot run on ``device`` in ``storage``.
    """
    fault = variant_fault(variant, shape, device, storage)
    if fault is not None:
        raise ValueError(f"variant={str(variant)!r} cannot run: {fault}; leave it out, or measure on this device")
    return adapted(variant, shape, coefficients, storage, device)


def newton_schulz_flops(
    shape: tuple[int, int], coefficients: CoefficientsArg, steps: int, dtype: torch.dtype | None, device: torch.device
) -> int:
    """Operations that :func:`orthogonalize` takes for one fp32 matrix of ``shape``, with whole products."""
    storage = storage_dtype(torch.float32, device, dtype)
    sequence = coefficient_sequence(coefficients, steps)
    variant = choose_variant(shape, 1, sequence, storage, device, backend="torch")
    return iteration_flops(shape, steps, variant.restarts if variant.method == "gram" else None)


def iteration_flops(shape: tuple[int, int], steps: int, restarts: Sequence[int] | None) -> int:
    """Operations for one matrix with whole products in the Gram form; ``restarts=None``: the standard form."""
    return 2 * int(relative_cost(shape, steps, restarts))


def storage_dtype(x_dtype: torch.dtype, device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to store intermediate matrices in; ``None`` is the default for input of ``x_dtype`` on ``device``."""
    if dtype is None:
        if x_dtype == torch.float64:
            return torch.float64
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype not in _STORAGE:
        raise TypeError(f"dtype={dtype!r} is not supported; use None or one of {', '.join(map(str, _STORAGE))}")
    return dtype


def check_eps(eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps!r} must be finite and non-negative; 0 is exact")


def normalize(
    x: Tensor,  # (k, m, n)
    storage: torch.dtype,
    eps: float,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x / max(‖x‖, eps)`` of each matrix, rounded once to ``storage``, and the norms, fp64 ``(k,)``.

    Zero stays exact zero. A norm is not finite where an entry is not. The cast is last: fp16 has no 1e-8. ``out`` may
    be ``x``.
    """
    norms = frobenius_norms(x)
    compute = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cpu":  # numbers: a dozen small operations take as long as a small matrix
        factor = torch.tensor([_inverse(norm, eps, torch.finfo(compute)) for norm in norms.tolist()], dtype=compute)
    else:
        factor = _inverses(norms, eps, compute)
    carrier = carrier_dtype(x.device, storage)
    if out is None:
        out = torch.empty(x.shape, dtype=carrier, device=x.device)
    torch.mul(x, factor[:, None, None], out=out)
    return (out if carrier == storage else out.copy_(out.to(storage))), norms


def _inverses(norms: Tensor, eps: float, compute: torch.dtype) -> Tensor:
    """:func:`_inverse` of each, without waiting for a device."""
    limits = torch.finfo(compute)
    clamped = norms.clamp(min=eps)
    in_range = clamped.reciprocal().clamp(limits.smallest_normal * 2.0**-20, limits.max)
    return torch.where(clamped == 0, 0.0, in_range).to(compute)


def _inverse(norm: float, eps: float, limits: torch.finfo) -> float:
    """``1 / max(norm, eps)``, zero for zero; NaN stays.

    A finite nonzero factor: a norm outside the range of the dtype must not turn numbers into zeros or NaN.
    """
    norm = eps if norm < eps else norm
    if norm == 0 or math.isnan(norm):
        return norm
    return min(max(1 / norm, limits.smallest_normal * 2.0**-20), limits.max)


def frobenius_norms(x: Tensor) -> Tensor:
    """Norms of the matrices ``(k, m, n)`` in fp64, ``(k,)``; nothing waits for a device.

    Rows are summed in ``x``'s dtype or fp32, and their norms in fp64. Squares of 1e±30 leave fp32's range: matrices
    are then scaled by a power of two first, which changes no bit of the result but its exponent.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cpu":
        norms = _norms_of_rows(x.to(compute))
        if all(_SAFE_NORMS[0] < norm < _SAFE_NORMS[1] for norm in norms.tolist()):
            return norms
    rows = max(1, _NORM_CHUNK * x.shape[-2] // x.numel())
    chunks = torch.split(x, rows, dim=-2)
    largest = torch.stack([chunk.abs().amax(dim=(-2, -1)) for chunk in chunks]).amax(dim=0).to(compute)
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent.clamp(-120, 120), 0)
    scale = torch.ldexp(torch.ones_like(largest), -exponent)[:, None, None]
    norms = torch.stack([_norms_of_rows(chunk.to(compute) * scale) for chunk in chunks])
    return torch.ldexp(torch.linalg.vector_norm(norms, dim=0), exponent)


def _norms_of_rows(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1, dtype=torch.float64)
    return norms


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers that are written again and again: fresh memory costs the CPU more than a product of small matrices.

    ``spare`` is of the shape of the matrices, ``squares`` of their small side, those that hold nothing any more.
    """

    spare: Tensor
    squares: list[Tensor]

    def square(self) -> Tensor | None:
        """A buffer to write to, or ``None`` for a new one."""
        return self.squares.pop() if self.squares else None

    def release(self, *squares: Tensor) -> None:
        """These are not read any more."""
        self.squares.extend(squares)


def iterate(x: Tensor, iteration: Iteration, arithmetic: Arithmetic, workspace: Workspace | None = None) -> Tensor:
    """Run ``iteration`` on normalised ``x``, ``(m, n)`` or ``(k, m, n)``, in ``arithmetic``'s carrier.

    The result is in ``x`` or in the workspace's ``spare``, and both are overwritten. Beside these two, intermediate
    matrices take four squares of the small side.
    """
    workspace = workspace or Workspace(torch.empty_like(x), [])
    spare = workspace.spare
    if iteration.method == "standard":
        for a, b, c in iteration.coefficients:
            r = _gram(x, arithmetic, workspace)
            z = arithmetic.symmetric(r, r, r, alpha=c, beta=b, out=workspace.square())
            x, spare = _apply(z, a, x, arithmetic, spare), x
            workspace.release(r, z)
        return x
    for start, stop in itertools.pairwise((0, *iteration.restarts, len(iteration.coefficients))):
        block = iteration.coefficients[start:stop]
        x, spare = _gram_block(x, block, arithmetic, iteration.whole_v and start > 0, spare, workspace), x
    return x


def _gram_block(
    x: Tensor, coefficients: Coefficients, arithmetic: Arithmetic, whole_v: bool, out: Tensor, workspace: Workspace
) -> Tensor:
    """``X`` after the steps of one restart block, in ``out``.

    A factor ``Z + aI`` is not multiplied with: the identity's share is added inside the product instead, as
    in half precision ``a`` costs the small entries of ``Z`` their last digits. The accumulated ``Q`` is kept
    whole: kept as ``Q - sI`` it cancels where ``Q`` is small, which measured ten times worse.
    """
    r = _gram(x, arithmetic, workspace)
    q: Tensor | None = None
    for index, (a, b, c) in enumerate(coefficients):
        z = arithmetic.symmetric(r, r, r, alpha=c, beta=b, out=workspace.square())
        if len(coefficients) == 1:
            workspace.release(r, z)
            return _apply(z, a, x, arithmetic, out)
        if index + 1 < len(coefficients):
            whole = whole_v and index == 0
            multiply = arithmetic.product if whole else arithmetic.symmetric
            v = multiply(r, z, r, beta=a, out=workspace.square())
            r = arithmetic.symmetric(z, v, v, beta=a, out=r, b_symmetric=not whole)
            workspace.release(v)
        if q is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q = arithmetic.round_(z)
        else:
            before, q = q, arithmetic.symmetric(q, z, q, beta=a, out=workspace.square())
            workspace.release(before, z)
    assert q is not None
    workspace.release(r, q)
    return _apply(q, 0.0, x, arithmetic, out)


def _gram(x: Tensor, arithmetic: Arithmetic, workspace: Workspace) -> Tensor:
    """The smaller of ``XXᵀ`` and ``XᵀX``."""
    return arithmetic.gram(x if x.shape[-2] <= x.shape[-1] else x.mT, out=workspace.square())


def _apply(q: Tensor, scale: float, x: Tensor, arithmetic: Arithmetic, out: Tensor) -> Tensor:
    """``(q + scale · I)`` times ``x`` on its small side, into ``out``; ``q`` is symmetric."""
    addend = x if scale else None
    if x.shape[-2] <= x.shape[-1]:
        return arithmetic.product(q, x, addend, beta=scale, out=out)
    return arithmetic.product(x, q.mT, addend, beta=scale, out=out)
