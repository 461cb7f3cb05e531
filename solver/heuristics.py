"""Heuristics: list scheduling, one matrix at a time to the rank that finishes first, and packing into a capacity."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import permutations
from operator import le

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

    Ties go to the rank with fewer bytes of each limit, then to the lower one.

    Args:
        costs: what a rank of each kind is taken to pay for its matrices of a class, as ``Problem.costs``.
    """
    counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
    load, owned = [0] * problem.ranks, np.zeros((problem.ranks, len(problem.weights)), dtype=np.int64).tolist()
    kinds, limits = problem.kind_of.tolist(), problem.room.T.tolist()
    for s in sorted(range(len(costs)), key=lambda s: (-int(problem.costs[s][:, 1].min()), s)):
        weights, room = problem.weights[:, s].tolist(), problem.most(FORBIDDEN - 1)[s].tolist()
        base, ends = list(load), costs[s].tolist()
        taken = [0] * problem.ranks
        heap = [(base[rank] + ends[kind][1], owned[rank], rank) for rank, kind in enumerate(kinds)]
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
    left = np.full(problem.ranks, capacity, dtype=np.int64)
    room = problem.room[:, problem.kind_of].copy()
    for s in order:
        counts[:, s] = _fill(problem, s, left, room)
        if counts[:, s].sum() < problem.members[s]:
            return None
        left -= problem.costs[s][problem.kind_of, counts[:, s]]
        room -= problem.weights[:, s, None] * counts[:, s]
    return counts


def _fill(problem: Problem, s: int, left: Ints, room: Ints) -> Ints:
    """Matrices of one class per rank: the most that fit into ``left``, cheapest on average first."""
    most = np.empty_like(left)
    for kind, cost in enumerate(problem.costs[s]):
        ranks = problem.kind_of == kind
        most[ranks] = np.searchsorted(cost, left[ranks], side="right") - 1
    most = np.minimum(most, (room // problem.weights[:, s, None]).min(axis=0))
    average = np.where(most > 0, problem.costs[s][problem.kind_of, most] / np.maximum(most, 1), np.inf)
    order = np.lexsort((left, average))
    before = np.cumsum(most[order]) - most[order]
    taken = np.zeros_like(most)
    taken[order] = np.clip(problem.members[s] - before, 0, most[order])
    return np.asarray(taken, dtype=np.int64)
