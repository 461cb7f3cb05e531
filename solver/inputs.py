"""What goes into the planner: matrices, ranks, options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from itertools import pairwise
from typing import Literal, get_args

Shape = tuple[int, int]  # (small side, large side)
ClassKey = tuple[int, int, str]  # rows, columns, pool: what matrices in one batch have in common
Method = Literal["auto", "milp", "greedy"]
BASELINES = ("round-robin", "lpt", "greedy")

_FP32_BYTES = 4
_STATE_BYTES = 2 * _FP32_BYTES  # master and momentum
_LEAST_SPEED = 0.001
_MOST_MEMORY = 2**60
_REMOVED = {  # options, and what to do instead
    "backend": "the CBC that PuLP brings is the only solver; leave backend out",
    "spread_cap": "every block is spread as far as the makespan allows; leave spread_cap out",
    "search_space_threshold": "the search does not grow with the number of ranks; leave search_space_threshold out",
}


class Infeasible(ValueError):
    """No assignment can hold what was asked; the message names the limit and the remedy."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix that needs an owner.

    Attributes:
        name: canonical name, unique in a plan.
        rows, cols: sides of the matrix as it is stored.
        block: the block whose collectives carry it.
        nbytes: bytes that its owner communicates; 0 stands for fp32, ``rows * cols * 4``.
        pool: who may own it: ranks that list this pool, such as a pipeline stage or an expert group. Matrices of
            different pools never share a batch.

    Raises:
        ValueError: an empty name, a side below one, or negative bytes.
    """

    name: str
    rows: int
    cols: int
    block: str
    nbytes: int = 0
    pool: str = ""

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"matrix name must be a non-empty string, got {self.name!r}")
        for field in ("block", "pool"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"matrix {self.name!r}: {field} must be a string, got {getattr(self, field)!r}")
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

    @property
    def key(self) -> ClassKey:
        """The class of matrices that run in one batch with this one; a batch stacks them as they are stored."""
        return (self.rows, self.cols, self.pool)

    @property
    def state_bytes(self) -> int:
        """Bytes that its owner keeps: the fp32 master and its momentum."""
        return self.rows * self.cols * _STATE_BYTES


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank that can own matrices. Ranks that differ in index and node alone are interchangeable.

    Attributes:
        index: position among the owners, from 0.
        node: the machine that it is on.
        speed: how many times as fast as the device that the costs hold for.
        memory: bytes of fp32 masters and momentum that it may hold; ``None`` is no limit.
        pools: the pools whose matrices it may own; ``None`` is all.
        start_ns: nanoseconds of work that it has before, such as matrices that were planned earlier.

    Raises:
        ValueError: a value out of its range.
    """

    index: int
    node: int = 0
    speed: float = 1.0
    memory: int | None = None
    pools: frozenset[str] | None = None
    start_ns: int = 0

    def __post_init__(self) -> None:
        for field in ("index", "node", "start_ns"):
            if not is_int(getattr(self, field)) or getattr(self, field) < 0:
                raise ValueError(f"rank: {field} must be an integer of at least 0, got {getattr(self, field)!r}")
        if not _is_real(self.speed) or not _LEAST_SPEED <= self.speed <= 1 / _LEAST_SPEED:
            raise ValueError(f"rank {self.index}: speed must be from {_LEAST_SPEED} to 1000, got {self.speed!r}")
        if self.memory is not None and (not is_int(self.memory) or not 0 <= self.memory <= _MOST_MEMORY):
            raise ValueError(f"rank {self.index}: memory must be None or bytes up to 2**60, got {self.memory!r}")
        if self.pools is not None and not isinstance(self.pools, frozenset):
            raise ValueError(f"rank {self.index}: pools must be None or a frozenset of names, got {self.pools!r}")

    @property
    def traits(self) -> tuple[float, int | None, frozenset[str] | None, int]:
        """In what ranks may differ, beside index and node."""
        return (self.speed, self.memory, self.pools, self.start_ns)

    def may_own(self, pool: str) -> bool:
        """Whether matrices of ``pool`` may live here."""
        return self.pools is None or pool in self.pools


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How hard to search, and what a plan must hold.

    Attributes:
        method: ``"auto"`` searches by MILPs if the heuristics are not proven within the gap, unless there are too many
            matrices of a class; ``"milp"`` even then; ``"greedy"`` never.
        gap_target: stop as soon as ``(makespan - bound) / makespan`` is proven to be at most this.
        time_limit_s: seconds that the exact methods may take.
        byte_slack: the part of the makespan that may be given up to level the bytes per rank, as far as the plan stays
            within ``gap_target`` of the bound.

    Raises:
        ValueError: a value out of its range.
    """

    method: Method = "auto"
    gap_target: float = 0.01
    time_limit_s: float = 10.0
    byte_slack: float = 0.01
    backend: InitVar[None] = None
    spread_cap: InitVar[None] = None
    search_space_threshold: InitVar[None] = None

    def __post_init__(self, *removed: object) -> None:
        for (name, instead), value in zip(_REMOVED.items(), removed, strict=True):
            if value is not None:
                raise ValueError(f"{name}={value!r}: was removed: {instead}")
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {self.method!r}")
        for field in ("gap_target", "byte_slack"):
            value = getattr(self, field)
            if not _is_real(value) or not 0 <= value < 1:
                raise ValueError(f"{field} must be in [0, 1), got {value!r}")
        if not _is_real(self.time_limit_s) or not 0 < self.time_limit_s <= 1e6:  # as clocks can count
            raise ValueError(f"time_limit_s must be a positive number of seconds up to 1e6, got {self.time_limit_s!r}")


def check_matrices(matrices: Iterable[Matrix]) -> tuple[Matrix, ...]:
    """``matrices`` sorted by name, so that the order of the input cannot reach the plan.

    Raises:
        ValueError: no matrix, or two of one name.
    """
    unordered = list(matrices)
    for m in unordered:
        if not isinstance(m, Matrix):
            raise ValueError(f"matrices must be dmuon.solver.Matrix, got {m!r}")
    ordered = tuple(sorted(unordered, key=lambda m: m.name))
    if not ordered:
        raise ValueError("there is no matrix to plan for; check which parameters are selected for Muon")
    for first, second in pairwise(ordered):
        if first.name == second.name:
            raise ValueError(f"matrix {first.name!r} is listed twice; every matrix needs a name of its own")
    return ordered


def check_ranks(ranks: int | Sequence[Rank]) -> tuple[Rank, ...]:
    """The ranks in the order of their indices; a number stands for so many equal ones on one node.

    Raises:
        ValueError: no rank, or indices that are not 0 … R-1.
    """
    if isinstance(ranks, Sequence):
        for rank in ranks:
            if not isinstance(rank, Rank):
                raise ValueError(f"ranks must be an integer or a sequence of Rank, got one with {rank!r}")
        ordered = tuple(sorted(ranks, key=lambda rank: rank.index))
        indices = [rank.index for rank in ordered]
        if indices != list(range(len(indices))):
            raise ValueError(f"rank indices must be 0 … {len(indices) - 1}, each once, got {indices[:8]}")
    else:
        if not is_int(ranks):
            raise ValueError(f"ranks must be an integer or a sequence of Rank, got {ranks!r}")
        ordered = tuple(Rank(index) for index in range(ranks))
    if not ordered:
        raise ValueError(f"a plan needs at least one rank, got {ranks}")
    return ordered


def is_int(value: object) -> bool:
    """Whether ``value`` is an integer proper; ``True`` is an ``int`` to Python and a mistake here."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
