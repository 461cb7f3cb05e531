"""Fused elementwise passes of the Muon update of ``k`` matrices of one shape: one launch per pass and batch.

Gradients and parameters are ``k`` separate tensors, whose addresses reach a kernel in a small table; momentum
and updates are stacked, ``(k, m, n)``. With fp32 tensors and fp16 Newton–Schulz the torch path moves about
68 bytes an element and keeps an fp32 update; these passes move 32 and keep only what Newton–Schulz takes.

Arithmetic is fp32 with every fused multiply-add written out: it is that of torch's CUDA kernels, and two
passes that compute the same value get the same bits. Launches wait for nothing on the device. Nothing is checked
of what :mod:`dmuon.kernels.update` checks; what :func:`takes` refuses goes torch's way.

Triton must be installed, so import this only to launch: :func:`dmuon.kernels.device.kernels_of`.
"""

# mypy: allow-untyped-decorators
# Triton's decorators have no types. It takes an annotation of int for int32, which would cut a size; and its
# launcher shadows an argument named params.

from __future__ import annotations

import functools
import itertools
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
_RUN_TIME = ("grads", "momentum", "partials", "norms", "out", "weights", "update", "x", "numel", "tiles")
_MINIMUM_CAPABILITY = (8, 0)


def takes(
    matrices: Sequence[Tensor],  # k of (m, n)
    stacked: Tensor,  # (k, m, n)
) -> bool:
    """Whether the passes take these tensors, of which they see only addresses.

    They take plain dense fp32, fp16 and bf16 tensors, contiguous, at any address, on one CUDA device of compute
    capability 8.0 or later; ``matrices`` are of one dtype. With Triton's interpreter they take CPU tensors instead.
    """
    device = stacked.device
    if device.type != ("cpu" if INTERPRETED else "cuda"):
        return False
    if device.type == "cuda" and _capability(device) < _MINIMUM_CAPABILITY:
        return False
    return _fit([stacked], stacked.shape, device) and _fit(matrices, stacked.shape[1:], device)


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
    that is not finite has a norm that is not finite, and no other matrix has.
    """
    k, _, tiles = _tiles(momentum)
    partials = torch.empty((k, tiles), dtype=torch.float64, device=momentum.device)
    if partials.numel():
        _launch(_momentum_kernel, grads, [momentum, partials], 1 - beta, beta, stacked=[momentum], nesterov=nesterov)
        increment_version(momentum)
    return partials.sum(dim=1).sqrt_()


def normalized_update(
    grads: Sequence[Tensor],  # k of (m, n), fp32, fp16 or bf16
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
    if out.numel():
        tensors, stacked = [momentum, norms, out], [momentum, out]
        _launch(_normalize_kernel, grads, tensors, beta, eps, stacked=stacked, nesterov=nesterov)
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
    if out.numel():
        stacked = [momentum, out]
        _launch(_fold_kernel, grads, stacked, 1 - beta, beta, stacked=stacked, nesterov=nesterov)
        increment_version(momentum)
    return out


def norms_of(x: Tensor) -> Tensor:  # (k, m, n), fp32, fp16 or bf16 -> (k,), fp64
    """Frobenius norms of stacked matrices, as :func:`momentum_norms` has them."""
    k, numel, tiles = _tiles(x)
    partials = torch.empty((k, tiles), dtype=torch.float64, device=x.device)
    if partials.numel():
        aligned = x.data_ptr() % 16 == 0 and numel % 16 == 0
        with torch.cuda.device_of(x):
            _norm_kernel[(k * tiles,)](x, partials, numel, tiles, ALIGNED=aligned, **LAUNCH)
    return partials.sum(dim=1).sqrt_()


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
    k, numel, tiles = _tiles(update)
    if not k * tiles:
        return
    table, aligned = _addresses([*params], [update])
    with torch.cuda.device_of(update):
        _apply_kernel[(k * tiles,)](
            table,
            update,
            float(1 - lr * weight_decay),
            float(-lr * scale),
            numel,
            tiles,
            PARAM=DTYPES[params[0].dtype],
            ALIGNED=aligned,
            **LAUNCH,
        )
    increment_version(params)


def _launch(
    kernel: Any,
    grads: Sequence[Tensor],
    tensors: list[Tensor],
    *factors: float,
    stacked: list[Tensor],
    nesterov: bool,
) -> None:
    """Launch a kernel that takes gradients, ``tensors`` and two factors; it goes through those that are ``stacked``."""
    k, numel, tiles = _tiles(stacked[0])
    table, aligned = _addresses([*grads], stacked)
    with torch.cuda.device_of(stacked[0]):
        kernel[(k * tiles,)](
            table,
            *tensors,
            *map(float, factors),
            numel,
            tiles,
            NESTEROV=nesterov,
            GRAD=DTYPES[grads[0].dtype],
            ALIGNED=aligned,
            **LAUNCH,
        )


@triton.jit(do_not_specialize=_RUN_TIME)
def _momentum_kernel(
    grads: tl.tensor,  # (k,) addresses
    momentum: tl.tensor,  # (k, numel)
    partials: tl.tensor,  # (k, tiles), fp64
    grad_weight: float,
    beta: float,
    numel: tl.tensor,
    tiles: tl.tensor,
    NESTEROV: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    update = _folded(grads, momentum, matrix, start, mask, grad_weight, beta, numel, NESTEROV, GRAD, ALIGNED, BLOCK)
    tl.store(partials + tl.program_id(0), _square_sum(update))


@triton.jit(do_not_specialize=_RUN_TIME)
def _fold_kernel(
    grads: tl.tensor,  # (k,) addresses
    momentum: tl.tensor,  # (k, numel)
    out: tl.tensor,  # (k, numel)
    grad_weight: float,
    beta: float,
    numel: tl.tensor,
    tiles: tl.tensor,
    NESTEROV: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    update = _folded(grads, momentum, matrix, start, mask, grad_weight, beta, numel, NESTEROV, GRAD, ALIGNED, BLOCK)
    out_tile = stacked_tile(out, matrix, numel, start, ALIGNED, BLOCK)
    tl.store(out_tile, update.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_RUN_TIME)
def _norm_kernel(
    x: tl.tensor,  # (k, numel)
    partials: tl.tensor,  # (k, tiles), fp64
    numel: tl.tensor,
    tiles: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    values = tl.load(stacked_tile(x, matrix, numel, start, ALIGNED, BLOCK), mask=mask, other=0.0)
    tl.store(partials + tl.program_id(0), _square_sum(values.to(tl.float32)))


@triton.jit(do_not_specialize=_RUN_TIME)
def _normalize_kernel(
    grads: tl.tensor,  # (k,) addresses
    momentum: tl.tensor,  # (k, numel)
    norms: tl.tensor,  # (k,), fp64
    out: tl.tensor,  # (k, numel)
    beta: float,
    eps: float,
    numel: tl.tensor,
    tiles: tl.tensor,
    NESTEROV: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    update = tl.load(stacked_tile(momentum, matrix, numel, start, ALIGNED, BLOCK), mask=mask, other=0.0)
    if NESTEROV:
        grad = tl.load(tile_at(grads, matrix, start, GRAD, ALIGNED, BLOCK), mask=mask, other=0.0)
        update = _lerp(grad.to(tl.float32), update, beta)
    scale, inverse = _inverse(tl.load(norms + matrix), eps)
    update = update * scale * inverse
    out_tile = stacked_tile(out, matrix, numel, start, ALIGNED, BLOCK)
    tl.store(out_tile, update.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_RUN_TIME)
def _apply_kernel(
    weights: tl.tensor,  # (k,) addresses
    update: tl.tensor,  # (k, numel)
    decay: float,
    step: float,
    numel: tl.tensor,
    tiles: tl.tensor,
    PARAM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    matrix, start, mask = _tile(numel, tiles, ALIGNED, BLOCK)
    param_tile = tile_at(weights, matrix, start, PARAM, ALIGNED, BLOCK)
    param = tl.load(param_tile, mask=mask, other=0.0).to(tl.float32)
    change = tl.load(stacked_tile(update, matrix, numel, start, ALIGNED, BLOCK), mask=mask, other=0.0)
    param = tl.fma(change.to(tl.float32), step, param * decay).to(PARAM)
    tl.store(param_tile, param, mask=mask)


@triton.jit
def _folded(
    grads: tl.tensor, momentum: tl.tensor, matrix: tl.tensor, start: tl.tensor, mask: tl.tensor,
    grad_weight: float, beta: float, numel: tl.tensor,
    NESTEROV: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # (BLOCK,)  # fmt: skip
    """A tile of the gradient into that of the momentum, and what is to be orthogonalized of it."""
    momentum_tile = stacked_tile(momentum, matrix, numel, start, ALIGNED, BLOCK)
    grad = tl.load(tile_at(grads, matrix, start, GRAD, ALIGNED, BLOCK), mask=mask, other=0.0).to(tl.float32)
    average = _lerp(tl.load(momentum_tile, mask=mask, other=0.0), grad, grad_weight)
    tl.store(momentum_tile, average, mask=mask)
    return _lerp(grad, average, beta) if NESTEROV else average


@triton.jit
def _tile(numel: tl.tensor, tiles: tl.tensor, ALIGNED: tl.constexpr, BLOCK: tl.constexpr) -> tuple[tl.tensor, ...]:
    """This program's matrix, the first element of its tile in that matrix, and which of BLOCK elements exist."""
    program = tl.program_id(0)
    start = (program % tiles).to(tl.int64) * BLOCK
    count = tl.minimum(numel - start, BLOCK).to(tl.int32)
    if ALIGNED:
        # Else the mask may change inside a vector, which splits it.
        count = tl.multiple_of(count, 16)
    return program // tiles, start, tl.arange(0, BLOCK) < count


