"""What goes into the planner: matrices, ranks, options, and what a batch of matrices costs its owner, as it is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate, pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, int]  # (small side, large side)
ClassKey = tuple[int, int, str]  # rows, columns, pool: what matrices in one batch have in common
Method = Literal["auto", "milp", "greedy"]

_FP32_BYTES = 4
_LEAST_SPEED = 0.001
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
        for name in ("block", "pool"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"matrix {self.name!r}: {name} must be a string, got {getattr(self, name)!r}")
        for name in ("rows", "cols", "nbytes"):
            value, least = getattr(self, name), 0 if name == "nbytes" else 1
            if not is_int(value) or value < least:
                raise ValueError(f"matrix {self.name!r}: {name} must be an integer of at least {least}, got {value!r}")
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


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank that can own matrices. Ranks that differ in index and node alone are interchangeable.

    Attributes:
        index: position among the owners, from 0.
        node: the machine that it is on.
        speed: how many times as fast as the device that the costs hold for.
        pools: the pools whose matrices it may own; ``None`` is all.
        start_ns: nanoseconds of work that it has before, such as matrices that were planned earlier.

    Raises:
        ValueError: a value out of its range.
    """

    index: int
    node: int = 0
    speed: float = 1.0
    pools: frozenset[str] | None = None
    start_ns: int = 0
    memory: InitVar[None] = None

    def __post_init__(self, memory: object) -> None:
        if memory is not None:
            raise ValueError(f"memory={memory!r}: was removed: SolveOptions(byte_slack=…) evens what ranks hold")
        for name in ("index", "node", "start_ns"):
            if not is_int(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"rank: {name} must be an integer of at least 0, got {getattr(self, name)!r}")
        if not _is_real(self.speed) or not _LEAST_SPEED <= self.speed <= 1 / _LEAST_SPEED:
            raise ValueError(f"rank {self.index}: speed must be from {_LEAST_SPEED} to 1000, got {self.speed!r}")
        if self.pools is not None and not isinstance(self.pools, frozenset):
            raise ValueError(f"rank {self.index}: pools must be None or a frozenset of names, got {self.pools!r}")

    @property
    def traits(self) -> tuple[float, frozenset[str] | None, int]:
        """In what ranks may differ, beside index and node."""
        return (self.speed, self.pools, self.start_ns)

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
        for name in ("gap_target", "byte_slack"):
            value = getattr(self, name)
            if not _is_real(value) or not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}")
        if not _is_real(self.time_limit_s) or not 0 < self.time_limit_s <= 1e6:  # as clocks can count
            raise ValueError(f"time_limit_s must be a positive number of seconds up to 1e6, got {self.time_limit_s!r}")


def check_matrices(matrices: Iterable[Matrix]) -> tuple[Matrix, ...]:
    """``matrices`` sorted by name, so that the order of the input cannot reach the plan."""
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
    """The ranks in the order of their indices; a number stands for so many equal ones on one node."""
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


# -- costs -------------------------------------------------------------------------------------------------------------

_NEAR_BEST = (103, 100)  # a chunk may cost this ratio of the best average: longer chunks publish later
_NOMINAL_FLOPS_PER_NS = 400_000  # 400 TFLOP/s; only ratios between shapes matter to a plan
_MOST_BATCH = 2**16
_SOURCES = ("measured", "estimated")
_UNMEASURED_ELEMENTS = 2**25  # bounds the workspace of a batch where nothing says what size is best


