"""Local search over counts: shorten the makespan, then level the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .problem import Counts, Ints, Problem

__all__ = ["level_bytes", "shorten"]

_NEIGHBOURS = 4_000_000  # counted, not timed: a clock would make plans differ from run to run
_LEVEL_ROUNDS = 4_000


@dataclass(slots=True, eq=False)
class _Patterns:
    """Ranks that hold the same counts are one pattern, so that a search does not grow with the number of ranks.

    Attributes:
        rows: the distinct count vectors, ``(patterns, classes)``.
        times: ranks per pattern, ``(patterns,)``.
    """

    rows: Ints
    times: Ints

    @classmethod
    def of(cls, counts: Counts) -> _Patterns:
        rows, times = np.unique(counts, axis=0, return_counts=True)
        return cls(rows, times.astype(np.int64))

    def counts(self) -> Counts:
        return np.repeat(self.rows, self.times, axis=0)

    def replace(self, first: int, second: int, delta: Ints) -> None:
        """Carry ``delta`` from ranks of the first pattern to as many of the second."""
        pairs = min(int(self.times[first]), int(self.times[second]))
        self.times[[first, second]] -= pairs
        rows = np.vstack([self.rows, self.rows[first] - delta, self.rows[second] + delta])
        times = np.concatenate([self.times, [pairs, pairs]])
        kept = times > 0
        merged, where = np.unique(rows[kept], axis=0, return_inverse=True)
        self.rows = merged
        self.times = np.bincount(where.ravel(), weights=times[kept]).astype(np.int64)


def shorten(problem: Problem, counts: Counts, bound: int) -> Counts:
    """Move and swap matrices away from the slowest ranks while that shortens them.

    Each step takes, over all moves of a few matrices of one class and swaps for a few of another, the one whose two
    ranks finish first. Stops at ``bound`` nanoseconds, at a local optimum, or when the budget of neighbours is spent.
    """
    patterns = _Patterns.of(counts)
    budget = _NEIGHBOURS
    while budget > 0:
        loads = problem.loads(patterns.rows)
        makespan = int(loads.max())
        if makespan <= bound:
            break
        donor = int(loads.argmax())
        best, choice = makespan, None
        for delta in _exchanges(problem, patterns.rows[donor]):
            budget -= len(loads)
            gives, takes = np.maximum(delta, 0), np.maximum(-delta, 0)
            if _load(problem, patterns.rows[donor] - delta) >= best:
                continue
            able = np.flatnonzero((patterns.rows >= takes).all(axis=1))
            able = able[able != donor]
            if not len(able):
                continue
            worst = problem.loads(patterns.rows[able] + gives - takes)
            i = int(worst.argmin())
            reached = max(int(worst[i]), _load(problem, patterns.rows[donor] - delta))
            if reached < best:
                best, choice = reached, (int(able[i]), delta)
        if choice is None:
            break
        patterns.replace(donor, *choice)
    return patterns.counts()


def level_bytes(problem: Problem, counts: Counts, limit: int) -> Counts:
    """Move matrices from the ranks with the most bytes to those with the fewest, never past ``limit`` nanoseconds.

    The makespan leaves ranks that are not the slowest free. Without this they would stay as lopsided as the packing
    left them, up to all matrices on one rank where a batch costs the same whatever its size.
    """
    patterns = _Patterns.of(counts)
    for _ in range(_LEVEL_ROUNDS):
        choice = _levelling_move(problem, patterns, limit)
        if choice is None:
            break
        patterns.replace(*choice)
    return patterns.counts()


def _levelling_move(problem: Problem, patterns: _Patterns, limit: int) -> tuple[int, int, Ints] | None:
    """The move that levels the heaviest donor most: ``(donor, receiver, delta)``."""
    held = problem.rank_bytes(patterns.rows)
    for donor in np.argsort(-held, kind="stable").tolist():
        best, choice = int(held[donor]), None
        for s in np.flatnonzero(patterns.rows[donor]).tolist():
            for step in _steps(int(patterns.rows[donor, s]), problem.chunks[s]):
                delta = np.zeros(len(problem.shapes), dtype=np.int64)
                delta[s] = step
                moved = step * int(problem.nbytes[s])
                # The receiver must end below where the donor began, or the two would trade places for ever.
                able = np.flatnonzero(held + moved < held[donor])
                able = able[problem.loads(patterns.rows[able] + delta) <= limit] if len(able) else able
                if not len(able):
                    continue
                receiver = int(able[held[able].argmin()])
                reached = max(int(held[donor]) - moved, int(held[receiver]) + moved)
                if reached < best:
                    best, choice = reached, (donor, receiver, delta)
        if choice is not None:
            return choice
    return None


def _exchanges(problem: Problem, row: Ints) -> Iterator[Ints]:
    """What a rank with counts ``row`` may give (positive) and take (negative) in one step."""
    for s in np.flatnonzero(row).tolist():
        for step in _steps(int(row[s]), problem.chunks[s]):
            delta = np.zeros(len(row), dtype=np.int64)
            delta[s] = step
            yield delta
            for t in range(len(row)):
                if t == s:
                    continue
                for back in _steps(problem.members[t] - int(row[t]), problem.chunks[t]):
                    swap = delta.copy()
                    swap[t] = -back
                    yield swap


def _steps(most: int, chunk: int) -> list[int]:
    """A few numbers of matrices up to ``most``: one, two, three, half a chunk, a chunk, all."""
    return sorted({k for k in (1, 2, 3, chunk // 2, chunk, most) if 0 < k <= most})


def _load(problem: Problem, row: Ints) -> int:
    return sum(int(cost[n]) for cost, n in zip(problem.costs, row.tolist(), strict=True))
