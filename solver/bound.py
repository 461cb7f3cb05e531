"""A proven lower bound on the makespan."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from .problem import FORBIDDEN, Infeasible, Ints, Problem

# Covers the rounding of the averages; it can only make the bound smaller.
_SLACK = 1 - 1e-12


def lower_bound(problem: Problem) -> int:
    """Nanoseconds that no assignment can go below.

    The smallest capacity ``C`` that passes two tests. *Pigeonhole*: the ranks together can take all matrices of each
    class alone. *Envelope*: within ``C`` a rank pays at least ``e_s(C) = min{T_s(k) / k : T_s(k) <= C}`` for each
    matrix of class ``s``, so ``Σ_s N_s e_s(C) <= R C``. ``ΣT(1) / R`` is no bound, since a batch costs less than its
    matrices one by one.

    Raises:
        Infeasible: limits on memory or spread leave no room for a class.
    """
    _check_room(problem)
    pools: list[str | None] = [*sorted({pool for _, _, pool in problem.classes})]
    envelopes = [_Envelope(problem, pool) for pool in (pools if len(pools) == 1 else [*pools, None])]
    ranks = np.array(problem.ranks_per_kind)

    def fits(capacity: int) -> bool:
        most = problem.most(capacity)
        if any(int(ranks @ most[s]) < members for s, members in enumerate(problem.members)):
            return False
        return all(envelope.fits(capacity, most) for envelope in envelopes)

    return max(1, bisect_left(range(problem.ceiling + 1), True, key=fits))


class _Envelope:
    """The second test for the classes of one pool, or of all."""

    def __init__(self, problem: Problem, pool: str | None) -> None:
        self.problem = problem
        self.classes = [s for s, (_, _, p) in enumerate(problem.classes) if pool is None or p == pool]
        reach = [any(problem.costs[s][g, 1] < FORBIDDEN for s in self.classes) for g in range(problem.kinds)]
        ranks = zip(problem.ranks_per_kind, problem.speed, reach, strict=True)
        self.power = sum(count * speed for count, speed, able in ranks if able)
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
        return needed * _SLACK <= self.power * capacity


def _check_room(problem: Problem) -> None:
    """Whether all ranks together can hold each class, and all classes of a pool, at any speed."""
    ranks, most = np.array(problem.ranks_per_kind), problem.most(FORBIDDEN - 1)
    for s, (rows, cols, pool) in enumerate(problem.classes):
        room = int(ranks @ most[s])
        if room < problem.members[s]:
            suffix = f" of pool {pool!r}" if pool else ""
            raise Infeasible(
                f"{problem.members[s]} matrices of shape {rows}x{cols}{suffix} need owners, but memory and spread_cap "
                f"leave room for {room}; raise memory or spread_cap, or add ranks"
            )
    for what, weights, room in zip(("memory", "spread_cap"), problem.weights, problem.room, strict=False):
        together = sum(int(n) * int(r) for n, r in zip(ranks, room, strict=True))
        needed = sum(n * int(b) for n, b in zip(problem.members, weights, strict=True))
        if needed > together:
            raise Infeasible(
                f"the matrices take {needed} bytes, but {what} leaves the ranks {together} in all; raise {what} or add "
                "ranks"
            )
