"""Heuristics: list scheduling, packing into a capacity, and local search over counts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from .problem import FORBIDDEN, Counts, Ints, Problem

_PERMUTED_CLASSES = 4  # 24 orders; more classes are tried in a few orders only


def longest_first(problem: Problem) -> Counts:
    """LPT on ``T(1)``: the longest matrix next, to the rank with the least work. Blind to batching."""
    return _schedule(problem, [np.arange(cost.shape[1]) * cost[:, 1:2] for cost in problem.costs])


def batch_greedy(problem: Problem) -> Counts:
    """The longest class next, each matrix to the rank that would then finish first, given what batching saves."""
    return _schedule(problem, problem.costs)


def _schedule(problem: Problem, costs: Sequence[Ints]) -> Counts:
    """Hand out the matrices class by class, the longest first, each to the rank that would be done with it first.

    Ties go to the rank that owns fewer elements, then to the lower one.

    Args:
        costs: what a rank of each kind is taken to pay for its matrices of a class, as ``Problem.costs``.
    """
    counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
    load, owned = problem.starts[problem.kind_of].tolist(), [0] * problem.ranks
    kinds = problem.kind_of.tolist()
    for s in sorted(range(len(costs)), key=lambda s: (-int(problem.costs[s][:, 1].min()), s)):
        rows, columns, _ = problem.classes[s]
        able = (problem.costs[s][:, 1] < FORBIDDEN).tolist()
        base, ends = list(load), costs[s].tolist()
        taken = [0] * problem.ranks
        heap = [(base[rank] + ends[kind][1], owned[rank], rank) for rank, kind in enumerate(kinds) if able[kind]]
        heapq.heapify(heap)
        for _ in range(problem.members[s]):
            finish, _, rank = heap[0]
            taken[rank] += 1
            load[rank], owned[rank] = finish, owned[rank] + rows * columns
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
    for s in order:
        counts[:, s] = _fill(problem, s, left)
        if counts[:, s].sum() < problem.members[s]:
            return None
        left -= problem.costs[s][problem.kind_of, counts[:, s]]
    return counts


def _fill(problem: Problem, s: int, left: Ints) -> Ints:
    """Matrices of one class per rank: the most that fit into ``left``, cheapest on average first."""
    most = np.empty_like(left)
    for kind, cost in enumerate(problem.costs[s]):
        ranks = problem.kind_of == kind
        most[ranks] = np.searchsorted(cost, left[ranks], side="right") - 1
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
        choice = _best_exchange(problem.loads, patterns, donor, deltas)
        if choice is None:
            break
        patterns.replace(donor, *choice)
    return patterns.counts(problem)


def level_bytes(problem: Problem, counts: Counts, limit: int) -> Counts:
    """Move matrices from the ranks with the most bytes to those with the fewest, never past ``limit`` nanoseconds.

    The makespan leaves ranks that are not the slowest free. Without this they would stay as lopsided as the packing
    left them, up to all matrices on one rank where a batch costs the same whatever its size.
    """
    patterns = _Patterns.from_counts(problem, counts)

    def allowed_bytes(rows: Ints, kinds: Ints) -> Ints:
        return np.where(problem.loads(rows, kinds) <= limit, problem.rank_bytes(rows), _NEVER)

    for _ in range(_LEVEL_ROUNDS):
        for donor in np.argsort(-problem.rank_bytes(patterns.rows), kind="stable").tolist():
            choice = _best_exchange(allowed_bytes, patterns, donor, _moves(problem, patterns.rows[donor]))
            if choice is not None:
                patterns.replace(donor, *choice)
                break
        else:
            break
    return patterns.counts(problem)


def _best_exchange(
    measure: Callable[[Ints, Ints], Ints], patterns: _Patterns, donor: int, deltas: Ints
) -> tuple[int, Ints] | None:
    """The receiver and the exchange after which the larger of the two is least, if it is less than the donor is now.

    Args:
        measure: of rows of counts and the kinds of their ranks; it falls where counts do.
    """
    best = int(measure(patterns.rows[donor : donor + 1], patterns.kinds[donor : donor + 1])[0])
    relieved = measure(patterns.rows[donor] - deltas, np.full(len(deltas), patterns.kinds[donor]))
    deltas, relieved = deltas[relieved < best], relieved[relieved < best]
    choice = None
    at_once = max(1, _ROWS_AT_ONCE // len(patterns.rows))
    for start in range(0, len(deltas), at_once):
        some = deltas[start : start + at_once]
        rows = patterns.rows[None] + some[:, None]  # (exchanges, patterns, classes)
        able = np.asarray((rows >= 0).all(axis=2))
        able[:, donor] = False
        after = np.full(able.shape, _NEVER)
        after[able] = measure(rows[able], np.broadcast_to(patterns.kinds, able.shape)[able])
        receivers = after.argmin(axis=1)
        reached = np.maximum(after[np.arange(len(some)), receivers], relieved[start : start + at_once])
        i = int(reached.argmin())
        if reached[i] < best:
            best, choice = int(reached[i]), (int(receivers[i]), some[i])
    return choice


def _exchanges(problem: Problem, row: Ints) -> Ints:
    """What a rank with counts ``row`` may give (positive) and take (negative) in one step, ``(exchanges, classes)``."""
    gives, takes = _moves(problem, row), _moves(problem, np.array(problem.members) - row)
    first, second = np.divmod(np.arange(len(gives) * len(takes)), max(1, len(takes)))
    of_two_classes = gives[first].argmax(axis=1) != takes[second].argmax(axis=1)
    swaps = (gives[first] - takes[second])[of_two_classes]
    return np.concatenate([gives, swaps])


def _moves(problem: Problem, counts: Ints) -> Ints:
    """A few matrices of one class, of which there are so many, ``(moves, classes)``."""
    steps = [(s, k) for s, most in enumerate(counts.tolist()) for k in _steps(most, problem.chunks[s])]
    moves = np.zeros((len(steps), len(counts)), dtype=np.int64)
    for move, (s, k) in zip(moves, steps, strict=True):
        move[s] = k
    return moves


def _steps(most: int, chunk: int) -> list[int]:
    """A few numbers of matrices up to ``most``: one, two, three, half a chunk, a chunk, all."""
    return sorted({k for k in (1, 2, 3, chunk // 2, chunk, most) if 0 < k <= most})
