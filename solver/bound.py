"""A proven lower bound on the makespan."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from .problem import Problem

__all__ = ["lower_bound"]

# Covers the rounding of the averages; it can only make the bound smaller.
_SLACK = 1 - 1e-12


def lower_bound(problem: Problem) -> int:
    """Nanoseconds that no assignment can go below.

    The larger of two bounds. *Envelope*: with makespan ``C``, a rank pays at least ``e_s(C) = min{T_s(k) / k :
    T_s(k) <= C}`` for each matrix of class ``s``, so ``Σ_s N_s e_s(C) <= R C``; the smallest such ``C`` bounds the
    makespan. *Pigeonhole*: some rank holds at least ``ceil(N_s / R)`` matrices of class ``s``. ``ΣT(1) / R`` is no
    bound, since a batch costs less than its matrices one by one.
    """
    even = [int(cost[-(-n // problem.ranks)]) for n, cost in zip(problem.members, problem.costs, strict=True)]
    averages = [
        np.minimum.accumulate(cost[1:] / np.arange(1, len(cost))) for cost in problem.costs
    ]  # best average with at most k matrices; costs are isotonic, so "at most k" is "at most C"

    def fits(capacity: int) -> bool:
        needed = 0.0
        for count, cost, average in zip(problem.members, problem.costs, averages, strict=True):
            most = int(np.searchsorted(cost, capacity, side="right")) - 1
            if most < 1:
                return False
            needed += count * float(average[most - 1])
        return needed * _SLACK <= problem.ranks * capacity

    # From the pigeonhole bound up to even shares of every class on every rank, which are a packing.
    return bisect_left(range(sum(even)), True, lo=max(even), key=fits)
