"""Batched product with a symmetric result in Triton: the lower tiles are computed, each is stored twice.

Triton must be installed, so import this only to launch: :func:`dmuon.kernels.device.kernels_of`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Triton types device code itself, and reads only ``constexpr`` from annotations.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .coefficients import MOST_ADDENDS
from .device import HALF
from .symmetric_tiles import DESCRIPTOR_ALIGNMENT, TileConfig, Work, default_config, pointer_config

# A program's index is an int32, and the decoding of tiles is exact to 8 · index < 2³¹.
_MAX_PROGRAMS = 2**31
_MAX_TILES = 2**28

# Tile rows that run together.
_GROUP = 8


def symmetric_product(
    a: Tensor,  # (k, m, p) or (m, p)
    b: Tensor,  # (k, p, m) or (p, m)
    *,
    addends: Sequence[Tensor] = (),  # each (k, m, m) or (m, m)
    betas: Sequence[float] = (),
    alpha: float = 1.0,
    identity: float = 0.0,
    out: Tensor | None = None,  # (k, m, m) or (m, m)
    b_symmetric: bool = False,
    config: TileConfig | None = None,
) -> Tensor:
    """``alpha · a b + Σ betas[i] · addends[i] + identity · I``, known to be symmetric; the result is, bitwise.

    Products accumulate in fp32 (fp32 operands are not rounded to TF32), and each element is rounded once, the sum of
    all addends with it. Only elements of ``a b`` on and below the diagonal tiles are computed. Not differentiable.
    Nothing is checked of what :func:`dmuon.kernels.symmetric_product` checks.

    Args:
        a, b: fp16, bf16 or fp32, of one dtype on one device; any strides.
        addends: symmetric, up to four with the same strides; read once each.
        betas: their scales, none of them zero.
        out: where to write; ``None`` allocates. It may be one of the addends, and share no memory with others.
        b_symmetric: whether each matrix of ``b`` is symmetric, which lets it be read as its transpose.
        config: tiling; ``None`` takes :func:`default_config`, without descriptors where strides or addresses
            do not allow them.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        ValueError: more matrices than there are programs for; or ``config`` asks for descriptors where they are not
            possible.
    """
    if out is None:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
    operands: list[object] = [a, b, *addends, out]
    plan = plan_launch(
        a.shape,
        tuple(x.stride() for x in (a, b, *addends[:1], out)),
        len(addends),
        a.dtype,
        a.device,
        all(x.data_ptr() % DESCRIPTOR_ALIGNMENT == 0 for x in (a, b, *addends, out)),
        identity != 0,
        b_symmetric,
        config,
    )
    if not plan.grid[0]:
        return out
    if plan.views is not None:
        operands = [TensorDescriptor(x, *view) for x, view in zip(operands, plan.views, strict=True)]
    missing = MOST_ADDENDS - len(addends)
    operands[-1:-1] = [None] * missing
    scalars = [float(x) for x in (alpha, *betas, *(0.0,) * missing, identity)]
    with torch.cuda.device_of(a):  # Triton launches on the current one
        symmetric_product_kernel[plan.grid](*operands, *plan.sizes, *plan.strides, *scalars, **plan.options)
    return out


Steps = tuple[int, int, int]  # from one batch, row and column to the next
View = tuple[list[int], list[int], list[int]]  # shape, strides and block of a descriptor


@dataclass(frozen=True, slots=True)
class _Plan:
    """A launch, decided once for all that is known without looking at addresses and coefficients."""

    sizes: tuple[int, int]  # m, p
    grid: tuple[int]  # a program for each tile of all matrices
    strides: tuple[int, ...]  # (batch, row, column) of a, b, c, d
    views: list[View] | None  # None: pointers
    options: dict[str, object]


@lru_cache(maxsize=1024)
def plan_launch(
    shape: tuple[int, ...],  # of a
    strides: tuple[tuple[int, ...], ...],  # of a, b, the first addend if there is one, and the result
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    adds_identity: bool,
    b_symmetric: bool,
    config: TileConfig | None,
) -> _Plan:
    k, m, p = (1, *shape)[-3:]
    # One matrix has batch stride 0, whatever its tensor says.
    a, b, *c, d = ((of[0] if k > 1 else 0, of[-2], of[-1]) for of in strides)
    # A symmetric matrix may be read or written as its transpose: B so that its inner dimension is contiguous,
    # which suits matrix instructions, C and D so that rows are.
    if b_symmetric and b[1] != 1 and b[2] == 1:
        b = (b[0], b[2], b[1])
    c, d = [_rows_contiguous(x) for x in c], _rows_contiguous(d)

    capability, processors = hardware_of(device)
    work = Work(k, m, p, dtype, count, processors)
    chosen = default_config(work, capability) if config is None else config
    views = None
    if chosen.wide and capability >= (9, 0) and p and aligned and _descriptors_fit((a, b, *c, d), k, dtype):
        views = _views((k, m, p), (a, b, *c * count, d), chosen)
    elif chosen.wide and config is not None:
        raise ValueError(
            f"{config} has tensor descriptors, which take compute capability 9.0, a contiguous dimension, and "
            f"addresses and strides in multiples of {DESCRIPTOR_ALIGNMENT} bytes; pass a config without them"
        )
    elif config is None:
        chosen = pointer_config(work, (a, b, *c, d), aligned)
    tiles = chosen.tiles(m)
    if k * tiles >= _MAX_PROGRAMS or tiles >= _MAX_TILES:
        raise ValueError(f"{k} matrices of side {m} are too many tiles of {chosen.block}; split the batch")
    options: dict[str, object] = {
        "BLOCK": chosen.block,
        "BLOCK_K": chosen.block_k,
        "GROUP": _GROUP,
        # What does not change the code must not change the key that it is compiled under.
        "A_K_MAJOR": views is None or a[2] == 1,
        "B_K_MAJOR": views is None or b[1] == 1,
        "ADDENDS": count,
        "IDENTITY": adds_identity,
        "num_warps": chosen.warps,
        "enable_fp_fusion": True,  # the default, but Triton 3.9 warns unless told
        "WIDE": views is not None,
        "EVEN_K": views is not None or p % chosen.block_k == 0,
        # Of half precision, one addend has room in the registers.
        "EARLY": count == 1 and views is None and dtype in HALF,
        "num_stages": chosen.stages,
    }
    steps = (0,) * 12 if views else (*a, *b, *(c[0] if c else (0, 0, 0)), *d)
    return _Plan((m, p), (k * tiles,), steps, views, options)


def _rows_contiguous(steps: Steps) -> Steps:
    return (steps[0], steps[2], steps[1]) if steps[2] != 1 and steps[1] == 1 else steps


def _descriptors_fit(steps_of_all: Sequence[Steps], k: int, dtype: torch.dtype) -> bool:
    """Whether one dimension of each matrix is contiguous, and the others' strides are what descriptors take."""
    for steps in steps_of_all:
        contiguous, outer = sorted(steps[1:])
        apart = (outer, steps[0])[: 1 + (k > 1)]
        if contiguous != 1 or any(s < 1 or (s * dtype.itemsize) % DESCRIPTOR_ALIGNMENT for s in apart):
            return False
    return True


