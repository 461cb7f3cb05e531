"""Batch-aware MULTIFIT: the smallest capacity into which the classes can be packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from .problem import Counts, Ints, Problem

__all__ = ["multifit"]

_PERMUTED_CLASSES = 4  # 24 orders; more classes are tried in a few orders only


def multifit(problem: Problem, bound: int, makespan: int) -> Counts | None:
    """The best packing found by bisecting the capacity, or ``None`` if none is below ``known``.

    Args:
        bound: nanoseconds below which no packing exists.
        known: makespan, in nanoseconds, that a packing must beat.
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
