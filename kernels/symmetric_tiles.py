"""How the Triton kernel for symmetric products is tiled: configs, their strings, and which of them the rule takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Bytes that a tensor descriptor's base address and strides must be multiples of.
DESCRIPTOR_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the kernel is tiled and launched.

    As a string: ``"128x64w8s4"``, and ``"128x64w8s4wide"``.

    Attributes:
        block: side of a square of the result.
        block_k: depth of one product.
        warps, stages: of a program.
        wide: a tile is two squares next to each other, which needs a quarter less of the operands. Loads and stores go
            through tensor descriptors (capability 9.0 and later), of 256 elements along a dimension at most.

    Sizes are powers of two.
    """

    block: int
    block_k: int
    warps: int
    stages: int
    wide: bool = False

    def __str__(self) -> str:
        return f"{self.block}x{self.block_k}w{self.warps}s{self.stages}{'wide' * self.wide}"

    def tiles(self, m: int) -> int:
        """Tiles of one matrix of side ``m``; of wide ones, the last row of them may be outside of it."""
        squares = 1 + self.wide
        side = -(-m // (squares * self.block))
        return side * (side + 1) // 2 * squares


# What a tile takes beside its product, in units of :func:`_relative_time`: for all of it, and for each square.
_FIRST, _STORE, _ADDEND = 70, 70, 50

# Programs of a small tile that a multiprocessor has room for; of a large one it has for one alone.
_BESIDE = 3

# Without descriptors, strides that are multiples of this many elements make vector loads; Triton looks no closer.
_VECTOR = 16

# Halves loaded one by one take a pointer each: larger tiles spill.
UNALIGNED = TileConfig(64, 32, 4, 3)


def candidates(m: int, p: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """The configs that the rule chooses from for ``(m, p)`` times ``(p, m)``.

    Each builds without spills and fits the shared memory of ``capability`` (``(8, 0)``, ``(9, 0)``, ...).
    """
    vectors = m % _VECTOR == 0 and p % _VECTOR == 0
    if dtype == torch.float32:
        # Exact fp32 has no matrix instruction: small tiles, as registers hold the operands too, and no
        # descriptors, whose layout in shared memory makes it spill. So do 8 warps that load element by element.
        return (TileConfig(64, 32, 8, 3),) if vectors else (TileConfig(64, 16, 4, 3),)
    if capability[0] not in (9, 10):
        large = [TileConfig(128, 64, 8, 3)] if vectors else []
        small = [TileConfig(64, 64, 4, 4)] if vectors else [UNALIGNED]
    elif (m * dtype.itemsize) % DESCRIPTOR_ALIGNMENT == 0 and (p * dtype.itemsize) % DESCRIPTOR_ALIGNMENT == 0:
        large = [TileConfig(128, 64, 8, 4, wide=True), *([TileConfig(128, 64, 8, 4)] if vectors else [])]
        # With 4 warps and both operands transposed, capability 10.0 spills through pointers.
        small = [TileConfig(64, 64, 8, 4) if vectors else UNALIGNED]
    else:
        large, small = [], [UNALIGNED]
    if m <= 64:
        return tuple(small)
    return (*small, *large) if m <= 512 else (*large, *small)


@dataclass(frozen=True, slots=True)
class Work:
    """``k`` products of ``(m, p)`` and ``(p, m)`` with so many ``addends``, on so many multiprocessors."""

    k: int
    m: int
    p: int
    dtype: torch.dtype
    addends: int
    processors: int


def default_config(work: Work, capability: tuple[int, int]) -> TileConfig:
    """The config that is used: the one that should be done first."""
    configs = candidates(work.m, work.p, work.dtype, capability)
    if work.dtype == torch.float32:
        return configs[0]
    # What a result costs, over what its operands do: matrix instructions have become faster than the L2 cache.
    area = 0.6 if capability[0] in (9, 10) else 1.4
    return min(configs, key=lambda config: _relative_time(config, work, area))


def pointer_config(work: Work, strides: Iterable[tuple[int, int, int]], aligned: bool) -> TileConfig:
    """The config used without descriptors; ``aligned`` says whether addresses are multiples of 16 bytes."""
    vectors = aligned and all(s == 1 or s % _VECTOR == 0 for steps in strides for s in steps)
    return default_config(work, (8, 0)) if vectors or work.dtype == torch.float32 else UNALIGNED


def _relative_time(config: TileConfig, work: Work, area: float) -> float:
    """Until the multiprocessor with the most tiles is done. 1: it loads the operands of a square of 128, one deep.

    A tile's product, and the rest of it, which is hidden behind the products of programs beside it.
    """
    side, squares = config.block / 128, 1 + config.wide
    product = work.p * max(area * side * side * squares, side * (1 + squares) / 2)
    waited = 0 if work.addends == 1 and not config.wide else work.addends  # a single one may be read early
    rest = _FIRST + squares * (_STORE + _ADDEND * waited)
    most = -(-work.k * config.tiles(work.m) // work.processors)
    together = min(most, _BESIDE if config.block < 128 else 1)
    full, left = divmod(most, max(1, together))
    time = full * max(together * product, product + rest) + (left > 0) * max(left * product, product + rest)
    return time + rest * (together > 1)