@triton.jit
def tile_at(
    table: tl.tensor,  # (k,) addresses
    matrix: tl.tensor,
    start: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # (BLOCK,) pointers
    """The tile that begins at element ``start`` of the tensor at ``table[matrix]``."""
    first = tl.load(table + matrix).to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + tl.arange(0, BLOCK)


@triton.jit
def stacked_tile(
    stacked: tl.tensor,  # (k, numel)
    matrix: tl.tensor,
    numel: tl.tensor,
    start: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # (BLOCK,) pointers
    """The tile that begins at element ``start`` of row ``matrix``; 64-bit, as a batch may pass 2³¹ elements."""
    first = stacked + (matrix.to(tl.int64) * numel + start)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + tl.arange(0, BLOCK)


@triton.jit
def _lerp(start: tl.tensor, end: tl.tensor, weight: float) -> tl.tensor:
    """``torch.lerp``: from the nearer end, with one fused multiply-add."""
    fraction = tl.full((), weight, tl.float32)
    near_start = tl.abs(fraction) < 0.5
    fraction = tl.where(near_start, fraction, fraction - 1.0)
    return tl.fma(end - start, fraction, tl.where(near_start, start, end))


@triton.jit
def _square_sum(x: tl.tensor) -> tl.tensor:  # fp64
    """The sum of squares of fp32 ``x``: inf or NaN if an entry is, and otherwise never out of range.

    Entries are scaled by the power of two that brings the largest to [1, 4): squares then neither overflow nor
    underflow if they count, and undoing it is exact in fp64. It is found in integers, where NaN is largest.
    """
    exponent = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0) >> 23
    exponent = tl.maximum(254 - exponent, 1)  # of the inverse, biased; both ends of the range stay normal
    scaled = x * (exponent << 23).to(tl.float32, bitcast=True)
    square = ((1023 + 2 * (127 - exponent)).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return tl.sum(scaled * scaled, axis=0).to(tl.float64) * square


@triton.jit
def _inverse(norm: tl.tensor, eps: float) -> tuple[tl.tensor, tl.tensor]:
    """Two fp32 factors, to be multiplied with in turn: ``1 / max(norm, eps)`` of an fp64 norm, 0 for 0.

    The first is a power of two, 1 where the inverse is well inside fp32's range.
    """
    norm = tl.where(norm < eps, eps, norm)  # NaN stays
    scale = tl.where(norm < 7.888609052210118e-31, 1.8446744073709552e19, 1.0)  # 2⁻¹⁰⁰ and 2⁶⁴
    scale = tl.where(norm > 1.2676506002282294e30, 5.421010862427522e-20, scale)  # 2¹⁰⁰ and 2⁻⁶⁴
    zero = norm == 0.0
    inverse = 1.0 / (tl.where(zero, 1.0, norm) * scale)
    return scale.to(tl.float32), tl.where(zero, 0.0, inverse).to(tl.float32)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _tiles(stacked: Tensor) -> tuple[int, int, int]:
    """Matrices, elements of a matrix, and programs for a matrix."""
    k, m, n = stacked.shape
    return k, m * n, triton.cdiv(m * n, _BLOCK)


def _addresses(matrices: list[Tensor], stacked: list[Tensor]) -> tuple[Tensor, bool]:
    """The addresses of ``matrices`` on their device, and whether all rows begin and end at 16-byte steps."""
    device = stacked[0].device
    addresses = [matrix.data_ptr() for matrix in matrices]
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    aligned = all(a % 16 == 0 for a in itertools.chain(addresses, (tensor.data_ptr() for tensor in stacked)))
    return table.to(device, non_blocking=True), aligned and matrices[0].numel() % 16 == 0
