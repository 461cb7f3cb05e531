"""MILPs through PuLP, and the compact one: counts per rank within a capacity, or the proof that there are none."""

from __future__ import annotations

import importlib
import math
from typing import Any, Literal

import numpy as np

from .child import SolverFailed
from .problem import Counts, Problem

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_SCALE = 1000.0  # the capacity in the units of the model; nanoseconds would drown in the solver's tolerances
_ROOM = 1 + 1e-5  # above the capacity: exactly at an optimum, rounding makes CBC call the model infeasible


class MilpSolver:
    """The CBC that PuLP bundles. It runs on one thread: several would search differently on every run.

    Args:
        cbc: the file that is CBC.

    Attributes:
        pulp: the module, imported here and not earlier.
        clocked: a time limit ended a search, and so had a say in its answer.
    """

    def __init__(self, cbc: str) -> None:
        self.pulp: Any = importlib.import_module("pulp")
        self.clocked = False
        self._cbc = cbc

    def solve(self, model: Any, seconds: float) -> Status:
        """Solve to optimality, or to the time limit; values and duals are then in ``model``.

        Raises:
            SolverFailed: whatever went wrong inside PuLP or CBC, or an answer that holds what is no number.
        """
        if seconds <= 0:
            return "unknown"
        pulp = self.pulp
        try:
            # CBC is single-threaded unless told otherwise; told to take one thread, it starts one and may wait for it
            # until the time limit.
            model.solve(pulp.COIN_CMD(path=self._cbc, msg=False, timeLimit=max(1, math.ceil(seconds)), gapRel=0.0))
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


def search_space(problem: Problem, capacity: int) -> int:
    """Binaries of the MILP when no rank may exceed ``capacity`` nanoseconds: ``Σ_r Σ_s (K_s + 1)``."""
    per_kind = (problem.most(capacity) + 1).sum(axis=0)
    return int(per_kind @ np.array(problem.ranks_per_kind))


def assign_within(problem: Problem, capacity: int, solver: MilpSolver, seconds: float) -> tuple[Status, Counts | None]:
    """Counts whose makespan is at most ``capacity`` nanoseconds (up to 1e-5 above), if there are any.

    ``x[s, r, k]`` says that rank ``r`` owns exactly ``k`` matrices of class ``s``; the ranks are not ordered by load,
    because solvers then find no solution at all.

    Args:
        seconds: the time limit.

    Raises:
        SolverFailed: a crash, or an answer that does not hold.
    """
    model, x = _model(problem, capacity, solver)
    status = solver.solve(model, seconds)
    if status in ("infeasible", "unknown"):
        return status, None
    return "feasible", _counts(problem, x, capacity)


def _model(problem: Problem, capacity: int, solver: MilpSolver) -> tuple[Any, dict[tuple[int, int, int], Any]]:
    pulp = solver.pulp
    most, kinds = problem.most(capacity), problem.kind_of.tolist()
    classes = range(len(problem.classes))
    unit = _SCALE / capacity
    model = pulp.LpProblem("owners", pulp.LpMinimize)
    x = {
        (s, r, k): pulp.LpVariable(f"x_{s}_{r}_{k}", cat=pulp.LpBinary)
        for s in classes
        for r, kind in enumerate(kinds)
        for k in range(int(most[s, kind]) + 1)
    }
    for r, kind in enumerate(kinds):
        sizes = [(s, k) for s in classes for k in range(1, int(most[s, kind]) + 1)]
        for s in classes:
            model += pulp.lpSum(x[s, r, k] for k in range(int(most[s, kind]) + 1)) == 1
        model += pulp.lpSum(float(problem.costs[s][kind, k]) * unit * x[s, r, k] for s, k in sizes) <= _SCALE * _ROOM
        for weights, room in zip(problem.weights.tolist(), problem.room[:, kind].tolist(), strict=True):
            if sum(weight * int(k) for weight, k in zip(weights, most[:, kind], strict=True)) > room:
                model += pulp.lpSum(k * weights[s] * (_SCALE / room) * x[s, r, k] for s, k in sizes) <= _SCALE
    for s, members in enumerate(problem.members):
        owned = [k * x[s, r, k] for r, kind in enumerate(kinds) for k in range(1, int(most[s, kind]) + 1)]
        model += pulp.lpSum(owned) == members
    return model, x


def _counts(problem: Problem, x: dict[tuple[int, int, int], Any], capacity: int) -> Counts:
    """What the solver chose, if it holds."""
    counts = np.zeros((problem.ranks, len(problem.classes)), dtype=np.int64)
    for (s, r, k), variable in x.items():
        if (variable.value() or 0.0) > 0.5:
            counts[r, s] += k
    if not problem.is_complete(counts):
        raise SolverFailed("no assignment of every matrix came back")
    makespan = problem.makespan(counts)
    if makespan > capacity * _ROOM + 1:
        raise SolverFailed(f"the solver claims an assignment within {capacity} ns; it takes {makespan} ns")
    return counts
