"""Fused elementwise passes of the Muon update of ``k`` matrices of one shape: one launch per pass and batch.

Gradients and parameters are ``k`` separate tensors, whose addresses reach a kernel in a small table; momentum
and updates are stacked, ``(k, m, n)``. With fp32 tensors and fp16 Newton–Schulz the torch path moves about
68 bytes an element and keeps an fp32 update; these passes move 32 and keep only what Newton–Schulz takes.

Arithmetic is fp32 with every fused multiply-add written out: it is that of torch's CUDA kernels, and two
passes that compute the same value get the same bits. Launches wait for nothing on the device. Nothing is checked
of what :mod:`dmuon.kernels.update` checks; what :func:`takes` refuses goes torch's way.

Triton must be installed, so import this only to launch: :func:`dmuon.kernels.device.kernels_of`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Triton types device code itself, and reads only ``constexpr`` from annotations; its launcher shadows an argument named
# params.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from .device import INTERPRETED

# What the passes take.
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Elements of one program; 16 per thread keep enough loads in flight. A multiple of 16, as hints assume.
_BLOCK = 2048
LAUNCH = {"BLOCK": _BLOCK, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}

# One compiled kernel for all values: Triton would specialize on integers that are 1 or multiples of 16, and on
# addresses that are. Only ALIGNED says so here. Floats must arrive as such, or their type would differ too.
_RUN_TIME = ("grads", "momentum", "partials", "norms", "out", "weights", "update", "numel", "tiles")


def takes(
    matrices: Sequence[Tensor],  # k of (m, n)
    stacked: Tensor,  # (k, m, n)
) -> bool:
    """Whether the passes take these tensors, of which they see only addresses.

    They take plain dense fp32, fp16 and bf16 tensors, contiguous, at any address, on one CUDA device; ``matrices`` are
    of one dtype. With Triton's interpreter they take CPU tensors instead.
    """
    device = stacked.device
    ours = device.type == ("cpu" if INTERPRETED else "cuda")
    return ours and _fit([stacked], stacked.shape, device) and _fit(matrices, stacked.shape[1:], device)


def _fit(tensors: Sequence[Tensor], shape: torch.Size, device: torch.device) -> bool:
    return all(
        type(tensor) in (Tensor, Parameter)
        and tensor.layout == torch.strided
        and tensor.device == device
        and tensor.shape == shape
        and tensor.dtype in DTYPES
        and tensor.dtype == tensors[0].dtype
        and tensor.is_contiguous()
        for tensor in tensors
    )


def momentum_norms(
    grads: Sequence[Tensor],  # k of (m, n), fp32, fp16 or bf16
    momentum: Tensor,  # (k, m, n), fp32
    *,
    beta: float,
    nesterov: bool,
) -> Tensor:  # (k,), fp64
    """Fold gradients into ``momentum`` in place; return the Frobenius norms of what to orthogonalize.

    ``momentum ← lerp(momentum, grad, 1 - beta)``, and the norms are those of ``lerp(grad, momentum, beta)``
    with ``nesterov``, else of the new momentum, accurate for entries of 1e-38 to 1e38. A matrix with an entry
    that is not finite has a norm that is not finite, and no other matrix has. Without gradients they are those of
    ``momentum`` as it is, which may be fp16 or bf16 then.
    """
    k, m, n = momentum.shape
    partials = torch.empty((k, triton.cdiv(m * n, _BLOCK)), dtype=torch.float64, device=momentum.device)
    _fold(grads, momentum, beta, nesterov, partials, None)
    return partials.sum(dim=1).sqrt_()


def normalized_update(
    grads: Sequence[Tensor],  # k of (m, n), fp32, fp16 or bf16; none without nesterov
    momentum: Tensor,  # (k, m, n), fp32
    norms: Tensor,  # (k,), fp64
    *,
    beta: float,
    nesterov: bool,
    eps: float,
    dtype: torch.dtype,  # fp32, fp16 or bf16
) -> Tensor:  # (k, m, n)
    """What to orthogonalize, divided by ``max(norm, eps)``: rounded once, after dividing.

    ``momentum`` and ``norms`` are those that :func:`momentum_norms` left. Computing the update again costs no
    more traffic than reading it and spares its fp32 buffer. Zero norms give zeros, as in ``normalize``.
    """
    out = torch.empty(momentum.shape, dtype=dtype, device=momentum.device)
    arguments = {"momentum": momentum, "norms": norms, "out": out, "beta": float(beta), "eps": float(eps)}
    _launch(_normalize_kernel, grads, **arguments, NESTEROV=nesterov)
    return out


def momentum_update(
    grads: Sequence[Tensor],  # k of (m, n), fp32, fp16 or bf16
    momentum: Tensor,  # (k, m, n), fp32
    *,
    beta: float,
    nesterov: bool,
) -> Tensor:  # (k, m, n), fp32
    """Fold gradients into ``momentum`` in place as :func:`momentum_norms` does; return what to orthogonalize.

    For matrices of which a rank has a part, whose norms are of the whole.
    """
    out = torch.empty_like(momentum, memory_format=torch.contiguous_format)
    _fold(grads, momentum, beta, nesterov, None, out)
    return out


def apply_update(
    params: Sequence[Tensor],  # k of (m, n), fp32, fp16 or bf16
    update: Tensor,  # (k, m, n), fp32, fp16 or bf16
    *,
    lr: float,
    weight_decay: float,
    scale: float,
) -> None:
    """``param ← (1 - lr · weight_decay) · param - lr · scale · update``, in place.

    Computed in fp32 and rounded once to the parameters' dtype; the foreach path rounds half-precision
    parameters twice.
    """
    _launch(_apply_kernel, params, update=update, decay=float(1 - lr * weight_decay), step=float(-lr * scale))
    increment_version(params)


def _fold(
    grads: Sequence[Tensor], momentum: Tensor, beta: float, nesterov: bool, partials: Tensor | None, out: Tensor | None
) -> None:
    arguments = {"momentum": momentum, "partials": partials, "out": out}
    _launch(_fold_kernel, grads, **arguments, grad_weight=float(1 - beta), beta=float(beta), NESTEROV=nesterov)
    if grads:
        increment_version(momentum)


def _launch(kernel: Any, matrices: Sequence[Tensor], **arguments: Any) -> None:
    """Launch a kernel whose first argument is a table of the addresses of ``matrices``, or ``None`` without any.

    ``DTYPE`` is what they are of. It goes through those of its arguments that are ``(k, m, n)``; ``ALIGNED`` says
    whether all rows begin and end at 16-byte steps.
    """
    stacked = [value for value in arguments.values() if isinstance(value, Tensor) and value.ndim == 3]
    (k, m, n), device = stacked[0].shape, stacked[0].device
    if not stacked[0].numel():
        return
    addresses, table, dtype = [matrix.data_ptr() for matrix in matrices], None, None
    if matrices:
        host = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        table, dtype = host.to(device, non_blocking=True), DTYPES[matrices[0].dtype]
    aligned = m * n % 16 == 0 and not any(a % 16 for a in (*addresses, *(tensor.data_ptr() for tensor in stacked)))
    sizes = {"numel": m * n, "tiles": triton.cdiv(m * n, _BLOCK)}
    with torch.cuda.device_of(stacked[0]):
        kernel[(k * sizes["tiles"],)](table, **arguments, **sizes, DTYPE=dtype, ALIGNED=aligned, **LAUNCH)


@triton.jit(do_not_specialize=_RUN_TIME)
def _fold_kernel(
    grads, momentum, partials, out, grad_weight, beta, numel, tiles,
    NESTEROV: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold a tile of the gradient into that of ``momentum``, ``(k, numel)``; ``grads`` are ``(k,)`` addresses, or none.

    What is to be orthogonalized of it is written to ``out``, ``(k, numel)``, and the sum of its squares to
    ``partials``, ``(k, tiles)`` in fp64; either may be ``None``.
    """
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    momentum_tile = stacked_tile(momentum, matrix, numel, start, ALIGNED, BLOCK)
    update = tl.load(momentum_tile, mask=mask, other=0.0).to(tl.float32)
    if grads is not None:
        grad = tl.load(tile_at(grads, matrix, start, DTYPE, ALIGNED, BLOCK), mask=mask, other=0.0).to(tl.float32)
        update = _lerp(update, grad, grad_weight)
        tl.store(momentum_tile, update, mask=mask)
        if NESTEROV:
            update = _lerp(grad, update, beta)
    if partials is not None:
        tl.store(partials + tl.program_id(0), _square_sum(update))
    if out is not None:
        tl.store(stacked_tile(out, matrix, numel, start, ALIGNED, BLOCK), update.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_RUN_TIME)
