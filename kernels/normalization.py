"""Dividing a matrix by its Frobenius norm, at any scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .storage import Storage, carrier_dtype, first_dtype
from .streams import streams_of

# Matrices that must be scaled first: so many elements at a time, which bounds the scaled copy.
_CHUNK = 1 << 22
# What norms are computed in as it is.
_ITSELF = (torch.float32, torch.float64)
# Norms between these come from entries whose squares are in fp32's range, but for some that are too small to matter.
_SAFE_NORMS = (1e-10, 1e18)


def check_eps(eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps!r} must be finite and non-negative; 0 is exact")


def normalize(
    x: Tensor,  # (k, m, n)
    storage: Storage,
    eps: float,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x / max(‖x‖, eps)`` of each matrix, rounded once to ``storage``, and the norms, fp64 ``(k,)``.

    Zero stays exact zero. A norm is not finite where an entry is not. The cast is last: fp16 has no 1e-8. ``out`` may
    be ``x``.
    """
    if x.shape[0] == 1 and x.dtype == storage and x.dtype in _ITSELF and streams_of(x.device) is None and x.numel():
        norms = _norms_of_rows(x)  # of one matrix, which may be small: a dozen operations take as long as it does
        norm: float = norms.item()
        if _SAFE_NORMS[0] < norm < _SAFE_NORMS[1]:
            return torch.mul(x, 1 / max(norm, eps), out=out), norms
    compute = torch.promote_types(x.dtype, torch.float32)
    carrier, first = carrier_dtype(x.device, storage), first_dtype(storage)
    if not x.numel():
        out = torch.empty_like(x, dtype=carrier) if out is None else out
        return out, torch.zeros(len(x), dtype=torch.float64, device=x.device)
    safe = False
    if streams_of(x.device) is None:  # as above
        norms = _norms_of_rows(x if x.dtype == compute else x.to(compute))
        numbers = norms.tolist()
        safe = all(_SAFE_NORMS[0] < norm < _SAFE_NORMS[1] for norm in numbers)
    if out is None:
        out = torch.empty(x.shape, dtype=carrier, device=x.device)
    if safe:
        factor = torch.tensor([1 / max(norm, eps) for norm in numbers], dtype=compute, device=x.device)
        torch.mul(x, factor[:, None, None], out=out)
    else:
        norms = _normalize_at_any_scale(x, compute, eps, out)
    return (out if carrier == first else out.copy_(out.to(first))), norms


def _normalize_at_any_scale(x: Tensor, compute: torch.dtype, eps: float, out: Tensor) -> Tensor:
    """:func:`normalize` without its last rounding; returns the norms, and waits for no device.

    Squares of 1e±30 leave fp32's range, and so does 1e40, which 1e-40 is to be multiplied with. So matrices are scaled
    by a power of two first, which changes no bit of the result. Rows are summed in ``compute``, their norms in fp64.
    """
    rows = max(1, _CHUNK * x.shape[-2] // x.numel())
    chunks = torch.split(x, rows, dim=-2)
    largest = torch.stack([chunk.abs().amax(dim=(-2, -1)) for chunk in chunks]).amax(dim=0).to(compute)
    widest = 126 if compute == torch.float32 else 1022  # a power of two whose inverse is one as well
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent.clamp(-widest, widest), 0)
    power, inverse = _power_of_two(exponent), _power_of_two(-exponent)
    scale = inverse.to(compute)[:, None, None]
    parts = torch.stack([_norms_of_rows(chunk.to(compute) * scale) for chunk in chunks])
    norms: Tensor = torch.linalg.vector_norm(parts, dim=0)  # of the scaled matrices
    clamped = norms.clamp(min=eps * inverse)
    factor = torch.where(clamped == 0, 0.0, clamped.reciprocal()).to(compute)[:, None, None]  # NaN stays
    for chunk, part in zip(chunks, torch.split(out, rows, dim=-2), strict=True):
        torch.mul(chunk.to(compute) * scale, factor, out=part)
    return norms * power


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly, in fp64; of integers from -1022 to 1023. ``torch.ldexp`` goes by fp32."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _norms_of_rows(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1, dtype=torch.float64)
    return norms
