"""The planning problem over classes of matrices and kinds of ranks, in arrays, and a proven bound on its makespan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .inputs import ClassKey, CostTable, Infeasible, Matrix, Rank

Ints = NDArray[np.int64]
Counts = Ints  # (ranks, classes): matrices of each class per rank

# Added to the cost of what a rank may not own: far above any sum of costs, and sums of it fit 64 bits.
FORBIDDEN = 2**53
_LARGEST_TOTAL = 2**49
_LARGEST_BYTES = 2**60
# Covers the rounding of the averages in the bound; it can only make the bound smaller.
_SLACK = 1 - 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """How many matrices of each class go over how many ranks, and at what cost.

    Matrices of one class (stored shape, pool) are interchangeable, and so are ranks of one kind (speed, pools, work
    that they have before).

    Attributes:
        classes: rows, columns and pool of each class, sorted.
        members: matrices per class, ``(classes,)``.
        costs: per class ``(kinds, members + 1)``: nanoseconds of owning ``0 … members`` of it; what a kind may not own
            costs more than ``FORBIDDEN``, the more the further it goes.
        chunks: per class, matrices per batch, at most ``members``.
        nbytes: mean bytes that a matrix of each class communicates, ``(classes,)``.
        speed: of each kind, relative to the device that the costs hold for.
        starts: nanoseconds of work that a rank of each kind has before, ``(kinds,)``.
        kind_of: kind of each rank, ``(ranks,)``.
    """

    classes: tuple[ClassKey, ...]
    members: tuple[int, ...]
    costs: tuple[Ints, ...]
    chunks: tuple[int, ...]
    nbytes: Ints
    speed: tuple[float, ...]
    starts: Ints
    kind_of: Ints

    @property
    def ranks(self) -> int:
        return len(self.kind_of)

    @property
    def kinds(self) -> int:
        return len(self.speed)

    @property
    def ranks_per_kind(self) -> list[int]:
        return [int(n) for n in np.bincount(self.kind_of, minlength=self.kinds)]

    def loads(self, counts: Counts, kinds: Ints | None = None) -> Ints:
        """Nanoseconds per row of ``counts``, whose kinds default to those of the ranks, with what they have before."""
        kinds = self.kind_of if kinds is None else kinds
        total = self.starts[kinds]
        for s, cost in enumerate(self.costs):
            total += cost[kinds, counts[:, s]]
        return total

    def makespan(self, counts: Counts) -> int:
        """Nanoseconds of the slowest rank; at least ``FORBIDDEN`` if a rank owns what it may not."""
        return int(self.loads(counts).max())

    def rank_bytes(self, counts: Counts) -> Ints:
        """Bytes per row of ``counts``."""
        return np.asarray(counts @ self.nbytes, dtype=np.int64)

    def most(self, capacity: int) -> Ints:
        """Matrices of each class alone that fit one rank of each kind within ``capacity`` ns: ``(classes, kinds)``."""
        room = np.maximum(capacity - self.starts, 0)
        pairs = [zip(cost, room, strict=True) for cost in self.costs]
        return np.array([[np.searchsorted(row, left, side="right") - 1 for row, left in pair] for pair in pairs])


def build_problem(matrices: Sequence[Matrix], ranks: Sequence[Rank], table: CostTable) -> Problem:
    """Group ``matrices`` into classes and ``ranks`` into kinds.

    Raises:
        ValueError: a shape without costs, or costs so large that their sum would overflow.
        Infeasible: a pool that no rank takes.
    """
    members: dict[ClassKey, list[Matrix]] = {}
    for matrix in matrices:
        members.setdefault(matrix.key, []).append(matrix)
    classes = tuple(sorted(members))
    shapes = {key: same[0].shape for key, same in members.items()}
    total = sum(
        max(table.cost(shapes[key], len(same)), table.cost(shapes[key], 1) * len(same)) for key, same in members.items()
    )
    slowest = min(1.0, *(rank.speed for rank in ranks))
    longest = total / slowest + max(rank.start_ns for rank in ranks)
    if longest >= _LARGEST_TOTAL:
        raise ValueError(f"the costs add up to {longest:.3g} ns, many days; check that they are nanoseconds")
    if sum(m.nbytes for m in matrices) >= _LARGEST_BYTES:
        raise ValueError("the matrices add up to more bytes than any cluster holds; check their sides and nbytes")
    traits = [rank.traits for rank in ranks]
    kinds = list(dict.fromkeys(traits))
    costs = []
    for key in classes:
        if not any(rank.may_own(key[2]) for rank in ranks):
            name = members[key][0].name
            raise Infeasible(f"matrix {name!r}: no rank takes pool {key[2]!r}; add it to the pools of a rank")
        cost = table.costs_up_to(shapes[key], len(members[key]))
        costs.append(np.stack([_kind_costs(cost, s, p is None or key[2] in p) for s, p, _ in kinds]))
    return Problem(
        classes=classes,
        members=tuple(len(members[key]) for key in classes),
        costs=tuple(costs),
        chunks=tuple(min(table.chunk(shapes[key]), len(members[key])) for key in classes),
        nbytes=np.array([sum(m.nbytes for m in members[key]) // len(members[key]) for key in classes], dtype=np.int64),
        speed=tuple(float(speed) for speed, *_ in kinds),
        starts=np.array([start for *_, start in kinds], dtype=np.int64),
        kind_of=np.array([kinds.index(trait) for trait in traits], dtype=np.int64),
    )


def _kind_costs(cost: Ints, speed: float, allowed: bool) -> Ints:
    if not allowed:
        return FORBIDDEN * (np.arange(len(cost)) > 0) + np.arange(len(cost))
    return cost if speed == 1 else np.ceil(cost / speed).astype(np.int64)


def lower_bound(problem: Problem) -> int:
    """Nanoseconds that no assignment can go below.

    The smallest capacity ``C`` in which all have time for the work ``b_r`` that they have before, and that passes two
    tests. *Pigeonhole*: the ranks together can take all matrices of each class alone. *Envelope*: within ``C`` a rank
    pays at least ``e_s(C) = min{T_s(k) / k : T_s(k) <= C}`` for each matrix of class ``s``, so
    ``Σ_s N_s e_s(C) <= Σ_r (C - b_r)``. ``ΣT(1) / R`` is no bound, since a batch costs less than its matrices one by
    one.
    """
    pools: list[str | None] = [*sorted({pool for _, _, pool in problem.classes})]
    envelopes = [_Envelope(problem, pool) for pool in (pools if len(pools) == 1 else [*pools, None])]
    ranks = np.array(problem.ranks_per_kind)

    def fits(capacity: int) -> bool:
        alone = problem.most(capacity)
        if any(int(ranks @ alone[s]) < members for s, members in enumerate(problem.members)):
            return False
        return all(envelope.fits(capacity, alone) for envelope in envelopes)

    least = max(1, int(problem.starts.max()))
    most = int(problem.starts.max() + sum(cost[cost < FORBIDDEN].max() for cost in problem.costs))
    return bisect_left(range(most + 1), True, lo=least, key=fits)


class _Envelope:
    """The second test for the classes of one pool, or of all."""

    def __init__(self, problem: Problem, pool: str | None) -> None:
        self.problem = problem
        self.classes = [s for s, (_, _, p) in enumerate(problem.classes) if pool is None or p == pool]
        reach = [any(problem.costs[s][g, 1] < FORBIDDEN for s in self.classes) for g in range(problem.kinds)]
        self.power = np.array(problem.ranks_per_kind) * np.array(problem.speed) * np.array(reach)
        # Best average with at most k matrices, times speed: work. Costs are isotonic, so "at most k" is "at most C".
        self.averages = {
            s: problem.costs[s][:, 1:] / np.arange(1, problem.members[s] + 1) * np.array(problem.speed)[:, None]
            for s in self.classes
        }
        for average in self.averages.values():
            np.minimum.accumulate(average, axis=1, out=average)

    def fits(self, capacity: int, most: Ints) -> bool:
        needed = 0.0
        for s, average in self.averages.items():
            able = np.flatnonzero(most[s] > 0)
            needed += self.problem.members[s] * float(average[able, most[s][able] - 1].min())
        return needed * _SLACK <= float(self.power @ (capacity - self.problem.starts))
