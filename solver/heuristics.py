"""Heuristics: list scheduling, packing into a capacity, and local search over counts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from .problem import FORBIDDEN, Counts, Ints, Problem

_PERMUTED_CLASSES = 4  # 24 orders; more classes are tried in a few orders only


def longest_first(problem: Problem) -> Counts:
    """LPT on ``T(1)``: the longest matrix next, to the rank with the least work. Blind to batching; the baseline.

    A rank whose limits are reached takes no more; what no rank can take goes to the first, and its load says so.
    """
    return _schedule(problem, [np.arange(cost.shape[1]) * cost[:, 1:2] for cost in problem.costs])


def batch_greedy(problem: Problem) -> Counts:
    """The longest class next, each matrix to the rank that would then finish first, given what batching saves."""
    return _schedule(problem, problem.costs)


def round_robin(problem: Problem, order: Sequence[int]) -> list[int]:
    """A rank for each matrix, given their classes: each rank in turn, skipping those that may not own it."""
    kinds = problem.kind_of.tolist()
    able = [[bool(cost[kind, 1] < FORBIDDEN) for kind in range(problem.kinds)] for cost in problem.costs]
    owners, rank = [], 0
    for s in order:
        while not able[s][kinds[rank]]:
            rank = (rank + 1) % problem.ranks
        owners.append(rank)
        rank = (rank + 1) % problem.ranks
    return owners


def _schedule(problem: Problem, costs: Sequence[Ints]) -> Counts:
    """Hand out the matrices class by class, the longest first, each to the rank that would be done with it first.

    Ties go to the rank that keeps fewer bytes, then to the lower one.

    Args:
        costs: what a rank of each kind is taken to pay for its matrices of a class, as ``Problem.costs``.
    """
    counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
    load, owned = problem.starts[problem.kind_of].tolist(), [0] * problem.ranks
    kinds, memory = problem.kind_of.tolist(), problem.memory.tolist()
    for s in sorted(range(len(costs)), key=lambda s: (-int(problem.costs[s][:, 1].min()), s)):
        nbytes, room = int(problem.state_bytes[s]), problem.most(FORBIDDEN - 1)[s].tolist()
        base, ends = list(load), costs[s].tolist()
        taken = [0] * problem.ranks
        heap = [(base[rank] + ends[kind][1], owned[rank], rank) for rank, kind in enumerate(kinds)]
        heapq.heapify(heap)
        for left in range(problem.members[s], 0, -1):
            while heap:
                finish, _, rank = heap[0]
                if taken[rank] < room[kinds[rank]] and owned[rank] + nbytes <= memory[kinds[rank]]:
                    break
                heapq.heappop(heap)  # full, and will stay so
            else:
                taken[0] += left
                break
            taken[rank] += 1
            load[rank], owned[rank] = finish, owned[rank] + nbytes
            # With the last matrix of the class the loop ends: there is no cost of one more to look up.
            following = min(taken[rank] + 1, problem.members[s])
            heapq.heapreplace(heap, (base[rank] + ends[kinds[rank]][following], owned[rank], rank))
        counts[:, s] = taken
    return counts


def multifit(problem: Problem, bound: int, makespan: int) -> Counts | None:
    """Batch-aware MULTIFIT: the best packing that bisecting the capacity finds, ``None`` if none beats ``makespan``.

    Args:
        bound: nanoseconds below which no packing exists.
        makespan: nanoseconds of the best assignment that is known.
    """
    best = None
    for order in _class_orders(problem):
        low, high = bound, makespan
        # Packing is not monotone in the capacity: bisection finds a good capacity, not the least one.
        while low < high:
            capacity = (low + high) // 2
            counts = _pack(problem, order, capacity)
            if counts is None:
                low = capacity + 1
                continue
            best, makespan = counts, problem.makespan(counts)
            high = makespan
        if makespan <= bound:
            break
    return best


def _class_orders(problem: Problem) -> Iterator[Sequence[int]]:
    classes = range(len(problem.classes))
    costs = [cost.min(axis=0) for cost in problem.costs]
    single = [int(cost[1]) for cost in costs]
    if len(classes) <= _PERMUTED_CLASSES:
        yield from permutations(sorted(classes, key=lambda s: (-single[s], s)))
        return
    share = [int(cost[-(-n // problem.ranks)]) for n, cost in zip(problem.members, costs, strict=True)]
    batch = [int(cost[chunk]) for cost, chunk in zip(costs, problem.chunks, strict=True)]
    orders = (sorted(classes, key=lambda s: (-weight[s], s)) for weight in (single, share, batch, problem.members))
    yield from dict.fromkeys(tuple(order) for order in orders)


def _pack(problem: Problem, order: Sequence[int], capacity: int) -> Counts | None:
    """Fill ranks up to ``capacity`` nanoseconds, class by class, or ``None`` if a class does not fit."""
    counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
    left = capacity - problem.starts[problem.kind_of]
    room = problem.memory[problem.kind_of]
    for s in order:
        counts[:, s] = _fill(problem, s, left, room)
        if counts[:, s].sum() < problem.members[s]:
            return None
        left -= problem.costs[s][problem.kind_of, counts[:, s]]
        room = room - problem.state_bytes[s] * counts[:, s]
    return counts


def _fill(problem: Problem, s: int, left: Ints, room: Ints) -> Ints:
    """Matrices of one class per rank: the most that fit into ``left``, cheapest on average first."""
    most = np.empty_like(left)
    for kind, cost in enumerate(problem.costs[s]):
        ranks = problem.kind_of == kind
        most[ranks] = np.searchsorted(cost, left[ranks], side="right") - 1
    most = np.minimum(most, room // problem.state_bytes[s])
    average = np.where(most > 0, problem.costs[s][problem.kind_of, most] / np.maximum(most, 1), np.inf)
    order = np.lexsort((left, average))
    before = np.cumsum(most[order]) - most[order]
    taken = np.zeros_like(most)
    taken[order] = np.clip(problem.members[s] - before, 0, most[order])
    return np.asarray(taken, dtype=np.int64)


# -- local search ---------------------------------------------------------------------------------------------------

_CELLS = 24_000_000  # of neighbours looked at; counted, not timed: a clock would make plans differ from run to run
_LEVEL_ROUNDS = 4_000
_ROWS_AT_ONCE = 100_000
_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class _Patterns:
    """Ranks of one kind that hold the same counts are one pattern, so that a search does not grow with their number.

    Attributes:
        rows: the distinct count vectors, ``(patterns, classes)``.
        kinds: kind of their ranks, ``(patterns,)``.
        times: ranks per pattern, ``(patterns,)``.
    """

    rows: Ints
    kinds: Ints
    times: Ints

    @classmethod
    def from_counts(cls, problem: Problem, counts: Counts) -> _Patterns:
        return cls(counts, problem.kind_of, np.ones(len(counts), dtype=np.int64))._merged()

    def counts(self, problem: Problem) -> Counts:
        result = np.empty((problem.ranks, self.rows.shape[1]), dtype=np.int64)
        for kind in range(problem.kinds):
            alike = self.kinds == kind
            result[problem.kind_of == kind] = np.repeat(self.rows[alike], self.times[alike], axis=0)
        return result

    def replace(self, first: int, second: int, delta: Ints) -> None:
        """Carry ``delta`` from ranks of the first pattern to as many of the second."""
        pairs = min(int(self.times[first]), int(self.times[second]))
        self.times[[first, second]] -= pairs
        self.rows = np.vstack([self.rows, self.rows[first] - delta, self.rows[second] + delta])
        self.kinds = np.concatenate([self.kinds, self.kinds[[first, second]]])
        self.times = np.concatenate([self.times, [pairs, pairs]])
        merged = self._merged()
        self.rows, self.kinds, self.times = merged.rows, merged.kinds, merged.times

    def _merged(self) -> _Patterns:
        kept = self.times > 0
        keyed = np.column_stack([self.kinds, self.rows])[kept]
        merged, inverse = np.unique(keyed, axis=0, return_inverse=True)
        times = np.bincount(inverse.ravel(), weights=self.times[kept]).astype(np.int64)
        return _Patterns(np.ascontiguousarray(merged[:, 1:]), np.ascontiguousarray(merged[:, 0]), times)


def shorten(problem: Problem, counts: Counts, bound: int) -> Counts:
    """Move and swap matrices away from the slowest ranks while that shortens them.

    Each step takes, over all moves of a few matrices of one class and swaps for a few of another, the one whose two
    ranks finish first. Stops at ``bound`` nanoseconds, at a local optimum, or when the budget of neighbours is spent.
    """
    patterns = _Patterns.from_counts(problem, counts)
    budget = _CELLS
    while budget > 0:
        loads = problem.loads(patterns.rows, patterns.kinds)
        if int(loads.max()) <= bound:
            break
        donor = int(loads.argmax())
        deltas = _exchanges(problem, patterns.rows[donor])
        budget -= len(deltas) * len(loads) * len(problem.classes)
        choice = _best_exchange(problem, patterns, donor, deltas, int(loads[donor]))
        if choice is None:
            break
        patterns.replace(donor, *choice)
    return patterns.counts(problem)


def _best_exchange(
    problem: Problem, patterns: _Patterns, donor: int, deltas: Ints, makespan: int
) -> tuple[int, Ints] | None:
    """The receiver and the exchange after which the later of the two is earliest, if before ``makespan``."""
    kind = np.full(len(deltas), patterns.kinds[donor])
    relieved = problem.loads(patterns.rows[donor] - deltas, kind)
    deltas, relieved = deltas[relieved < makespan], relieved[relieved < makespan]
    best, choice = makespan, None
    at_once = max(1, _ROWS_AT_ONCE // len(patterns.rows))
    for start in range(0, len(deltas), at_once):
        some = deltas[start : start + at_once]
        rows = patterns.rows[None] + some[:, None]  # (exchanges, patterns, classes)
        able = np.asarray((rows >= 0).all(axis=2))
        able[:, donor] = False
        finish = np.full(able.shape, _NEVER)
        finish[able] = problem.loads(rows[able], np.broadcast_to(patterns.kinds, able.shape)[able])
        receivers = finish.argmin(axis=1)
        reached = np.maximum(finish[np.arange(len(some)), receivers], relieved[start : start + at_once])
        i = int(reached.argmin())
        if reached[i] < best:
            best, choice = int(reached[i]), (int(receivers[i]), some[i])
    return choice


def level_bytes(problem: Problem, counts: Counts, limit: int) -> Counts:
    """Move matrices from the ranks with the most bytes to those with the fewest, never past ``limit`` nanoseconds.

    The makespan leaves ranks that are not the slowest free. Without this they would stay as lopsided as the packing
    left them, up to all matrices on one rank where a batch costs the same whatever its size.
    """
    patterns = _Patterns.from_counts(problem, counts)
    for _ in range(_LEVEL_ROUNDS):
        choice = _levelling_move(problem, patterns, limit)
        if choice is None:
            break
        patterns.replace(*choice)
    return patterns.counts(problem)


def _levelling_move(problem: Problem, patterns: _Patterns, limit: int) -> tuple[int, int, Ints] | None:
    """The move that levels the heaviest donor most: ``(donor, receiver, delta)``."""
    nbytes = problem.rank_bytes(patterns.rows)
    for donor in np.argsort(-nbytes, kind="stable").tolist():
        best, choice = int(nbytes[donor]), None
        for s in np.flatnonzero(patterns.rows[donor]).tolist():
            for step in _steps(int(patterns.rows[donor, s]), problem.chunks[s]):
                delta = np.zeros(len(problem.classes), dtype=np.int64)
                delta[s] = step
                moved = step * int(problem.nbytes[s])
                # The receiver must end below where the donor began, or the two would trade places for ever.
                able = np.flatnonzero(nbytes + moved < nbytes[donor])
                if len(able):
                    able = able[problem.loads(patterns.rows[able] + delta, patterns.kinds[able]) <= limit]
                if not len(able):
                    continue
                receiver = int(able[nbytes[able].argmin()])
                reached = max(int(nbytes[donor]) - moved, int(nbytes[receiver]) + moved)
                if reached < best:
                    best, choice = reached, (donor, receiver, delta)
        if choice is not None:
            return choice
    return None


def _exchanges(problem: Problem, row: Ints) -> Ints:
    """What a rank with counts ``row`` may give (positive) and take (negative) in one step, ``(exchanges, classes)``."""
    gives = [(s, step) for s in np.flatnonzero(row).tolist() for step in _steps(int(row[s]), problem.chunks[s])]
    takes = [
        (t, step)
        for t, (members, count) in enumerate(zip(problem.members, row.tolist(), strict=True))
        for step in _steps(members - count, problem.chunks[t])
    ]
    donated, taken = np.array(gives, dtype=np.int64).reshape(-1, 2), np.array(takes, dtype=np.int64).reshape(-1, 2)
    first, second = np.divmod(np.arange(len(donated) * len(taken)), max(1, len(taken)))
    swaps = np.flatnonzero(donated[first, 0] != taken[second, 0])
    first, second = first[swaps], second[swaps]
    result = np.zeros((len(donated) + len(swaps), len(row)), dtype=np.int64)
    result[np.arange(len(donated)), donated[:, 0]] = donated[:, 1]
    below = len(donated) + np.arange(len(swaps))
    result[below, donated[first, 0]] = donated[first, 1]
    result[below, taken[second, 0]] -= taken[second, 1]
    return result


def _steps(most: int, chunk: int) -> list[int]:
    """A few numbers of matrices up to ``most``: one, two, three, half a chunk, a chunk, all."""
    return sorted({k for k in (1, 2, 3, chunk // 2, chunk, most) if 0 < k <= most})
