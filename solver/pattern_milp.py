"""The pattern MILP: how many ranks hold which counts. Its size does not depend on the number of ranks.

A *pattern* is what one rank may hold within a capacity. Column generation finds the patterns that matter: a linear
program covers all matrices with the patterns known so far, its duals price the matrices, and a multiple-choice
knapsack finds the pattern that is worth most. If even the best patterns, one on every rank, are worth less than all
matrices, no assignment fits the capacity (Farley's bound): a proof that costs no integer program.
"""

from __future__ import annotations

import importlib
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .child import SolverFailed
from .problem import Counts, Ints, Problem

Floats = NDArray[np.float64]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Verdict = Literal["infeasible", "possible", "unknown"]
Pattern = tuple[int, tuple[int, ...]]  # kind of rank, matrices of each class

_CELLS = 8192  # the capacity in the knapsack's units
_ROUNDS = 60
_DIGITS = 5  # of prices: solvers agree on about eight, and ties must not depend on the rest
_TOLERANCE = 1e-7
_FEW = 4_000  # patterns, all of which one integer program takes
_USE = 1e-3  # cost of using all ranks, where leaving all matrices uncovered costs 1: covering comes first


@dataclass(eq=False)
class PatternPool:
    """Patterns found so far, ``(kind, counts)``, in the order in which they were found, and the CBC that PuLP bundles.

    It runs on one thread: several would search differently on every run.

    Attributes:
        clocked: a time limit ended a search, and so had a say in its answer.
    """

    problem: Problem
    deadline: float
    clocked: bool = False
    _pulp: Any = field(default_factory=lambda: importlib.import_module("pulp"))  # and not earlier
    _pool: dict[Pattern, int] = field(default_factory=dict)

    def add(self, kind: int, row: Ints) -> bool:
        """Whether the pattern is new; its cost is kept with it."""
        key = (kind, tuple(int(n) for n in row))
        if key in self._pool or not any(key[1]):
            return False
        self._pool[key] = int(self.problem.loads(np.array([key[1]]), np.array([kind]))[0])
        return True

    def add_all(self, capacity: int) -> bool:
        """Add all patterns within ``capacity`` nanoseconds, if they are few: then :meth:`cover` finds what there is."""
        for kind, most in enumerate(self.problem.most(capacity).T.tolist()):
            if math.prod(n + 1 for n in most) > _FEW:
                return False
            rows = np.indices([n + 1 for n in most]).reshape(len(most), -1).T
            for row in rows[self.problem.loads(rows, np.full(len(rows), kind)) <= capacity]:
                self.add(kind, row)
        return True

    def refute(self, capacity: int) -> Verdict:
        """Whether some mix of patterns within ``capacity`` nanoseconds covers all matrices, in fractions of ranks.

        Costs are rounded down to the knapsack's cells, so that ``"infeasible"`` is a proof.
        """
        problem = self.problem
        ranks, members = np.array(problem.ranks_per_kind), np.array(problem.members)
        knapsacks = self._knapsacks(capacity, members, strict=False)
        # Patterns of the relaxed knapsack may lie a little above the capacity: they serve this proof alone.
        relaxed: dict[Pattern, None] = {}
        while time.monotonic() < self.deadline:
            shortfall, prices, _ = self._price([*self._within(capacity), *relaxed], members, ranks)
            if shortfall <= _TOLERANCE:
                return "possible"
            offers = [knapsack.best(prices) for knapsack in knapsacks]
            most = sum(int(n) * value for n, (value, _) in zip(ranks, offers, strict=True))
            if float(prices @ members) > most * (1 + 1e-9):
                return "infeasible"
            before = len(self._pool) + len(relaxed)
            for kind, (_, row) in enumerate(offers):
                if int(problem.loads(row[None], np.array([kind]))[0]) <= capacity:
                    self.add(kind, row)
                else:
                    relaxed[kind, tuple(row.tolist())] = None
            if len(self._pool) + len(relaxed) == before:
                break
        return "unknown"

    def assign(self, capacity: int) -> Counts | None:
        """Counts near or within ``capacity`` nanoseconds, from the patterns that pricing finds.

        First the integer program over all patterns, then, if these do not suffice, a dive: patterns that the linear
        program wants whole are taken, and new ones are priced for the rest. ``None`` proves nothing.
        """
        problem = self.problem
        members, ranks = np.array(problem.members), np.array(problem.ranks_per_kind)
        self._fewest(capacity, members, ranks)
        counts = self.cover(capacity)[1]
        if counts is None:
            counts = self._dive(capacity, members, ranks)
            covered = self.cover(capacity)[1]  # by the dive's patterns too
            counts = counts if covered is None else covered
        return counts

    def _dive(self, capacity: int, members: Ints, ranks: Ints) -> Counts | None:
        """Counts that need not be within ``capacity`` at the end, when few ranks are left for what remains."""
        problem = self.problem
        left, free = members.copy(), ranks.copy()
        counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
        unused = [np.flatnonzero(problem.kind_of == kind).tolist() for kind in range(problem.kinds)]
        while left.any() and free.any() and time.monotonic() < self.deadline:
            values = self._fewest(capacity, left, free)
            if not values:
                break
            whole = [(key, int(value + _TOLERANCE)) for key, value in values if value >= 1 - _TOLERANCE]
            for (kind, row), times in whole or [(max(values, key=lambda item: item[1])[0], 1)]:
                for _ in range(min(times, int(free[kind]))):
                    taken = np.minimum(row, left)
                    counts[unused[kind].pop(0)] = taken
                    left -= taken
                    free[kind] -= 1
        for s in np.repeat(np.arange(len(left)), left).tolist():
            one = np.eye(len(left), dtype=np.int64)[s]
            counts[problem.loads(counts + one).argmin(), s] += 1
        return counts

    def _fewest(self, capacity: int, members: Ints, ranks: Ints) -> list[tuple[Pattern, float]]:
        """Price until no pattern lets fewer of ``ranks`` cover ``members``; then how often each pattern is used."""
        knapsacks = self._knapsacks(capacity, members, strict=True)
        for _ in range(_ROUNDS):
            patterns = self._within(capacity)
            _, prices, used = self._price(patterns, members, ranks, fewest=True)
            added = [self.add(kind, knapsack.best(prices)[1]) for kind, knapsack in enumerate(knapsacks)]
            if not any(added) or time.monotonic() > self.deadline:
                break
        return [(key, times) for key, times in zip(patterns, used, strict=True) if times > 0]

    def _within(self, capacity: int) -> list[Pattern]:
        return [key for key, cost in self._pool.items() if cost <= capacity]

    def _knapsacks(self, capacity: int, members: Ints, *, strict: bool) -> list[_Knapsack]:
        """One per kind of rank; patterns of one class alone are added on the way."""
        problem = self.problem
        knapsacks = [_Knapsack(problem, kind, capacity, members, strict=strict) for kind in range(problem.kinds)]
        for kind, knapsack in enumerate(knapsacks):
            for s, most in enumerate(knapsack.most):
                self.add(kind, np.eye(len(members), dtype=np.int64)[s] * most)
        return knapsacks

    def _price(
        self, patterns: Sequence[Pattern], members: Ints, ranks: Ints, *, fewest: bool = False
    ) -> tuple[float, Floats, list[float]]:
        """Cover as much of ``members`` as ``ranks`` can with patterns in fractions, ``fewest``: with few of them.

        Returns:
            the value of what is not covered, of 1 in all; prices of a matrix of each class, up to a common factor; and
            how often each pattern is used.
        """
        problem, pulp = self.problem, self._pulp
        value = [
            min(float(c[g, k]) / k for g in range(problem.kinds) for k in (1, problem.chunks[s]))
            for s, c in enumerate(problem.costs)
        ]
        total = float(np.dot(value, members)) / int(members.sum())  # so that prices are about one
        weigh = random.Random(2)
        model = pulp.LpProblem("cover", pulp.LpMinimize)
        columns = [pulp.LpVariable(f"y_{i}", 0) for i in range(len(patterns))]
        missing = [pulp.LpVariable(f"m_{s}", 0) for s in range(len(value))]
        model += pulp.lpSum(v / total * m for v, m in zip(value, missing, strict=True)) + (
            pulp.lpSum(_USE * int(members.sum()) / float(ranks.sum()) * (1 + weigh.random() / 100) * y for y in columns)
            if fewest
            else 0
        )
        for s, wanted in enumerate(members.tolist()):
            # Slightly more than there are, by irregular amounts: then the prices are unique, whichever solver runs.
            wanted *= 1 + 1e-4 * weigh.uniform(0.5, 1.0)
            covered = pulp.lpSum(row[s] * y for (_, row), y in zip(patterns, columns, strict=True) if row[s])
            model += covered + missing[s] >= wanted, f"class_{s}"
        for kind, count in enumerate(ranks.tolist()):
            model += pulp.lpSum(y for (g, _), y in zip(patterns, columns, strict=True) if g == kind) <= count
        if self._solve(model, max(1.0, self.deadline - time.monotonic())) != "optimal":
            raise SolverFailed("the covering problem, which always has an optimum, came back without one")
        prices = np.array([max(0.0, model.constraints[f"class_{s}"].pi or 0.0) for s in range(len(value))])
        shortfall = sum(v / total * (m.value() or 0.0) for v, m in zip(value, missing, strict=True))
        rounded = np.array([float(f"{price:.{_DIGITS - 1}e}") for price in prices])
        return shortfall / int(members.sum()), rounded, [y.value() or 0.0 for y in columns]

    def cover(self, capacity: int) -> tuple[Status, Counts | None]:
        """Counts of patterns within ``capacity`` by the integer program, or ``"infeasible"``: of those known so far."""
        problem, pulp = self.problem, self._pulp
        patterns = self._within(capacity)
        model = pulp.LpProblem("owners", pulp.LpMinimize)
        ranks = problem.ranks_per_kind
        columns = [pulp.LpVariable(f"y_{i}", 0, ranks[kind], pulp.LpInteger) for i, (kind, _) in enumerate(patterns)]
        model += pulp.lpSum(columns)
        for s, members in enumerate(problem.members):
            model += pulp.lpSum(row[s] * y for (_, row), y in zip(patterns, columns, strict=True) if row[s]) >= members
        for kind, count in enumerate(ranks):
            model += pulp.lpSum(y for (g, _), y in zip(patterns, columns, strict=True) if g == kind) <= count
        status = self._solve(model, self.deadline - time.monotonic())
        if status in ("infeasible", "unknown"):
            return status, None
        chosen = [(key, round(y.value() or 0.0)) for key, y in zip(patterns, columns, strict=True)]
        counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
        free = {kind: np.flatnonzero(problem.kind_of == kind).tolist() for kind in range(problem.kinds)}
        for (kind, row), times in chosen:
            for _ in range(times):
                if not free[kind]:
                    raise SolverFailed("the solver's patterns need more ranks than there are")
                counts[free[kind].pop(0)] = row
        return status, _without_surplus(problem, counts)

    def _solve(self, model: Any, seconds: float) -> Status:
        """Solve to optimality, or to the time limit; values and duals are then in ``model``.

        Raises:
            SolverFailed: whatever went wrong inside PuLP or CBC, or an answer that holds what is no number.
        """
        if seconds <= 0:
            return "unknown"
        pulp = self._pulp
        cbc, limit = pulp.PULP_CBC_CMD.pulp_cbc_path, max(1, math.ceil(seconds))
        try:
            # CBC is single-threaded unless told otherwise; told to take one thread, it starts one and may wait for it
            # until the time limit.
            model.solve(pulp.COIN_CMD(path=cbc, msg=False, timeLimit=limit, gapRel=0.0))
        except Exception as error:
            raise SolverFailed(f"{type(error).__name__}: {error}"[:1000]) from error
        numbers = [v.varValue for v in model.variables()] + [c.pi for c in model.constraints.values()]
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise SolverFailed("its answer holds what is no number")
        # Neither field tells all: LpStatusOptimal covers a time-out with a solution, and of a program without integer
        # points CBC's sol_status says the same as of a time-out.
        if model.status == pulp.LpStatusInfeasible:
            return "infeasible"
        statuses: dict[int, Status] = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionIntegerFeasible: "feasible"}
        status = statuses.get(model.sol_status, "unknown")
        self.clocked |= status != "optimal"
        return status


