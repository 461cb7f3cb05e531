"""How the Triton kernel for symmetric products is tiled: configs, their strings, and which are worth measuring."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Bytes that a tensor descriptor's base address and strides must be multiples of.
DESCRIPTOR_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the kernel is tiled and launched.

    ``block`` is the side of a square result tile and ``block_k`` the depth of one product; ``descriptors``
    selects the persistent variant that loads through tensor descriptors (capability 9.0 and later), ``group``
    the number of tile rows that run together. As a string: ``"128x64w8s4dg8"`` (``"d"`` with descriptors).

    Raises:
        ValueError: sizes that are no powers of two, or out of range.
    """

    block: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False
    group: int = 8

    def __post_init__(self) -> None:
        for name, low, high in (("block", 16, 256), ("block_k", 16, 256), ("warps", 1, 32)):
            value = getattr(self, name)
            if not low <= value <= high or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two from {low} to {high}")
        for name, low, high in (("stages", 1, 16), ("group", 1, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be from {low} to {high}")

    def __str__(self) -> str:
        descriptors = "d" if self.descriptors else ""
        return f"{self.block}x{self.block_k}w{self.warps}s{self.stages}{descriptors}g{self.group}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """The config whose string is ``text``.

        Raises:
            ValueError: ``text`` is no config's string.
        """
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)(d?)g(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is no tile config; one looks like '128x64w8s4dg8'")
        block, block_k, warps, stages, descriptors, group = match.groups()
        return cls(int(block), int(block_k), int(warps), int(stages), bool(descriptors), int(group))


# Without descriptors, strides that are multiples of this many elements make vector loads; Triton looks no closer.
_VECTOR = 16

# Halves loaded one by one take a pointer each: larger tiles spill.
UNALIGNED = TileConfig(64, 32, 4, 3)


def candidates(m: int, p: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """At most six configs worth measuring for ``(m, p)`` times ``(p, m)``; the first is the default.

    Each builds without spills and fits the shared memory of ``capability`` (``(8, 0)``, ``(9, 0)``, ...).
    """
    if dtype == torch.float32:
        # Exact fp32 has no matrix instruction: small tiles, as registers hold the operands too, and no
        # descriptors, whose layout in shared memory makes it spill.
        return TileConfig(64, 32, 8, 3), TileConfig(64, 16, 4, 3)
    vectors = m % _VECTOR == 0 and p % _VECTOR == 0
    large = [TileConfig(128, 64, 8, 4), TileConfig(128, 64, 8, 3)] if vectors else []
    small = [TileConfig(64, 64, 4, 4)] if vectors else [UNALIGNED, TileConfig(64, 64, 8, 3)]
    if capability[0] not in (9, 10):
        if vectors:
            large = [large[1], large[0], TileConfig(128, 32, 8, 4)]
            small = [small[0], TileConfig(64, 64, 4, 3)]
    elif (m * dtype.itemsize) % DESCRIPTOR_ALIGNMENT == 0 and (p * dtype.itemsize) % DESCRIPTOR_ALIGNMENT == 0:
        large = [TileConfig(128, 64, 8, 4, True), TileConfig(128, 64, 8, 3, True), *large[:1]]
        small = [TileConfig(64, 64, 4, 4, True), TileConfig(64, 64, 4, 3, True)]
        # With 4 warps and both operands transposed, capability 10.0 spills.
        small.append(TileConfig(64, 64, 8, 4) if vectors else UNALIGNED)
    if m <= 64:
        return tuple(small)
    return (*small, *large) if m <= 512 else (*large, *small)


def pointer_config(
    m: int, p: int, dtype: torch.dtype, strides: Iterable[tuple[int, int, int] | None], aligned: bool
) -> TileConfig:
    """The config used without descriptors; ``aligned`` says whether addresses are multiples of 16 bytes."""
    vectors = aligned and all(s == 1 or s % _VECTOR == 0 for steps in strides if steps for s in steps)
    return default_config(m, p, dtype, (8, 0)) if vectors or dtype == torch.float32 else UNALIGNED


def default_config(m: int, p: int, dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """The config used without measurement."""
    return candidates(m, p, dtype, capability)[0]
