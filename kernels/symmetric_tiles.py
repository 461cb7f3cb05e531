"""How the Triton kernel for symmetric products is tiled: configs, their strings, and which are worth measuring."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Bytes that a tensor descriptor's base address and strides must be multiples of.
DESCRIPTOR_ALIGNMENT = 16

# Addends that the kernel has arguments for.
MOST_ADDENDS = 4

# Elements that a descriptor loads along one dimension, at most.
_BOX = 256

# A part of a tile is at least so many blocks deep: its sums are written and read once more.
_DEPTH = 4

# Of one multiprocessor, of one thread at most, and below which no product is worth its spills.
_REGISTERS, _MOST_REGISTERS, _FEWEST_REGISTERS = 1 << 16, 248, 32


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the kernel is tiled and launched.

    As a string: ``"128x64w8s4g8"``, and behind the stages ``"d"`` for descriptors, ``"h"`` for two halves, ``"r2"`` for
    two resident programs, ``"p"`` for persistent ones, ``"k"`` for a divided last round and ``"l"`` for a loader:
    ``"128x64w8s3dr2pg8"``.

    Attributes:
        block: side of a square of the result.
        block_k: depth of one product.
        warps, stages: of a program.
        descriptors: loads and stores go through tensor descriptors (capability 9.0 and later).
        group: tile rows that run together.
        halves: with 2, a tile is two squares next to each other, which needs a quarter less of the operands.
        resident: programs that a multiprocessor's registers must suffice for: while one stores, another multiplies.
        persistent: so many programs a multiprocessor compute all tiles, in turns that are fixed at the start. Otherwise
            each computes one, and a multiprocessor that something else holds delays nobody.
        divided: tiles that are left after whole rounds are divided along the inner dimension, so that each
            multiprocessor has a part of one. Sums of parts are joined in their order by a kernel of its own.
        loader: one more warp loads operands and does nothing else, those of the next tile while one is stored
            (capability 9.0, half precision).

    Raises:
        ValueError: sizes that are no powers of two, or out of range; or what needs descriptors without them.
    """

    block: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False
    group: int = 8
    halves: int = 1
    resident: int = 1
    persistent: bool = False
    divided: bool = False
    loader: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("block", 16, 256), ("block_k", 16, 256), ("warps", 1, 32), ("halves", 1, 2)):
            value = getattr(self, name)
            if not low <= value <= high or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two from {low} to {high}")
        for name, low, high in (("stages", 1, 16), ("group", 1, 1024), ("resident", 1, 16)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be from {low} to {high}")
        if (self.halves > 1 or self.persistent or self.divided) and not self.descriptors:
            raise ValueError("halves, persistent programs and a divided last round must be with descriptors")
        if self.divided and self.block < 32:
            raise ValueError(f"a divided last round must be of a block of 32 at least, not {self.block}")
        if self.divided and (self.persistent or self.resident > 1):
            raise ValueError("a divided last round must be of programs that are alone, and not persistent")
        loadable = self.halves > 1 and self.persistent and self.resident == 1 and self.warps * 16 == self.block
        if self.loader and not loadable:
            raise ValueError("a loader must be of persistent programs that are alone, of halves, a warp to 16 rows")
        if (
            self.halves > 1 and self.persistent and not self.loader
        ):  # Triton 3.6 does not compile it for capability 10.0
            raise ValueError("halves must be without persistent programs")
        if self.halves * self.block > _BOX:
            raise ValueError(f"halves={self.halves} of block={self.block} must be at most {_BOX} together")
        if self.registers is not None and self.registers < _FEWEST_REGISTERS:
            raise ValueError(f"resident={self.resident} must be fewer, of {self.warps} warps each")

    def __str__(self) -> str:
        resident = f"r{self.resident}" if self.resident > 1 else ""
        letters = (
            f"{'d' * self.descriptors}{'h' * (self.halves > 1)}{resident}{'p' * self.persistent}{'k' * self.divided}"
            f"{'l' * self.loader}"
        )
        return f"{self.block}x{self.block_k}w{self.warps}s{self.stages}{letters}g{self.group}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """The config whose string is ``text``.

        Raises:
            ValueError: ``text`` is no config's string.
        """
        pattern = r"(\d+)x(\d+)w(\d+)s(\d+)(d?)(h?)(?:r([2-9]|1\d))?(p?)(k?)(l?)g(\d+)"
        match = re.fullmatch(pattern, text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is no tile config; one looks like '128x64w8s4dg8'")
        block, block_k, warps, stages, descriptors, wide, resident, persistent, divided, loader, group = match.groups()
        return cls(
            int(block),
            int(block_k),
            int(warps),
            int(stages),
            descriptors=bool(descriptors),
            group=int(group),
            halves=2 if wide else 1,
            resident=int(resident or 1),
            persistent=bool(persistent),
            divided=bool(divided),
            loader=bool(loader),
        )

    @property
    def registers(self) -> int | None:
        """The most that a thread may take for ``resident`` programs; ``None`` where one alone needs no bound."""
        if self.resident == 1:
            return None
        return min(_MOST_REGISTERS, _REGISTERS // (self.resident * self.warps * 32) // 8 * 8)

    def tiles(self, m: int) -> int:
        """Tiles of one matrix of side ``m``; of halves, the last row of them may be outside of it."""
        side = -(-m // (self.halves * self.block))
        return side * (side + 1) // 2 * self.halves

    def programs(self, tiles: int, processors: int) -> int:
        """How many are launched for so many ``tiles`` on a device of so many multiprocessors."""
        return min(tiles, self.resident * processors) if self.persistent else tiles

    def parts(self, tiles: int, processors: int, p: int) -> tuple[int, int]:
        """How many of so many ``tiles`` are not divided, and into how many parts of the inner ``p`` the others are."""
        left = tiles % processors
        parts = min(processors // left, p // (_DEPTH * self.block_k)) if self.divided and left else 1
        return (tiles - left, parts) if parts > 1 else (tiles, 1)


# What a tile takes beside its product, in units of :func:`_relative_time`: for all of it, and for each square.
_FIRST, _STORE, _ADDEND = 70, 70, 50

# Without descriptors, strides that are multiples of this many elements make vector loads; Triton looks no closer.
_VECTOR = 16

# Halves loaded one by one take a pointer each: larger tiles spill.
UNALIGNED = TileConfig(64, 32, 4, 3)

LOADED = TileConfig(128, 64, 8, 4, descriptors=True, halves=2, persistent=True, loader=True)


def candidates(m: int, p: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """At most eight configs worth measuring for ``(m, p)`` times ``(p, m)``.

    Each builds without spills and fits the shared memory of ``capability`` (``(8, 0)``, ``(9, 0)``, ...).
    """
    vectors = m % _VECTOR == 0 and p % _VECTOR == 0
    if dtype == torch.float32:
        # Exact fp32 has no matrix instruction: small tiles, as registers hold the operands too, and no
        # descriptors, whose layout in shared memory makes it spill. So do 8 warps that load element by element.
        return (TileConfig(64, 32, 8, 3), TileConfig(64, 16, 4, 3)) if vectors else (TileConfig(64, 16, 4, 3),)
    if capability[0] not in (9, 10):
        large = [TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 4), TileConfig(128, 32, 8, 4)] if vectors else []
        small = [TileConfig(64, 64, 4, 4), TileConfig(64, 64, 4, 3, resident=4)] if vectors else [UNALIGNED]
        small += [] if vectors else [TileConfig(64, 64, 8, 3)]
    elif (m * dtype.itemsize) % DESCRIPTOR_ALIGNMENT == 0 and (p * dtype.itemsize) % DESCRIPTOR_ALIGNMENT == 0:
        large = [
            TileConfig(128, 64, 8, 4, descriptors=True, halves=2),
            TileConfig(128, 64, 8, 4, descriptors=True, halves=2, divided=True),
            TileConfig(128, 64, 8, 3, descriptors=True, resident=2),
            TileConfig(128, 64, 8, 4, descriptors=True, persistent=True),
            *([LOADED] if capability[0] == 9 else []),
            *([TileConfig(128, 64, 8, 4)] if vectors else []),
        ]
        # With 4 warps and both operands transposed, capability 10.0 spills through pointers.
        small = [
            TileConfig(64, 64, 4, 3, descriptors=True, resident=4),
            TileConfig(64, 64, 8, 4) if vectors else UNALIGNED,
        ]
    else:
        large, small = [], [UNALIGNED, TileConfig(64, 64, 8, 3)]
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
    """The config used without measurement: of the simple ones, the one that should be done first.

    While communication holds multiprocessors, tiles that were dealt out before would wait for these. And whether three
    kernels take less than one is for a measurement to say.
    """
    configs = candidates(work.m, work.p, work.dtype, capability)
    configs = tuple(each for each in configs if not (each.persistent or each.divided))
    if work.dtype == torch.float32:
        return configs[0]
    # What a result costs, over what its operands do: matrix instructions have become faster than the L2 cache.
    area = 0.6 if capability[0] in (9, 10) else 1.4
    return min(configs, key=lambda config: _relative_time(config, work, area))


def pointer_config(
    work: Work, strides: Iterable[tuple[int, int, int] | None], aligned: bool
) -> TileConfig:  # fmt: skip
    """The config used without descriptors; ``aligned`` says whether addresses are multiples of 16 bytes."""
    vectors = aligned and all(s == 1 or s % _VECTOR == 0 for steps in strides if steps for s in steps)
    return default_config(work, (8, 0)) if vectors or work.dtype == torch.float32 else UNALIGNED


def _relative_time(config: TileConfig, work: Work, area: float) -> float:
    """Until the multiprocessor with the most tiles is done. 1: it loads the operands of a square of 128, one deep.

    The same terms as bench/product_model.py, which knows the devices: a tile's product, and the rest of it, which is
    hidden behind the products of programs beside it.
    """
    side = config.block / 128
    product = work.p * max(area * side * side * config.halves, side * (1 + config.halves) / 2)
    early = work.addends == 1 and not config.descriptors and config.resident == 1
    waited = 0 if early else work.addends
    rest = _FIRST + config.halves * (_STORE + _ADDEND * waited)
    most = -(-work.k * config.tiles(work.m) // work.processors)
    together = min(most, config.resident)
    full, left = divmod(most, max(1, together))
    time = full * max(together * product, product + rest) + (left > 0) * max(left * product, product + rest)
    return time + rest * (together > 1)