def _without_surplus(problem: Problem, counts: Counts) -> Counts:
    """Patterns may hold more of a class than there is. The surplus is taken from the ranks with the largest loads."""
    for s, members in enumerate(problem.members):
        surplus = int(counts[:, s].sum()) - members
        if surplus < 0:
            raise SolverFailed("the solver's patterns do not cover every matrix")
        for _ in range(surplus):
            counts[np.where(counts[:, s] > 0, problem.loads(counts), -1).argmax(), s] -= 1
    return counts


class _Knapsack:
    """The most valuable pattern of one kind of rank within a capacity: multiple-choice knapsack by dynamic programming.

    Weights are whole cells of the capacity: rounded up, every pattern fits (``strict``); rounded down, none that fits
    is missed, and the value is an upper bound.
    """

    def __init__(self, problem: Problem, kind: int, capacity: int, members: Ints, *, strict: bool) -> None:
        self.most = np.minimum(problem.most(capacity)[:, kind], members).tolist()
        room = max(1, capacity - int(problem.starts[kind]))
        self.items: list[tuple[Ints, Ints]] = []  # per class: weights, counts
        for s, most in enumerate(self.most):
            cells = problem.costs[s][kind, 1 : most + 1] * _CELLS
            weights = -(-cells // room) if strict else cells // room
            # Of counts that weigh the same, the largest.
            last = np.flatnonzero(np.diff(np.append(weights, _CELLS + 1)))
            self.items.append((weights[last], last + 1))

    def best(self, prices: Floats) -> tuple[float, Ints]:
        """An upper bound on the value of any pattern, and a pattern that nearly reaches it."""
        worth = np.zeros(_CELLS + 1)
        taken: list[tuple[int, NDArray[np.int32]]] = []
        for s, (weights, counts) in enumerate(self.items):
            if prices[s] <= 0 or not len(counts):
                continue
            before, choice = worth.copy(), np.zeros(_CELLS + 1, dtype=np.int32)
            for i, (weight, count) in enumerate(zip(weights.tolist(), counts.tolist(), strict=True)):
                offered = before[: _CELLS + 1 - weight] + prices[s] * count
                better = offered > worth[weight:]
                np.copyto(worth[weight:], offered, where=better)
                np.copyto(choice[weight:], i + 1, where=better)
            taken.append((s, choice))
        row, cell = np.zeros(len(self.items), dtype=np.int64), _CELLS
        for s, choice in reversed(taken):
            if choice[cell]:
                weights, counts = self.items[s]
                row[s] = counts[choice[cell] - 1]
                cell -= int(weights[choice[cell] - 1])
        return float(worth[-1]), row
