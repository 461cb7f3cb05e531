"""What goes into the planner: matrices, ranks, options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

__all__ = ["Matrix", "Method", "Rank", "Shape", "SolveOptions", "check_matrices", "check_ranks"]

Shape = tuple[int, int]  # (small side, large side)
Method = Literal["auto", "milp", "greedy"]

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix that needs an owner.

    Attributes:
        name: canonical name, unique in a plan.
        rows, cols: sides of the matrix as it is stored.
        block: the block whose collectives carry it.
        nbytes: bytes that its owner communicates; 0 stands for fp32, ``rows * cols * 4``.

    Raises:
        ValueError: an empty name, a side below one, or negative bytes.
    """

    name: str
    rows: int
    cols: int
    block: str
    nbytes: int = 0

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"matrix name must be a non-empty string, got {self.name!r}")
        if not isinstance(self.block, str):
            raise ValueError(f"matrix {self.name!r}: block must be a string, got {self.block!r}")
        for field in ("rows", "cols", "nbytes"):
            value, least = getattr(self, field), 0 if field == "nbytes" else 1
            if not is_int(value) or value < least:
                raise ValueError(f"matrix {self.name!r}: {field} must be an integer of at least {least}, got {value!r}")
        if self.nbytes == 0:
            object.__setattr__(self, "nbytes", self.rows * self.cols * _FP32_BYTES)

    @property
    def shape(self) -> Shape:
        """``(small side, large side)``: Newton–Schulz costs the same for a matrix and its transpose."""
        return (self.rows, self.cols) if self.rows <= self.cols else (self.cols, self.rows)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank that can own matrices. Ranks are interchangeable.

    Attributes:
        index: position among the owners, from 0.
    """

    index: int


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How hard to search.

    Attributes:
        method: ``"auto"`` runs the MILP only below the search-space threshold and only if the heuristics are not
            proven within the gap; ``"milp"`` runs it at any size; ``"greedy"`` never runs it.
        gap_target: stop as soon as ``(makespan - bound) / makespan`` is proven to be at most this.
        time_limit_s: seconds that the MILP may take.
        search_space_threshold: largest MILP, in binaries, that ``"auto"`` builds.

    Raises:
        ValueError: a value out of its range.
    """

    method: Method = "auto"
    gap_target: float = 0.01
    time_limit_s: float = 10.0
    search_space_threshold: int = 500

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {self.method!r}")
        if not _is_real(self.gap_target) or not 0 <= self.gap_target < 1:
            raise ValueError(f"gap_target must be in [0, 1), got {self.gap_target!r}")
        if not _is_real(self.time_limit_s) or not 0 < self.time_limit_s < math.inf:
            raise ValueError(f"time_limit_s must be a positive number of seconds, got {self.time_limit_s!r}")
        if not is_int(self.search_space_threshold) or self.search_space_threshold < 0:
            raise ValueError(
                f"search_space_threshold must be a non-negative integer, got {self.search_space_threshold!r}"
            )


def check_matrices(matrices: Iterable[Matrix]) -> tuple[Matrix, ...]:
    """``matrices`` sorted by name, so that the order of the input cannot reach the plan.

    Raises:
        ValueError: no matrix, or two of one name.
    """
    ordered = tuple(sorted(matrices, key=lambda m: m.name))
    if not ordered:
        raise ValueError("there is no matrix to plan for; check which parameters are selected for Muon")
    for first, second in pairwise(ordered):
        if first.name == second.name:
            raise ValueError(f"matrix {first.name!r} is listed twice; every matrix needs a name of its own")
    return ordered


def check_ranks(ranks: int | Sequence[Rank]) -> int:
    """The number of ranks.

    Raises:
        ValueError: no rank, or indices that are not 0 … R-1.
    """
    if isinstance(ranks, Sequence):
        indices = sorted(rank.index for rank in ranks)
        if indices != list(range(len(indices))):
            raise ValueError(f"rank indices must be 0 … {len(indices) - 1}, each once, got {indices[:8]}")
        count = len(indices)
    else:
        if not is_int(ranks):
            raise ValueError(f"ranks must be an integer or a sequence of Rank, got {ranks!r}")
        count = ranks
    if count < 1:
        raise ValueError(f"a plan needs at least one rank, got {count}")
    return count


def is_int(value: object) -> bool:
    """Whether ``value`` is an integer proper; ``True`` is an ``int`` to Python and a mistake here."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