def _views(sizes: tuple[int, int, int], steps_of_all: Sequence[Steps], config: TileConfig) -> list[View]:
    """Of operands, each with its contiguous dimension last."""
    k, m, p = sizes
    block, block_k, results = config.block, config.block_k, len(steps_of_all) - 2
    shapes = ((m, p), (p, m), *((m, m),) * results)
    blocks = ((block, block_k), (block_k, 2 * block), *((block, block),) * results)
    views = []
    for (rows, cols), (block_rows, block_cols), (batch, row, col) in zip(shapes, blocks, steps_of_all, strict=True):
        if col != 1:
            rows, cols, row, block_rows, block_cols = cols, rows, col, block_cols, block_rows
        # One matrix has no batch stride, but a descriptor needs a valid one.
        views.append(([k, rows, cols], [batch or rows * row, row, 1], [1, block_rows, block_cols]))
    return views


def hardware_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors. The interpreter, which has none, runs whatever there is."""
    if device.type != "cuda":
        return (9, 0), 4
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


# -- device code ---------------------------------------------------------------------------------------------


@triton.jit
def triangular_root(index):
    """Largest ``r`` with ``r (r + 1) / 2 <= index``, for ``0 <= index < 2**28``."""
    root = ((tl.sqrt((8 * index + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
    # The device's square root is approximate: it may land on the other side of an integer.
    root = tl.where(root * (root + 1) // 2 > index, root - 1, root)
    return tl.where((root + 1) * (root + 2) // 2 <= index, root + 1, root)


@triton.jit
def lower_tile(index, side, GROUP: tl.constexpr):
    """Row and column of lower tile ``index`` among ``side`` tile rows.

    Super-rows of ``GROUP`` tile rows follow each other. Inside one, columns left of the diagonal block go
    first, top to bottom, so that programs which run together share operands in L2; then the diagonal block.
    """
    first = triangular_root(index) // GROUP * GROUP
    height = tl.minimum(side - first, GROUP)
    local = index - first * (first + 1) // 2
    inside = local - first * height
    triangle = tl.maximum(inside, 0)
    root = triangular_root(triangle)
    row = tl.where(inside < 0, local % height, root)
    col = tl.where(inside < 0, local // height, first + triangle - root * (root + 1) // 2)
    return first + row, col


@triton.jit
def _accumulate_pointers(
    a, b, rows, cols, m, p, a_row, a_inner, b_inner, b_col,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    inner = tl.arange(0, BLOCK_K)
    # Rows past the end wrap to valid ones, whose products are not stored: no mask in the loop.
    a_tile = a + ((rows % m).to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_inner)
    b_tile = b + (inner.to(tl.int64)[:, None] * b_inner + (cols % m).to(tl.int64)[None, :] * b_col)
    a_step = tl.cast(BLOCK_K, tl.int64) * a_inner
    b_step = tl.cast(BLOCK_K, tl.int64) * b_inner
    accumulator = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in tl.range(0, p, BLOCK_K):
        if EVEN_K:
            x = tl.load(a_tile)
            y = tl.load(b_tile)
        else:
            x = tl.load(a_tile, mask=(inner < p - start)[None, :], other=0.0)
            y = tl.load(b_tile, mask=(inner < p - start)[:, None], other=0.0)
        accumulator = tl.dot(x, y, accumulator, input_precision="ieee")
        a_tile += a_step
        b_tile += b_step
    return accumulator


@triton.jit
def _accumulate_descriptors(
    a, b, batch, row, col, depth,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
):  # fmt: skip
    accumulator = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        if A_K_MAJOR:
            x = a.load([batch, row, start]).reshape(BLOCK, BLOCK_K)
        else:
            x = tl.trans(a.load([batch, start, row]).reshape(BLOCK_K, BLOCK))
        if B_K_MAJOR:
            y = tl.trans(b.load([batch, col, start]).reshape(WIDTH, BLOCK_K))
        else:
            y = b.load([batch, start, col]).reshape(BLOCK_K, WIDTH)
        accumulator = tl.dot(x, y, accumulator, input_precision="ieee")
    return accumulator


@triton.jit
def _load(c, batch, row, col, m, steps, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """One square of ``C``, in its own dtype."""
    if WIDE:
        square = c.load([batch, row, col]).reshape(BLOCK, BLOCK)
    else:
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        offsets = rows.to(tl.int64)[:, None] * steps[1] + cols.to(tl.int64)[None, :] * steps[2]
        inside = (rows < m)[:, None] & (cols < m)[None, :]
        square = tl.load(c + batch.to(tl.int64) * steps[0] + offsets, mask=inside, other=0.0)
    return square


@triton.jit
def _store(d, square, batch, row, col, m, steps, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        d.store([batch, row, col], square.reshape(1, BLOCK, BLOCK))
    else:
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        offsets = rows.to(tl.int64)[:, None] * steps[1] + cols.to(tl.int64)[None, :] * steps[2]
        inside = (rows < m)[:, None] & (cols < m)[None, :]
        tl.store(d + batch.to(tl.int64) * steps[0] + offsets, square, mask=inside)


@triton.jit
def _finish(
    product, early, c, d, batch, row, col, m, c_steps, d_steps, alpha, betas, identity,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, ADDENDS: tl.constexpr, EARLY: tl.constexpr, IDENTITY: tl.constexpr,
):  # fmt: skip
    """Scale a square of ``A B``, add the rest, round, store it twice. ``early`` is that of ``c[0]``, if ``EARLY``."""
    result = alpha * product
    if ADDENDS > 0:
        if not EARLY:
            early = _load(c[0], batch, row, col, m, c_steps, BLOCK, WIDE)
        result += betas[0] * early.to(tl.float32)
    for i in tl.static_range(1, ADDENDS):
        # Each in a branch of its own, which is always taken: of several, the compiler would hold all squares at once.
        if betas[i] != 0.0:
            result += betas[i] * _load(c[i], batch, row, col, m, c_steps, BLOCK, WIDE).to(tl.float32)
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if IDENTITY:
        result = tl.where(row + rows == col + cols, result + identity, result)
    square = result.to(d.dtype if WIDE else d.dtype.element_ty)
    # Transposed inside the branches: before them, every square would pay for it twice.
    if row == col:
        # A·B is computed with one operand on each side, so rounding alone makes the square unsymmetric.
        square = tl.where(rows >= cols, square, tl.trans(square))
        _store(d, square, batch, row, col, m, d_steps, BLOCK, WIDE)
    else:
        _store(d, square, batch, row, col, m, d_steps, BLOCK, WIDE)
        _store(d, tl.trans(square), batch, col, row, m, d_steps, BLOCK, WIDE)


@triton.jit(do_not_specialize=["alpha", "beta0", "beta1", "beta2", "beta3", "identity"])
def symmetric_product_kernel(
    a, b, c0, c1, c2, c3, d, m, p,
    a_batch, a_row, a_inner, b_batch, b_inner, b_col, c_batch, c_row, c_col, d_batch, d_row, d_col,
    alpha, beta0, beta1, beta2, beta3, identity,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, EVEN_K: tl.constexpr,
    ADDENDS: tl.constexpr, EARLY: tl.constexpr, IDENTITY: tl.constexpr,
):  # fmt: skip
    """``D = alpha A B + Σ beta_i C_i + identity I`` on the lower tiles of each matrix; one program computes one tile.

    It is stored twice. A tile is a square of side ``BLOCK`` or, if ``WIDE``, two next to each other, of which the right
    one is left out where it is above the diagonal.

    ``a`` ``(k, m, p)``, ``b`` ``(k, p, m)``, ``c_i`` and ``d`` ``(k, m, m)`` are pointers with strides in elements or,
    if ``WIDE``, tensor descriptors (strides unused). All ``c_i`` have the same strides; from ``ADDENDS`` on they
    are ``None``. ``EARLY`` reads ``c0`` before the product, through pointers. ``identity`` is read if ``IDENTITY``.
    """
    HALVES: tl.constexpr = 2 if WIDE else 1
    WIDTH: tl.constexpr = HALVES * BLOCK
    side = tl.cdiv(m, WIDTH)
    tiles = side * (side + 1) // 2 * HALVES
    batch, local = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile_row, tile_col = lower_tile(local // HALVES, side, GROUP)
    row, col = (tile_row * HALVES + local % HALVES) * BLOCK, tile_col * WIDTH
    c, betas = (c0, c1, c2, c3), (beta0, beta1, beta2, beta3)
    c_steps, d_steps = (c_batch, c_row, c_col), (d_batch, d_row, d_col)
    early = 0
    if WIDE:
        depth = tl.where(row < m, p, 0)  # the last pair of tile rows may be one row
        product = _accumulate_descriptors(a, b, batch, row, col, depth, BLOCK, WIDTH, BLOCK_K, A_K_MAJOR, B_K_MAJOR)
        if row < m:
            left, right = product.reshape(BLOCK, 2, BLOCK).permute(0, 2, 1).split()
            _finish(
                left, early, c, d, batch, row, col, m, c_steps, d_steps, alpha, betas, identity,
                BLOCK, WIDE, ADDENDS, EARLY, IDENTITY,
            )  # fmt: skip
            if col < row:  # not above the diagonal
                _finish(
                    right, early, c, d, batch, row, col + BLOCK, m, c_steps, d_steps, alpha, betas, identity,
                    BLOCK, WIDE, ADDENDS, EARLY, IDENTITY,
                )  # fmt: skip
    else:
        if EARLY:
            # On its way while the product is computed.
            early = _load(c0, batch, row, col, m, c_steps, BLOCK, WIDE)
        # Offsets of a large batch, and of far rows in it, do not fit 32 bits.
        a += batch.to(tl.int64) * a_batch
        b += batch.to(tl.int64) * b_batch
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        product = _accumulate_pointers(a, b, rows, cols, m, p, a_row, a_inner, b_inner, b_col, BLOCK, BLOCK_K, EVEN_K)
        _finish(
            product, early, c, d, batch, row, col, m, c_steps, d_steps, alpha, betas, identity,
            BLOCK, WIDE, ADDENDS, EARLY, IDENTITY,
        )  # fmt: skip