def _normalize_kernel(
    grads, momentum, norms, out, beta, eps, numel, tiles,
    NESTEROV: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of ``out`` from ``momentum``, ``norms``, fp64 ``(k,)``, and, if ``NESTEROV``, ``grads``."""
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    update = tl.load(stacked_tile(momentum, matrix, numel, start, ALIGNED, BLOCK), mask=mask, other=0.0)
    if NESTEROV:
        grad = tl.load(tile_at(grads, matrix, start, DTYPE, ALIGNED, BLOCK), mask=mask, other=0.0)
        update = _lerp(grad.to(tl.float32), update, beta)
    scale, inverse = _inverse(tl.load(norms + matrix), eps)
    update = update * scale * inverse
    tl.store(stacked_tile(out, matrix, numel, start, ALIGNED, BLOCK), update.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_RUN_TIME)
def _apply_kernel(
    weights, update, decay, step, numel, tiles, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``decay · weight + step · update`` of a tile; ``weights`` are ``(k,)`` addresses."""
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    param_tile = tile_at(weights, matrix, start, DTYPE, ALIGNED, BLOCK)
    param = tl.load(param_tile, mask=mask, other=0.0).to(tl.float32)
    change = tl.load(stacked_tile(update, matrix, numel, start, ALIGNED, BLOCK), mask=mask, other=0.0)
    param = tl.fma(change.to(tl.float32), step, param * decay).to(DTYPE)
    tl.store(param_tile, param, mask=mask)


@triton.jit
def _tile(numel, tiles, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's matrix, the first element of its tile in that matrix, and which of BLOCK elements exist."""
    program = tl.program_id(0)
    start = (program % tiles).to(tl.int64) * BLOCK
    count = tl.minimum(numel - start, BLOCK).to(tl.int32)
    if ALIGNED:
        # Else the mask may change inside a vector, which splits it.
        count = tl.multiple_of(count, 16)
    return program // tiles, start, tl.arange(0, BLOCK) < count


@triton.jit
def tile_at(table, matrix, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the tile that begins at element ``start`` of the tensor at ``table[matrix]``."""
    first = tl.load(table + matrix).to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + tl.arange(0, BLOCK)


@triton.jit
def stacked_tile(stacked, matrix, numel, start, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """As :func:`tile_at`, in row ``matrix`` of ``(k, numel)``; 64-bit, as a batch may pass 2³¹ elements."""
    first = stacked + (matrix.to(tl.int64) * numel + start)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + tl.arange(0, BLOCK)


@triton.jit
def _lerp(start, end, weight):
    """``torch.lerp``: from the nearer end, with one fused multiply-add."""
    fraction = tl.full((), weight, tl.float32)
    near_start = tl.abs(fraction) < 0.5
    fraction = tl.where(near_start, fraction, fraction - 1.0)
    return tl.fma(end - start, fraction, tl.where(near_start, start, end))


@triton.jit
def _square_sum(x):
    """The sum of squares of fp32 ``x``, in fp64: inf or NaN if an entry is, and otherwise never out of range.

    Entries are scaled by the power of two that brings the largest to [1, 4): squares then neither overflow nor
    underflow if they count, and undoing it is exact in fp64. It is found in integers, where NaN is largest.
    """
    exponent = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0) >> 23
    exponent = tl.maximum(254 - exponent, 1)  # of the inverse, biased; both ends of the range stay normal
    scaled = x * (exponent << 23).to(tl.float32, bitcast=True)
    square = ((1023 + 2 * (127 - exponent)).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return tl.sum(scaled * scaled, axis=0).to(tl.float64) * square


@triton.jit
def _inverse(norm, eps):
    """Two fp32 factors, to be multiplied with in turn: ``1 / max(norm, eps)`` of an fp64 norm, 0 for 0.

    The first is a power of two, 1 where the inverse is well inside fp32's range.
    """
    norm = tl.where(norm < eps, eps, norm)  # NaN stays
    scale = tl.where(norm < 7.888609052210118e-31, 1.8446744073709552e19, 1.0)  # 2⁻¹⁰⁰ and 2⁶⁴
    scale = tl.where(norm > 1.2676506002282294e30, 5.421010862427522e-20, scale)  # 2¹⁰⁰ and 2⁻⁶⁴
    zero = norm == 0.0
    inverse = 1.0 / (tl.where(zero, 1.0, norm) * scale)
    return scale.to(tl.float32), tl.where(zero, 0.0, inverse).to(tl.float32)
