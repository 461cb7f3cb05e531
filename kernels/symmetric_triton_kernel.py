"""Device code of the batched symmetric product; imports Triton, so import it only to launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Triton types device code itself, and reads only ``constexpr`` from annotations.

import triton
import triton.language as tl


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
def _load_addend(
    c, batch, row, col, m, c_batch, c_row, c_col,
    BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One tile of ``C``, in its own dtype."""
    if DESCRIPTORS:
        tile = c.load([batch, row, col]).reshape(BLOCK, BLOCK)
    else:
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        offsets = rows.to(tl.int64)[:, None] * c_row + cols.to(tl.int64)[None, :] * c_col
        inside = (rows < m)[:, None] & (cols < m)[None, :]
        tile = tl.load(c + batch.to(tl.int64) * c_batch + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def _plus(
    result, beta, c, batch, row, col, m, c_batch, c_row, c_col,
    BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """``result`` and ``beta`` times one tile of ``C``."""
    addend = _load_addend(c, batch, row, col, m, c_batch, c_row, c_col, BLOCK, DESCRIPTORS)
    return result + beta * addend.to(tl.float32)


@triton.jit
def _store(
    d, tile, batch, row, col, m, d_batch, d_row, d_col,
    BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    if DESCRIPTORS:
        d.store([batch, row, col], tile.reshape(1, BLOCK, BLOCK))
    else:
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        offsets = rows.to(tl.int64)[:, None] * d_row + cols.to(tl.int64)[None, :] * d_col
        inside = (rows < m)[:, None] & (cols < m)[None, :]
        tl.store(d + batch.to(tl.int64) * d_batch + offsets, tile, mask=inside)


@triton.jit
def _finish(
    product, early, c0, c1, c2, c3, d, batch, row, col, m, c_batch, c_row, c_col, d_batch, d_row, d_col,
    alpha, beta0, beta1, beta2, beta3, identity,
    BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr, ADDENDS: tl.constexpr, EARLY: tl.constexpr, IDENTITY: tl.constexpr,
):  # fmt: skip
    """Scale a tile of ``A B``, add the rest, round, and store it twice. ``early`` is that of ``c0``, if ``EARLY``."""
    result = alpha * product
    if ADDENDS > 0:
        if EARLY:
            result += beta0 * early.to(tl.float32)
        else:
            result = _plus(result, beta0, c0, batch, row, col, m, c_batch, c_row, c_col, BLOCK, DESCRIPTORS)
    # Each in a branch of its own, which is always taken: of several, the compiler would hold all tiles at once.
    if ADDENDS > 1:  # noqa: SIM102
        if beta1 != 0.0:
            result = _plus(result, beta1, c1, batch, row, col, m, c_batch, c_row, c_col, BLOCK, DESCRIPTORS)
    if ADDENDS > 2:  # noqa: SIM102
        if beta2 != 0.0:
            result = _plus(result, beta2, c2, batch, row, col, m, c_batch, c_row, c_col, BLOCK, DESCRIPTORS)
    if ADDENDS > 3:  # noqa: SIM102
        if beta3 != 0.0:
            result = _plus(result, beta3, c3, batch, row, col, m, c_batch, c_row, c_col, BLOCK, DESCRIPTORS)
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if IDENTITY:
        result = tl.where(row + rows == col + cols, result + identity, result)
    tile = result.to(d.dtype if DESCRIPTORS else d.dtype.element_ty)
    # Transposed inside the branches: before them, every tile would pay for it twice.
    if row == col:
        # A·B is computed with one operand on each side, so rounding alone makes the tile unsymmetric.
        tile = tl.where(rows >= cols, tile, tl.trans(tile))
        _store(d, tile, batch, row, col, m, d_batch, d_row, d_col, BLOCK, DESCRIPTORS)
    else:
        _store(d, tile, batch, row, col, m, d_batch, d_row, d_col, BLOCK, DESCRIPTORS)
        _store(d, tl.trans(tile), batch, col, row, m, d_batch, d_row, d_col, BLOCK, DESCRIPTORS)


@triton.jit(do_not_specialize=["alpha", "beta0", "beta1", "beta2", "beta3", "identity"])
def symmetric_product_kernel(
    a, b, c0, c1, c2, c3, d, m, p,
    a_batch, a_row, a_inner, b_batch, b_inner, b_col, c_batch, c_row, c_col, d_batch, d_row, d_col,
    alpha, beta0, beta1, beta2, beta3, identity,
    BLOCK: tl.constexpr, HALVES: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, DESCRIPTORS: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, EVEN_K: tl.constexpr,
    ADDENDS: tl.constexpr, EARLY: tl.constexpr, IDENTITY: tl.constexpr,
):  # fmt: skip
    """``D = alpha A B + Σ beta_i C_i + identity I`` on the lower tiles of each matrix; one program computes one tile.

    It is stored twice. A tile is ``HALVES`` squares of side ``BLOCK`` next to each other. Of two, the right one is
    left out where it is above the diagonal.

    ``a`` ``(k, m, p)``, ``b`` ``(k, p, m)``, ``c_i`` and ``d`` ``(k, m, m)`` are pointers with strides in elements or,
    if ``DESCRIPTORS``, tensor descriptors (strides unused). All ``c_i`` have the same strides; from ``ADDENDS`` on they
    are ``None``. ``EARLY`` reads ``c0`` before the product, through pointers. ``identity`` is read if ``IDENTITY``.
    """
    WIDTH: tl.constexpr = HALVES * BLOCK
    side = tl.cdiv(m, WIDTH)
    tiles = side * (side + 1) // 2 * HALVES
    batch, local = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile_row, tile_col = lower_tile(local // HALVES, side, GROUP)
    row, col = (tile_row * HALVES + local % HALVES) * BLOCK, tile_col * WIDTH
    early = 0
    if DESCRIPTORS:
        depth = p if HALVES == 1 else tl.where(row < m, p, 0)
        product = _accumulate_descriptors(a, b, batch, row, col, depth, BLOCK, WIDTH, BLOCK_K, A_K_MAJOR, B_K_MAJOR)
    else:
        if EARLY:
            # On its way while the product is computed.
            early = _load_addend(c0, batch, row, col, m, c_batch, c_row, c_col, BLOCK, DESCRIPTORS)
        # Offsets of a large batch, and of far rows in it, do not fit 32 bits.
        a += batch.to(tl.int64) * a_batch
        b += batch.to(tl.int64) * b_batch
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        product = _accumulate_pointers(a, b, rows, cols, m, p, a_row, a_inner, b_inner, b_col, BLOCK, BLOCK_K, EVEN_K)

    if HALVES == 1:
        _finish(
            product, early, c0, c1, c2, c3, d, batch, row, col, m, c_batch, c_row, c_col, d_batch, d_row, d_col,
            alpha, beta0, beta1, beta2, beta3, identity, BLOCK, DESCRIPTORS, ADDENDS, EARLY, IDENTITY,
        )  # fmt: skip
    elif row < m:  # the last pair of tile rows may be one row
        left, right = product.reshape(BLOCK, 2, BLOCK).permute(0, 2, 1).split()
        _finish(
            left, early, c0, c1, c2, c3, d, batch, row, col, m, c_batch, c_row, c_col, d_batch, d_row, d_col,
            alpha, beta0, beta1, beta2, beta3, identity, BLOCK, DESCRIPTORS, ADDENDS, EARLY, IDENTITY,
        )  # fmt: skip
        if col < row:  # not above the diagonal
            _finish(
                right, early, c0, c1, c2, c3, d, batch, row, col + BLOCK, m,
                c_batch, c_row, c_col, d_batch, d_row, d_col,
                alpha, beta0, beta1, beta2, beta3, identity, BLOCK, DESCRIPTORS, ADDENDS, EARLY, IDENTITY,
            )  # fmt: skip
