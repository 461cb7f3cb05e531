"""Dividing a matrix by its Frobenius norm, at any scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .device import carrier_dtype, streams_of

# Matrices that must be scaled first: so many elements at a time, which bounds the scaled copy.
_CHUNK = 1 << 22
# What norms are computed in as it is.
_ITSELF = (torch.float32, torch.float64)
# Norms between these come from entries whose squares are in fp32's range, but for some that are too small to matter.
_SAFE_NORMS = (1e-10, 1e18)
# Squares of so few elements are added up in one call.
_FEW = 1 << 14


def check_eps(eps: float) -> None:
    """Raise ``ValueError`` where ``eps`` cannot clamp a norm."""
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
    result, norms = divide(x, storage, eps, out=out)
    return result, norms.reshape(len(x))


def divide(
    x: Tensor,  # (k, m, n) or (m, n)
    storage: torch.dtype,
    eps: float,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`normalize`, of one matrix too. That may be small, so that each call counts.

    The norms broadcast with ``x``.
    """
    waits = streams_of(x.device) is not None  # where reading a norm would wait for the device
    few = x.shape[-2] * x.shape[-1] <= _FEW
    low, high = _SAFE_NORMS
    if x.ndim == 2 and few and not waits and x.dtype == storage and storage in _ITSELF and x.numel():
        norms: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
        norm = norms.item()
        if low < norm < high and norm > eps:
            return torch.div(x, norms, out=out), norms
    compute = x.dtype if x.dtype in _ITSELF else torch.promote_types(x.dtype, torch.float32)
    carrier = carrier_dtype(x.device, storage)
    if out is None:  # a transposed matrix may stay one, a batch is multiplied faster if it does not
        out = (
            torch.empty_like(x, dtype=carrier) if x.ndim == 2 else torch.empty(x.shape, dtype=carrier, device=x.device)
        )
    if not x.numel():
        return out, torch.zeros(x.shape[:-2], dtype=torch.float64, device=x.device)
    found: Tensor | None = None
    if not waits:
        wide = x if x.dtype == compute else x.to(compute)
        norms = torch.linalg.vector_norm(wide, dim=(-2, -1), dtype=torch.float64, keepdim=True) if few else _norms(wide)
        for norm in norms.flatten().tolist():
            if not (low < norm < high and norm > eps):
                break
        else:
            torch.div(wide, norms.to(compute), out=out)
            found = norms
    if found is None:
        found = _divide_at_any_scale(*((x, out) if x.ndim == 3 else (x[None], out[None])), compute, eps)
    return (out if carrier == storage else out.copy_(out.to(storage))), found


def divide_by(
    x: Tensor,  # (k, m, n), fp32
    norms: Tensor,  # (k,), fp64
    eps: float,
) -> Tensor:  # (k, m, n)
    """``x / max(norm, eps)`` in place, where ``norms`` are of matrices that ``x`` may be parts of. Zero stays zero.

    As :func:`normalize`, at any scale: both are divided by a power of two first.
    """
    clamped = norms.clamp(min=eps).reshape(-1, 1, 1)
    exponent = torch.frexp(clamped).exponent.clamp(-126, 126)
    inverse = _power_of_two(-torch.where(clamped.isfinite(), exponent, 0))
    divisor = (clamped * inverse).to(x.dtype)
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
    clamped = norms.clamp(min=eps * inverse)
    divisor = clamped.to(compute)  # in which a small eps may be zero
    divisor = torch.where(divisor == 0, 1.0, divisor)  # NaN stays
    for chunk, part in zip(chunks, torch.split(out, rows, dim=-2), strict=True):
        torch.div(chunk.to(compute) * scale, divisor, out=part)
    return norms * power


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly, in fp64; of integers from -1022 to 1023. ``torch.ldexp`` goes by fp32."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _norms(x: Tensor) -> Tensor:  # (..., m, n) -> (..., 1, 1)
    """Norms of matrices, fp64: of small ones in one call, else of rows, and of these."""
    if x.shape[-2] * x.shape[-1] <= _FEW:
        norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64, keepdim=True)
        return norms
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norms = torch.linalg.vector_norm(rows, dim=(-2, -1), dtype=torch.float64, keepdim=True)
    return norms
