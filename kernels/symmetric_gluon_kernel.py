"""Device code of the symmetric product with a loader, for Hopper: imports Gluon, so import it only to launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Gluon types device code itself, and reads only ``constexpr`` from annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .symmetric_triton_kernel import lower_tile

# As Triton 3.6 calls them, and later ones.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Registers of a thread of the loader; what it leaves, the threads that multiply may take.
_LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _place(index, m, BLOCK: gl.constexpr, GROUP: gl.constexpr):
    """The matrix of tile ``index``, and the tile's first row and column in it."""
    side = (m + 2 * BLOCK - 1) // (2 * BLOCK)
    tiles = side * (side + 1)
    local = index % tiles
    tile_row, tile_col = lower_tile(local // 2, side, GROUP)
    return index // tiles, (2 * tile_row + local % 2) * BLOCK, 2 * tile_col * BLOCK


@gluon.jit
def _load_operands(
    a, b, a_slots, b_slots, full, free, total, m, p,
    BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """What the loader does: it fills a slot as soon as it is free, also of the next tile."""
    count = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, row, col = _place(index, m, BLOCK, GROUP)
        depth = gl.where(row < m, p, 0)  # the last pair of tile rows may be one row
        for start in range(0, depth, BLOCK_K):
            slot = count % STAGES
            # Before the first round nothing is waited for: a phase that has not begun counts as over.
            mbarrier.wait(free.index(slot), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), a.block_type.nbytes + b.block_type.nbytes)
            if A_K_MAJOR:
                _load(a, [batch, row, start], full.index(slot), a_slots.index(slot))
            else:
                _load(a, [batch, start, row], full.index(slot), a_slots.index(slot))
            if B_K_MAJOR:
                _load(b, [batch, col, start], full.index(slot), b_slots.index(slot))
            else:
                _load(b, [batch, start, col], full.index(slot), b_slots.index(slot))
            count += 1


@gluon.jit
def _plus(result, beta, c, square, landed, loads, batch, row, col, BLOCK: gl.constexpr):
    """``result`` and ``beta`` times one tile of ``C``, which passes through ``square``."""
    mbarrier.expect(landed, c.block_type.nbytes)
    _load(c, [batch, row, col], landed, square)
    mbarrier.wait(landed, loads & 1)
    addend = square.reshape([BLOCK, BLOCK]).load(result.type.layout)
    return result + beta * addend.to(gl.float32), loads + 1


@gluon.jit
def _finish(
    product, c0, c1, c2, c3, d, square, landed, loads, batch, row, col,
    alpha, beta0, beta1, beta2, beta3, identity,
    BLOCK: gl.constexpr, ADDENDS: gl.constexpr, IDENTITY: gl.constexpr,
):  # fmt: skip
    """Scale a tile of ``A B``, add the rest, round, and store it twice. Returns how many addends were loaded so far."""
    result = alpha * product
    tma.store_wait(0)  # of the tile before
    if ADDENDS > 0:
        result, loads = _plus(result, beta0, c0, square, landed, loads, batch, row, col, BLOCK)
    if ADDENDS > 1:  # noqa: SIM102
        if beta1 != 0.0:
            result, loads = _plus(result, beta1, c1, square, landed, loads, batch, row, col, BLOCK)
    if ADDENDS > 2:  # noqa: SIM102
        if beta2 != 0.0:
            result, loads = _plus(result, beta2, c2, square, landed, loads, batch, row, col, BLOCK)
    if ADDENDS > 3:  # noqa: SIM102
        if beta3 != 0.0:
            result, loads = _plus(result, beta3, c3, square, landed, loads, batch, row, col, BLOCK)
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, result.type.layout))[:, None]
    cols = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, result.type.layout))[None, :]
    if IDENTITY:  # noqa: SIM102
        if row == col:
            result = gl.where(rows == cols, result + identity, result)
    tile = result.to(d.dtype)
    flat = square.reshape([BLOCK, BLOCK])
    flat.store(tile)
    if row == col:
        # A·B is computed with one operand on each side, so rounding alone makes the tile unsymmetric.
        mirrored = flat.permute((1, 0)).load(tile.type.layout)
        flat.store(gl.where(rows >= cols, tile, mirrored))
    fence_async_shared()
    _store(d, [batch, row, col], square)
    if row != col:
        tma.store_wait(0)
        flat.permute((1, 0)).store(tile)
        fence_async_shared()
        _store(d, [batch, col, row], square)
    return loads


