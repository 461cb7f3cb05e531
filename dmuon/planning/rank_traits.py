"""How ranks differ: how fast each computes and what memory it has left, so that a slower or fuller one owns less."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from dmuon.planning.profiler import time_product
from dmuon.platform.log import logger
from dmuon.solver import Matrix

_log = logger(__name__)

RankChoice = Literal["alike", "measured"] | None
CHOICES = ("alike", "measured", None)
_ALIKE = 0.1  # ranks that differ by less count as alike: plans must not follow noise
_STEPS = 20  # to a speed of 1: speeds in between are rounded, so that many ranks are of few kinds
_MOST = 100  # speed
_MASTER_AND_MOMENTUM = 8  # bytes of an element


@dataclass(frozen=True, slots=True)
class RankTraits:
    """What one rank measured of itself.

    Attributes:
        product_ns: time of a product of matrices on its device; None where there was no memory for it.
        free_bytes: memory of its device that nobody uses; None on a CPU, whose ranks share theirs, and where that is
            unknown.
    """

    product_ns: int | None
    free_bytes: int | None

    @classmethod
    def here(cls, device: torch.device) -> RankTraits:
        """This rank's. The product is timed once in a process, in about 0.1 s."""
        try:
            product = _product_ns(device)
        except torch.OutOfMemoryError:
            product = None
        return cls(product, _free_bytes(device))


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one rank, as ``dmuon.solver.Rank`` has them."""

    speed: float = 1.0
    memory: int | None = None


def is_wanted(choice: RankChoice, costs: object, device: torch.device) -> bool:
    """Whether ranks are to be measured: by default those with devices of their own, where costs are measured, too."""
    if choice is None:
        return costs is None and device.type != "cpu"
    return choice == "measured"


def check_choice(choice: object) -> None:
    """Raise ValueError for what ``ranks=`` cannot be."""
    if choice not in CHOICES:
        raise ValueError(f"ranks must be 'alike', 'measured' or None, got {choice!r}")


def limits_of(traits: Sequence[RankTraits], matrices: Sequence[Matrix], *, held: bool = True) -> list[Limits]:
    """What each rank may own, by what all have measured.

    Speeds are relative to the median, memory to the median of what is free: a rank with less of it than the others
    may hold as much less than an even share.

    Args:
        held: owners hold masters and momentum of what they own; False leaves memory out.
    """
    times = [rank.product_ns for rank in traits if rank.product_ns is not None]
    typical_ns = statistics.median(times) if times else 1
    speeds = [1.0 if rank.product_ns is None else typical_ns / rank.product_ns for rank in traits]
    known = [rank.free_bytes for rank in traits if rank.free_bytes is not None and held]
    typical = statistics.median(known) if len(known) == len(traits) else 0
    share = sum(m.rows * m.cols for m in matrices) * _MASTER_AND_MOMENTUM / len(traits)
    return [
        Limits(rounded(speed), _room(rank.free_bytes if held else None, typical, share))
        for rank, speed in zip(traits, speeds, strict=True)
    ]


def rounded(speed: float) -> float:
    """A relative speed without its noise."""
    return 1.0 if abs(speed - 1.0) <= _ALIKE else min(max(1, round(speed * _STEPS)), _MOST * _STEPS) / _STEPS


def tell(ranks: Sequence[int], limits: Sequence[Limits]) -> None:
    """Let the log know of ranks that own less than others, or more."""
    for rank, one in zip(ranks, limits, strict=True):
        if one.speed != 1.0:
            _log.warning(
                "rank %d computes at %.2f of the median speed; its share of the work is as large", rank, one.speed
            )
        if one.memory is not None:
            _log.warning(
                "rank %d has less free memory than others; it owns at most %.2f GB of masters and momentum",
                rank,
                one.memory / 1e9,
            )


def _room(free: int | None, typical: float, share: float) -> int | None:
    if free is None or free >= (1 - _ALIKE) * typical:
        return None
    return int(share * int(free / typical * _STEPS) / _STEPS)


@cache
def _product_ns(device: torch.device) -> int:
    return time_product(device)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device.type)
    if not hasattr(module, "mem_get_info"):  # not of every device
        return None
    free: int = module.mem_get_info(device)[0]
    unused: int = module.memory_reserved(device) - module.memory_allocated(device)  # by torch's cache
    return free + unused
