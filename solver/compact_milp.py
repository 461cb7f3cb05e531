"""MILPs through PuLP, and the compact one: counts per rank within a capacity, or the proof that there are none."""

from __future__ import annotations

import importlib
import importlib.util
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from .inputs import Backend
from .milp_process import MilpProcess, SolverFailed
from .problem import Counts, Problem

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_SCALE = 1000.0  # the capacity in the units of the model; nanoseconds would drown in the solver's tolerances
_ROOM = 1 + 1e-5  # above the capacity: exactly at an optimum, rounding makes CBC call the model infeasible
_WEIGHTS = 1_000_000
_GRACE_S = 1.0  # beyond what a solver was told to take: a busy machine, a search between two looks at the clock


def check_backend(backend: Backend) -> None:
    """Raise ValueError for an explicit request that cannot be met."""
    if backend == "highs" and importlib.util.find_spec("highspy") is None:
        raise ValueError("backend='highs' needs the package highspy; install it, or use backend='auto' or 'cbc'")


class MilpSolver:
    """HiGHS where it is installed, else the CBC that PuLP bundles, in a process of its own while this is open.

    One thread: a search with several threads is another search on every run.

    Args:
        deadline: of the whole search, by ``time.monotonic``: a solver that takes longer than it was told to is only
            then ended.

    Attributes:
        pulp: the module, imported here and not earlier.
        name: for people.

    Raises:
        SolverFailed: PuLP cannot be imported.
    """

    def __init__(self, backend: Backend, deadline: float = 0.0) -> None:
        try:
            # From a thread: PuLP keeps frames of imports that fail inside it, and so all that their callers hold.
            with ThreadPoolExecutor(1) as pool:
                pulp = pool.submit(importlib.import_module, "pulp").result()
        except ImportError as error:
            raise SolverFailed(f"PuLP cannot be imported ({error}); install pulp>=3.3,<4") from error
        self.pulp: Any = pulp
        self._highs = backend == "highs" or (backend == "auto" and importlib.util.find_spec("highspy") is not None)
        self.name = "HiGHS" if self._highs else "CBC"
        self._deadline = deadline
        self._process: MilpProcess | None = None

    def __enter__(self) -> MilpSolver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def solve(self, model: Any, seconds: float) -> Status:
        """Solve to optimality, or to the time limit; values and duals are then in ``model``.

        Raises:
            SolverFailed: whatever went wrong inside PuLP or the solver, or it did not end.
        """
        if seconds <= 0:
            return "unknown"
        pulp = self.pulp
        if self._process is None:
            self._process = MilpProcess(self.name, str(pulp.PULP_CBC_CMD.pulp_cbc_path))
        latest = max(time.monotonic() + max(1.0, seconds), self._deadline) + _GRACE_S
        try:
            self._process.ask(model, seconds, latest)
        except BaseException:
            self.__exit__()
            raise
        # Neither field tells all: LpStatusOptimal covers a time-out with a solution, and of a program without integer
        # points CBC's sol_status says the same as of a time-out.
        if model.status == pulp.LpStatusInfeasible:
            return "infeasible"
        statuses: dict[int, Status] = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionIntegerFeasible: "feasible"}
        return statuses.get(model.sol_status, "unknown")


def search_space(problem: Problem, capacity: int) -> int:
    """Binaries of the MILP when no rank may exceed ``capacity`` nanoseconds: ``Σ_r Σ_s (K_s + 1)``."""
    per_kind = (problem.most(capacity) + 1).sum(axis=0)
    return int(per_kind @ np.array(problem.ranks_per_kind))


def part_of(problem: Problem, members: list[int], ranks: list[int]) -> Problem:
    """The problem of handing ``members`` of each class to ``ranks`` alone."""
    return replace(
        problem,
        members=tuple(members),
        costs=tuple(cost[:, : n + 1] for cost, n in zip(problem.costs, members, strict=True)),
        kind_of=problem.kind_of[ranks],
    )


def assign_within(
    problem: Problem, capacity: int, solver: MilpSolver, seconds: float, choose_s: float = 0.0
) -> tuple[Status, Counts | None]:
    """Counts whose makespan is at most ``capacity`` nanoseconds (up to 1e-5 above), if there are any.

    ``x[s, r, k]`` says that rank ``r`` owns exactly ``k`` matrices of class ``s``; the ranks are not ordered by load,
    because solvers then find no solution at all.

    Args:
        seconds: the time limit.
        choose_s: further seconds for the choice among all such counts: those of the least fixed pseudo-random weight.
            They are unique, so that every solver that finishes gives the same, and the status is ``"optimal"``.

    Raises:
        SolverFailed: a crash, or an answer that does not hold.
    """
    model, x = _model(problem, capacity, solver, choose=False)
    status = solver.solve(model, seconds)
    if status in ("infeasible", "unknown"):
        return status, None
    counts = _counts(problem, x, capacity)
    if choose_s > 0:
        model, x = _model(problem, capacity, solver, choose=True)
        if solver.solve(model, choose_s) == "optimal":
            return "optimal", _counts(problem, x, capacity)
    return "feasible", counts


def _model(
    problem: Problem, capacity: int, solver: MilpSolver, *, choose: bool
) -> tuple[Any, dict[tuple[int, int, int], Any]]:
    pulp = solver.pulp
    most, kinds = problem.most(capacity), problem.kind_of.tolist()
    classes = range(len(problem.classes))
    weigh = random.Random(0)
    unit = _SCALE / capacity
    model = pulp.LpProblem("owners", pulp.LpMinimize)
    x = {
        (s, r, k): pulp.LpVariable(f"x_{s}_{r}_{k}", cat=pulp.LpBinary)
        for s in classes
        for r, kind in enumerate(kinds)
        for k in range(int(most[s, kind]) + 1)
    }
    if choose:
        model += pulp.lpSum(weigh.randrange(1, _WEIGHTS) / _WEIGHTS * v for v in x.values())
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
