"""List scheduling: one matrix at a time to the rank that finishes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from operator import le

import numpy as np

from .problem import FORBIDDEN, Counts, Problem

__all__ = ["batch_greedy", "longest_first", "round_robin"]


def longest_first(problem: Problem) -> Counts:
    """LPT on ``T(1)``: the longest matrix next, to the rank with the least work. Blind to batching; the baseline.

    A rank whose limits are reached takes no more; what no rank can take goes to the first, and its load says so.
    """
    counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
    load, owned = [0] * problem.ranks, np.zeros((problem.ranks, len(problem.weights)), dtype=np.int64).tolist()
    for s in _longest_class_first(problem):
        single = problem.costs[s][problem.kind_of, min(1, problem.members[s])].tolist()

        def finish(rank: int, _n: int, single: list[int] = single) -> int:
            return load[rank] + single[rank]

        _deal(problem, s, counts, owned, load, finish)
    return counts


def batch_greedy(problem: Problem) -> Counts:
    """The longest class next, each matrix to the rank that would then finish first, given what batching saves."""
    counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
    load, owned = [0] * problem.ranks, np.zeros((problem.ranks, len(problem.weights)), dtype=np.int64).tolist()
    for s in _longest_class_first(problem):
        costs, base = problem.costs[s].tolist(), list(load)
        cost_of = [costs[kind] for kind in problem.kind_of.tolist()]
        # A rank that holds the whole class ends the loop; there is no cost beyond it to look up.
        last = problem.members[s]

        def finish(
            rank: int, n: int, base: list[int] = base, cost_of: list[list[int]] = cost_of, last: int = last
        ) -> int:
            return base[rank] + cost_of[rank][min(n, last)]

        _deal(problem, s, counts, owned, load, finish)
    return counts


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


def _deal(
    problem: Problem, s: int, counts: Counts, owned: list[list[int]], load: list[int], finish: Callable[[int, int], int]
) -> None:
    """Hand out class ``s``; ``finish(rank, n)`` is when a rank would be done with its n-th matrix of it.

    Keeps ``load`` and ``held`` (bytes of each limit) up to date; ties go to fewer bytes, then to the lower rank.
    """
    weights = problem.weights[:, s].tolist()
    room = problem.most(FORBIDDEN - 1)[s].tolist()
    kinds, limits = problem.kind_of.tolist(), problem.room.T.tolist()
    taken = [0] * problem.ranks
    heap = [(finish(rank, 1), owned[rank], rank) for rank in range(problem.ranks)]
    heapq.heapify(heap)
    for left in range(problem.members[s], 0, -1):
        while heap:
            at, _, rank = heap[0]
            after = [have + more for have, more in zip(owned[rank], weights, strict=True)]
            if taken[rank] < room[kinds[rank]] and all(map(le, after, limits[kinds[rank]])):
                break
            heapq.heappop(heap)  # full, and will stay so
        else:
            taken[0] += left
            break
        taken[rank] += 1
        load[rank], owned[rank] = at, after
        heapq.heapreplace(heap, (finish(rank, taken[rank] + 1), owned[rank], rank))
    counts[:, s] = taken


def _longest_class_first(problem: Problem) -> list[int]:
    return sorted(range(len(problem.classes)), key=lambda s: (-int(problem.costs[s][:, 1].min()), s))
