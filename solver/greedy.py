"""List scheduling: one matrix at a time to the rank that finishes first."""

from __future__ import annotations

import heapq

import numpy as np

from .problem import Counts, Problem

__all__ = ["batch_greedy", "longest_first"]


def longest_first(problem: Problem) -> Counts:
    """LPT on ``T(1)``: the longest matrix next, to the rank with the least work. Blind to batching; the baseline."""
    counts = np.zeros((problem.ranks, len(problem.shapes)), dtype=np.int64)
    heap = [(0, 0, 0, rank) for rank in range(problem.ranks)]  # (load, bytes, count, rank)
    for s in _longest_class_first(problem):
        single, nbytes = int(problem.costs[s][1]), int(problem.nbytes[s])
        for _ in range(problem.members[s]):
            load, held, count, rank = heap[0]
            heapq.heapreplace(heap, (load + single, held + nbytes, count + 1, rank))
            counts[rank, s] += 1
    return counts


def batch_greedy(problem: Problem) -> Counts:
    """The longest class next, each matrix to the rank that would then finish first, given what batching saves."""
    counts = np.zeros((problem.ranks, len(problem.shapes)), dtype=np.int64)
    loads, held, count = [0] * problem.ranks, [0] * problem.ranks, [0] * problem.ranks
    for s in _longest_class_first(problem):
        cost, nbytes, base = problem.costs[s].tolist(), int(problem.nbytes[s]), list(loads)
        taken = [0] * problem.ranks
        heap = [(base[rank] + cost[1], held[rank], count[rank], rank) for rank in range(problem.ranks)]
        heapq.heapify(heap)
        for _ in range(problem.members[s]):
            load, _held, _count, rank = heap[0]
            loads[rank] = load
            taken[rank] += 1
            held[rank] += nbytes
            count[rank] += 1
            # A rank that holds the whole class ends the loop; there is no cost beyond it to look up.
            following = cost[min(taken[rank] + 1, problem.members[s])]
            heapq.heapreplace(heap, (base[rank] + following, held[rank], count[rank], rank))
        counts[:, s] = taken
    return counts


def _longest_class_first(problem: Problem) -> list[int]:
    return sorted(range(len(problem.shapes)), key=lambda s: (-int(problem.costs[s][1]), s))
