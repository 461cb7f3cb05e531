"""Dividing a matrix by its Frobenius norm, at any scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arithmetic import carrier_dtype
from .streams import streams_of

# Norms of matrices that must be scaled first: so many elements at a time, which bounds the scaled copy.
_NORM_CHUNK = 1 << 22
# Norms between these come from entries whose squares are in fp32's range, but for some that are too small to matter.
_SAFE_NORMS = (1e-10, 1e18)


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
    norms = _frobenius_norms(x)
    compute = torch.promote_types(x.dtype, torch.float32)
    if streams_of(x.device) is None:  # numbers: a dozen small operations take as long as a small matrix
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


def _frobenius_norms(x: Tensor) -> Tensor:
    """Norms of the matrices ``(k, m, n)`` in fp64, ``(k,)``; nothing waits for a device.

    Rows are summed in ``x``'s dtype or fp32, and their norms in fp64. Squares of 1e±30 leave fp32's range: matrices
    are then scaled by a power of two first, which changes no bit of the result but its exponent.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    if streams_of(x.device) is None:
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