def unmeasured_batch(shape: tuple[int, int]) -> int:
    """How many matrices of ``shape``, in either order, to orthogonalize at once if no size was measured."""
    return max(1, _UNMEASURED_ELEMENTS // max(1, shape[0] * shape[1]))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Cost of Newton–Schulz per shape and batch size.

    Attributes:
        costs: ``costs[shape][k]`` is the time, in whole nanoseconds, of one batch of ``k`` matrices of ``shape``
            (small side, large side). Every shape needs an entry for ``k = 1``.
        sources: ``"measured"`` or ``"estimated"`` per shape; a shape left out counts as measured.

    Raises:
        ValueError: a cost, batch size, shape or source that cannot be, named together with the remedy.
    """

    costs: Mapping[Shape, Mapping[int, int]]
    sources: Mapping[Shape, str] = field(default_factory=dict)
    _batches: Mapping[Shape, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.costs, Mapping):
            raise ValueError(f"costs must map shapes to batch sizes to nanoseconds, got {type(self.costs).__name__}")
        for shape, entries in self.costs.items():
            _check_entries(shape, entries)
        costs = {shape: dict(sorted(entries.items())) for shape, entries in sorted(self.costs.items())}
        for shape, source in self.sources.items():
            if shape not in costs:
                raise ValueError(f"sources: shape {shape} has no costs; drop it or add its costs")
            if source not in _SOURCES:
                raise ValueError(f"sources: shape {shape} is {source!r}; use one of {', '.join(_SOURCES)}")
        sources = {shape: self.sources.get(shape, "measured") for shape in costs}
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "_batches", {shape: _one_chunk(entries) for shape, entries in costs.items()})

    @classmethod
    def from_flops(cls, shapes: Iterable[Shape]) -> CostTable:
        """Estimates from the FLOPs of Gram Newton–Schulz, five steps, symmetric half products.

        For an ``(m, n)`` matrix, ``m <= n``: the cheaper of ``6 m²n + 17 m³`` (one restart, full final product) and
        ``9 m²n + 11 m³`` (two restarts), at a nominal rate. A batch is as dear as its matrices one by one.
        """
        unique = sorted(set(shapes))
        costs = {}
        for m, n in unique:
            flops = m * m * min(6 * n + 17 * m, 9 * n + 11 * m)
            costs[m, n] = {1: max(1, flops // _NOMINAL_FLOPS_PER_NS)}
        return cls(costs, dict.fromkeys(unique, "estimated"))

    def with_transfer(self, per_matrix: Mapping[Shape, int]) -> CostTable:
        """The same costs with ``per_matrix[shape]`` nanoseconds more for each matrix, such as to gather its shards.

        Raises:
            ValueError: a shape without costs, or a time that is no whole number of at least 0.
        """
        costs = {shape: dict(entries) for shape, entries in self.costs.items()}
        for shape, extra in per_matrix.items():
            if shape not in costs or not is_int(extra) or extra < 0:
                raise ValueError(
                    f"per_matrix: shape {shape}: {extra!r} must be whole nanoseconds for a shape with costs"
                )
            costs[shape] = {k: cost + k * extra for k, cost in costs[shape].items()}
        return CostTable(costs, self.sources)

    @property
    def estimated(self) -> tuple[Shape, ...]:
        """The shapes whose costs are estimates, not measurements."""
        return tuple(shape for shape, source in self.sources.items() if source == "estimated")

    def chunk(self, shape: Shape) -> int:
        """Matrices per batch: the smallest measured ``k`` whose ``T(k) / k`` is within 3 % of the best.

        Raises:
            ValueError: no costs for ``shape``.
        """
        return len(self._table(shape)) - 1

    def batch_size(self, shape: Shape) -> int:
        """Matrices that are best orthogonalized at once: :meth:`chunk`, unless an estimate says nothing of batches.

        Raises:
            ValueError: no costs for ``shape``.
        """
        chunk = self.chunk(shape)
        guessed = self.sources[shape] == "estimated" and len(self.costs[shape]) == 1
        return unmeasured_batch(shape) if guessed else chunk

    def cost(self, shape: Shape, n: int) -> int:
        """Nanoseconds for an owner of ``n`` matrices of ``shape``: whole chunks, then one batch of the remainder.

        Isotonic in ``n``; linear between measured batch sizes.

        Raises:
            ValueError: no costs for ``shape``, or a negative ``n``.
        """
        table = self._table(shape)
        if n < 0:
            raise ValueError(f"an owner cannot hold {n} matrices of shape {shape}")
        chunks, rest = divmod(n, len(table) - 1)
        return chunks * table[-1] + table[rest]

    def costs_up_to(self, shape: Shape, n: int) -> NDArray[np.int64]:
        """``cost(shape, k)`` for ``k = 0 … n``, shape ``(n + 1,)``."""
        table = np.array(self._table(shape), dtype=np.int64)
        chunks, rest = np.divmod(np.arange(n + 1, dtype=np.int64), len(table) - 1)
        return np.asarray(chunks * table[-1] + table[rest], dtype=np.int64)

    def _table(self, shape: Shape) -> tuple[int, ...]:
        try:
            return self._batches[shape]
        except KeyError:
            raise ValueError(
                f"no cost for shape {shape}; measure it with dmuon-profile, or estimate it with CostTable.from_flops"
            ) from None


def _check_entries(shape: Shape, entries: Mapping[int, int]) -> None:
    if not (isinstance(shape, tuple) and len(shape) == 2 and all(is_int(side) and side > 0 for side in shape)):
        raise ValueError(f"costs: shape {shape!r} must be two positive integers (small side, large side)")
    if shape[0] > shape[1]:
        raise ValueError(f"costs: shape {shape} must be (small side, large side); write {shape[::-1]}")
    if not isinstance(entries, Mapping):
        raise ValueError(f"costs: shape {shape}: {entries!r} must map batch sizes to nanoseconds; measure it")
    for k, cost in entries.items():
        if not is_int(k) or k < 1:
            raise ValueError(f"costs: shape {shape}: batch size {k!r} must be an integer of at least 1; remove it")
        if k > _MOST_BATCH:
            raise ValueError(f"costs: shape {shape}: batch size {k} is more than {_MOST_BATCH}; remove it")
        if not is_int(cost) or cost < 1:
            raise ValueError(
                f"costs: shape {shape}, batch size {k}: {cost!r} must be a positive whole number of nanoseconds; "
                "measure it again"
            )
    if 1 not in entries:
        raise ValueError(f"costs: shape {shape} has no entry for batch size 1; measure it")


def _one_chunk(entries: Mapping[int, int]) -> tuple[int, ...]:
    """``T(0) … T(chunk)``, isotonic and interpolated. ``entries`` are sorted by batch size."""
    sizes = list(entries)
    # A larger batch never costs less; noise that says so would make an owner's cost fall as it takes on work.
    times = list(accumulate(entries.values(), max))
    best = min(range(len(sizes)), key=lambda i: times[i] / sizes[i])
    above, of = _NEAR_BEST
    chunk = next(i for i in range(len(sizes)) if times[i] * sizes[best] * of <= times[best] * sizes[i] * above)
    table = [0, times[0]]
    points = list(zip(sizes, times, strict=True))[: chunk + 1]
    for (low, t_low), (high, t_high) in pairwise(points):
        table += [t_low + (t_high - t_low) * (k - low) // (high - low) for k in range(low + 1, high + 1)]
    return tuple(table)