@gluon.jit
def _multiply(
    a_slots, b_slots, full, free, c0, c1, c2, c3, d, square, landed, total, m, p,
    alpha, beta0, beta1, beta2, beta3, identity,
    BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, ADDENDS: gl.constexpr, IDENTITY: gl.constexpr,
):  # fmt: skip
    """What the warps do that compute."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * BLOCK, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 16])
    count = 0
    loads = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, row, col = _place(index, m, BLOCK, GROUP)
        if row < m:
            product = warpgroup_mma_init(gl.zeros((BLOCK, 2 * BLOCK), gl.float32, wide))
            for start in range(0, p, BLOCK_K):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), count // STAGES & 1)
                if A_K_MAJOR:
                    x = a_slots.index(slot).reshape([BLOCK, BLOCK_K])
                else:
                    x = a_slots.index(slot).reshape([BLOCK_K, BLOCK]).permute((1, 0))
                if B_K_MAJOR:
                    y = b_slots.index(slot).reshape([2 * BLOCK, BLOCK_K]).permute((1, 0))
                else:
                    y = b_slots.index(slot).reshape([BLOCK_K, 2 * BLOCK])
                product = warpgroup_mma(x, y, product, is_async=True)
                # This one is under way, and the one before it done: by all warps, as one of them tells the loader.
                product = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(product,)))
                mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=start > 0)
                count += 1
            product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
            left, right = product.reshape((BLOCK, 2, BLOCK)).permute((0, 2, 1)).split()
            loads = _finish(
                gl.convert_layout(left, half), c0, c1, c2, c3, d, square, landed, loads, batch, row, col,
                alpha, beta0, beta1, beta2, beta3, identity, BLOCK, ADDENDS, IDENTITY,
            )  # fmt: skip
            if col < row:  # not above the diagonal
                loads = _finish(
                    gl.convert_layout(right, half), c0, c1, c2, c3, d, square, landed, loads, batch, row, col + BLOCK,
                    alpha, beta0, beta1, beta2, beta3, identity, BLOCK, ADDENDS, IDENTITY,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total", "alpha", "beta0", "beta1", "beta2", "beta3", "identity"])
def loaded_product_kernel(
    a, b, c0, c1, c2, c3, d, total, m, p, alpha, beta0, beta1, beta2, beta3, identity,
    BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, ADDENDS: gl.constexpr, IDENTITY: gl.constexpr,
):  # fmt: skip
    """As ``symmetric_product_kernel`` in two halves, persistent and through descriptors; ``p`` is not 0.

    One more warp loads operands into ``STAGES`` slots and does nothing else: while a tile is scaled and stored,
    those of the next are on their way.
    """
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    square = gl.allocate_shared_memory(d.dtype, d.block_type.shape, d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    a_slots, b_slots, full, free, c0, c1, c2, c3, d, square, landed, total, m, p,
                    alpha, beta0, beta1, beta2, beta3, identity,
                    BLOCK, BLOCK_K, STAGES, GROUP, A_K_MAJOR, B_K_MAJOR, ADDENDS, IDENTITY,
                ),
            ),
            (
                _load_operands,
                (
                    a, b, a_slots, b_slots, full, free, total, m, p,
                    BLOCK, BLOCK_K, STAGES, GROUP, A_K_MAJOR, B_K_MAJOR,
                ),
            ),
        ],
        [1],
        [_LOADER_REGISTERS],
    )  # fmt: skip
