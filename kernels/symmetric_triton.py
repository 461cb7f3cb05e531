"""Batched product with a symmetric result in Triton: the lower tiles are computed, each is stored twice."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .symmetric_tiles import DESCRIPTOR_ALIGNMENT, MOST_ADDENDS, TileConfig, Work, default_config, pointer_config

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALF, torch.float32)

# A program's index is an int32, and the decoding of tiles is exact to 8 · index < 2³¹.
_MAX_PROGRAMS = 2**31
_MAX_TILES = 2**28

# Of the interpreter, which has none: by them the rule chooses a config.
_INTERPRETED_PROCESSORS = 4


@lru_cache(maxsize=64)
def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why :func:`symmetric_product` cannot run on ``device`` in ``dtype``; ``None`` if it can.

    On CPU this imports Triton, to see whether its interpreter is on.
    """
    if dtype not in _DTYPES:
        return f"{dtype} is none of fp16, bf16 and fp32"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        if not _interpreted():
            return "on CPU the kernel runs in Triton's interpreter only, which is off"
        return "Triton's interpreter multiplies bf16 wrongly" if dtype == torch.bfloat16 else None
    if device.type != "cuda":
        return f"it needs CUDA, not {device.type}"
    if torch.version.hip is not None:
        return "it is untested on HIP"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def symmetric_product(
    a: Tensor,  # (k, m, p) or (m, p)
    b: Tensor,  # (k, p, m) or (p, m)
    c: Tensor | Sequence[Tensor] | None = None,  # (k, m, m) or (m, m)
    *,
    alpha: float = 1.0,
    beta: float | Sequence[float] = 0.0,
    identity: float = 0.0,
    out: Tensor | None = None,  # (k, m, m) or (m, m)
    b_symmetric: bool = False,
    config: TileConfig | None = None,
) -> Tensor:
    """``alpha · a b + beta · c + identity · I``, which the caller knows to be symmetric; the result is, bitwise.

    Products accumulate in fp32 (fp32 operands are not rounded to TF32), and each element is rounded once.
    Only elements of ``a b`` on and below the diagonal tiles are computed. Not differentiable.

    Args:
        a, b: fp16, bf16 or fp32, of one dtype on one device; any strides.
        c: symmetric; read only if its ``beta`` is not zero. Of several, up to four with the same strides are read, each
            once, and their sum is not rounded.
        alpha: scale of the product.
        beta: scale of ``c``, or one for each; without effect if ``c`` is ``None``.
        identity: what is added to the diagonal.
        out: where to write; ``None`` allocates. It may be ``c`` itself, or one of them. Its byte range, gaps of
            strides included, must not meet that of ``a`` or ``b``, nor in part that of a ``c``.
        b_symmetric: whether each matrix of ``b`` is symmetric, which lets it be read as its transpose.
        config: tiling; ``None`` takes :func:`default_config`, without descriptors where strides or addresses
            do not allow them.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not match; ``out`` overlaps another argument or itself; the
            device or dtype is unsupported; or ``config`` asks for descriptors where they are not possible.
    """
    addends = () if c is None else (c,) if isinstance(c, Tensor) else tuple(c)
    betas = tuple(beta) if isinstance(beta, Sequence) else (beta,) * min(1, len(addends))
    if len(betas) != len(addends):
        raise ValueError(f"beta has {len(betas)} factors for {len(addends)} matrices c; pass one for each")
    read = [(x, factor) for x, factor in zip(addends, betas, strict=True) if factor != 0]
    plan = _plan(
        _layout(a),
        _layout(b),
        tuple(map(_layout, addends)),
        tuple(factor != 0 for factor in betas),
        None if out is None else _layout(out),
        all(map(_aligned, (a, b, *(x for x, _ in read), *(() if out is None else (out,))))),
        identity != 0,
        b_symmetric,
        config,
    )
    if out is None:
        out = torch.empty(plan.shape, dtype=a.dtype, device=a.device)
    else:
        _check_overlap(plan, a, b, [x for x, _ in read], out)
    if not plan.grid[0]:
        return out
    missing = MOST_ADDENDS - len(read)
    tensors = (a, b, *(x for x, _ in read), *(None,) * missing, out)
    arguments: Sequence[object] = tensors
    if plan.views is not None:
        descriptor = _descriptor_type()
        arguments = [view and descriptor(x, *view) for x, view in zip(arguments, plan.views, strict=True)]
    scalars = [float(x) for x in (alpha, *(factor for _, factor in read), *(0.0,) * missing, identity)]
    with _on(a.device):
        _kernel()[plan.grid](*arguments, *plan.sizes, *plan.strides, *scalars, **plan.options)
    return out


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _View(NamedTuple):
    """A tensor as its descriptor sees it, the contiguous dimension last."""

    shape: list[int]
    strides: list[int]
    block: list[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A launch, decided once for all that is known without looking at addresses and coefficients."""

    shape: tuple[int, ...]
    sizes: tuple[int, int]  # m, p
    grid: tuple[int]  # a program for each tile of all matrices
    strides: tuple[int, ...]  # (batch, row, column) of a, b, c, d
    extents: tuple[int, int, int, int]  # bytes from the first to behind the last element of a, b, c, d
    c_like_out: bool  # the strides are the same, up to a transpose of both
    views: tuple[_View | None, ...] | None  # None: pointers
    options: dict[str, object]


def _layout(x: Tensor) -> _Layout:
    return _Layout(x.shape, x.stride(), x.dtype, x.device)


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % DESCRIPTOR_ALIGNMENT == 0


@lru_cache(maxsize=1024)
def _plan(
    a: _Layout,
    b: _Layout,
    addends: tuple[_Layout, ...],
    reads: tuple[bool, ...],
    out: _Layout | None,
    aligned: bool,
    adds_identity: bool,
    b_symmetric: bool,
    config: TileConfig | None,
) -> _Plan:
    shape = _check(a, b, addends, reads, out, b_symmetric)
    k, m, p = (1, *a.shape)[-3:]
    d_strides = out.strides if out is not None else (m * m, m, 1)[-len(shape) :]
    _check_no_self_overlap(shape, d_strides)

    count = sum(reads)
    c = next((x for x, is_read in zip(addends, reads, strict=True) if is_read), None)
    read = (a.strides, b.strides, None if c is None else c.strides)
    steps_of_all = [None if strides is None else _batched(strides, k) for strides in (*read, d_strides)]
    itemsize = a.dtype.itemsize
    shapes = [(k, m, p), (k, p, m), (k, m, m), (k, m, m)]
    extents = [0 if s is None else _extent(n, s) * itemsize for n, s in zip(shapes, steps_of_all, strict=True)]

    # A symmetric matrix may be read or written as its transpose: B so that its inner dimension is contiguous,
    # which suits matrix instructions, C and D so that rows are.
    a_steps, b_steps, c_steps, d_steps = steps_of_all
    assert a_steps is not None and b_steps is not None and d_steps is not None
    if b_symmetric and b_steps[1] != 1 and b_steps[2] == 1:
        b_steps = _transposed(b_steps)
    c_steps = _rows_contiguous(c_steps) if c_steps is not None else None
    d_steps = _rows_contiguous(d_steps)

    capability = _capability(a.device)
    work = Work(k, m, p, a.dtype, count, _processors(a.device))
    chosen = default_config(work, capability) if config is None else config
    steps = (a_steps, b_steps, c_steps, d_steps)
    views: tuple[_View | None, ...] | None = None
    if chosen.descriptors:
        reason = _descriptor_obstacle((k, m, p), steps, aligned, itemsize, capability)
        if reason is None:
            of_a, of_b, of_c, of_d = _views((k, m, p), steps, chosen)
            views = (of_a, of_b, *(of_c,) * count, *(None,) * (MOST_ADDENDS - count), of_d)
        elif config is not None:
            raise ValueError(f"config {config} uses tensor descriptors, but {reason}; pass a config without them")
    if config is None and views is None:
        chosen = pointer_config(work, steps, aligned)
    tiles = chosen.tiles(m)
    total = k * tiles
    if total >= _MAX_PROGRAMS or tiles >= _MAX_TILES:
        raise ValueError(f"{k} matrices of side {m} are too many tiles of {chosen.block}; split the batch")
    zeros = (0, 0, 0)
    options: dict[str, object] = {
        "BLOCK": chosen.block,
        "BLOCK_K": chosen.block_k,
        "GROUP": chosen.group,
        # What does not change the code must not change the key that it is compiled under.
        "A_K_MAJOR": views is None or a_steps[2] == 1,
        "B_K_MAJOR": views is None or b_steps[1] == 1,
        "ADDENDS": count,
        "IDENTITY": adds_identity,
        "num_warps": chosen.warps,
        "enable_fp_fusion": True,  # the default, but Triton 3.9 warns unless told
        "HALVES": chosen.halves,
        "DESCRIPTORS": views is not None,
        "EVEN_K": views is not None or p % chosen.block_k == 0,
        # Of half precision, one addend has room in the registers.
        "EARLY": count == 1 and views is None and a.dtype in _HALF,
        "num_stages": chosen.stages,
    }
    return _Plan(
        shape=shape,
        sizes=(m, p),
        grid=(total,),
        strides=(0,) * 12 if views else (*a_steps, *b_steps, *(c_steps or zeros), *d_steps),
        extents=(extents[0], extents[1], extents[2], extents[3]),
        c_like_out=c_steps == d_steps,
        views=views,
        options=options,
    )


def _check(
    a: _Layout,
    b: _Layout,
    addends: tuple[_Layout, ...],
    reads: tuple[bool, ...],
    out: _Layout | None,
    b_symmetric: bool,
) -> tuple[int, ...]:
    """Shape of the result; raises if the arguments do not fit together."""
    others = [("b", b), *(("c", c) for c in addends), *(() if out is None else (("out", out),))]
    strides = [c.strides for c, is_read in zip(addends, reads, strict=True) if is_read]
    if len(strides) > MOST_ADDENDS:
        raise ValueError(f"c is {len(strides)} matrices, the kernel adds up to {MOST_ADDENDS}; add some before")
    if len(set(strides)) > 1:
        raise ValueError(f"c has strides {strides}, which must agree; lay them out alike")
    for name, x in others:
        if x.dtype != a.dtype or x.device != a.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, a is {a.dtype} on {a.device}; they must agree")
    if len(a.shape) not in (2, 3):
        raise ValueError(f"a must be (m, p) or (k, m, p), got {a.shape}; flatten the batch dimensions")
    *batch, m, p = a.shape
    expected = {"b": (*batch, p, m), "c": (*batch, m, m), "out": (*batch, m, m)}
    for name, x in others:
        if tuple(x.shape) != expected[name]:
            raise ValueError(f"{name} must be {expected[name]} for a of {tuple(a.shape)}, got {tuple(x.shape)}")
    if b_symmetric and m != p:
        raise ValueError(f"b_symmetric=True needs square b, got {tuple(b.shape)}; pass b_symmetric=False")
    reason = unsupported(a.device, a.dtype)
    if reason is not None:
        raise ValueError(f"the Triton kernel does not support {a.dtype} on {a.device}: {reason}; use torch.baddbmm")
    return expected["out"]


def _check_no_self_overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if not math.prod(shape):
        return
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            raise ValueError(f"out of shape {shape} and strides {strides} overlaps itself; pass out without expanding")
        reach = stride * (size - 1) + reach


def _check_overlap(plan: _Plan, a: Tensor, b: Tensor, addends: Sequence[Tensor], out: Tensor) -> None:
    start = out.data_ptr()
    stop = start + plan.extents[3]
    operands = [("a", a, plan.extents[0]), ("b", b, plan.extents[1]), *(("c", c, plan.extents[2]) for c in addends)]
    for name, x, extent in operands:
        if not extent or not plan.extents[3]:
            continue
        first = x.data_ptr()
        if first < stop and start < first + extent:
            if name == "c" and first == start and plan.c_like_out:
                continue
            raise ValueError(f"out overlaps {name} in memory, which is still read; pass another out")


def _batched(strides: tuple[int, ...], k: int) -> tuple[int, int, int]:
    """``strides`` of ``k`` matrices; one matrix has batch stride 0, whatever its tensor says."""
    return (strides[0] if k > 1 else 0, strides[-2], strides[-1])


def _extent(shape: tuple[int, int, int], strides: tuple[int, int, int]) -> int:
    if not math.prod(shape):
        return 0
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


def _transposed(strides: tuple[int, int, int]) -> tuple[int, int, int]:
    return (strides[0], strides[2], strides[1])


def _rows_contiguous(strides: tuple[int, int, int]) -> tuple[int, int, int]:
    return _transposed(strides) if strides[2] != 1 and strides[1] == 1 else strides


_Steps = tuple[tuple[int, int, int], tuple[int, int, int], "tuple[int, int, int] | None", tuple[int, int, int]]


def _descriptor_obstacle(
    sizes: tuple[int, int, int], steps: _Steps, aligned: bool, itemsize: int, capability: tuple[int, int]
) -> str | None:
    """Why tensor descriptors are not possible; ``None`` if they are."""
    k, _, p = sizes
    if capability < (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 9.0"
    if not p:
        return "the inner dimension is 0"
    if not aligned:
        return f"an address is no multiple of {DESCRIPTOR_ALIGNMENT} bytes"
    for name, strides in zip("abcd", steps, strict=True):
        if strides is None:
            continue
        contiguous, outer = sorted(strides[1:])
        if contiguous != 1:
            return f"no dimension of a matrix of {name} is contiguous"
        for stride in (outer, strides[0])[: 1 + (k > 1)]:
            if stride < 1 or (stride * itemsize) % DESCRIPTOR_ALIGNMENT:
                return (
                    f"{name} has a stride of {stride * itemsize} bytes, no positive multiple of {DESCRIPTOR_ALIGNMENT}"
                )
    return None


def _views(sizes: tuple[int, int, int], steps: _Steps, config: TileConfig) -> tuple[_View | None, ...]:
    k, m, p = sizes
    shapes = ((m, p), (p, m), (m, m), (m, m))
    square = (config.block, config.block)
    blocks = ((config.block, config.block_k), (config.block_k, config.halves * config.block), square, square)
    views: list[_View | None] = []
    for (rows, cols), (block_rows, block_cols), strides in zip(shapes, blocks, steps, strict=True):
        if strides is None:
            views.append(None)
            continue
        batch, row, col = strides
        if col != 1:
            rows, cols, row, block_rows, block_cols = cols, rows, col, block_cols, block_rows
        # One matrix has no batch stride, but a descriptor needs a valid one.
        views.append(_View([k, rows, cols], [batch or rows * row, row, 1], [1, block_rows, block_cols]))
    return tuple(views)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from .symmetric_triton_kernel import symmetric_product_kernel

    return symmetric_product_kernel


@lru_cache(maxsize=1)
def _descriptor_type() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    """Whether the kernel was decorated for the interpreter."""
    from triton.runtime.jit import JITFunction

    return not isinstance(_kernel(), JITFunction)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    # The interpreter runs every variant.
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on ``device``: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
