"""MILPs and LPs through PuLP: HiGHS where it is installed, else the CBC that PuLP bundles."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Literal

from .inputs import Backend

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


class SolverFailed(Exception):
    """The solver gave nothing that can be used; the message says what happened."""


def check_backend(backend: Backend) -> None:
    """Raise ValueError for an explicit request that cannot be met."""
    if backend == "highs" and importlib.util.find_spec("highspy") is None:
        raise ValueError("backend='highs' needs the package highspy; install it, or use backend='auto' or 'cbc'")


class MilpSolver:
    """One solver, single-threaded: a search with several threads is another search on every run.

    Attributes:
        pulp: the module, imported here and not earlier.
        name: for people.

    Raises:
        SolverFailed: PuLP cannot be imported.
    """

    def __init__(self, backend: Backend) -> None:
        try:
            import pulp
        except ImportError as error:
            raise SolverFailed(f"PuLP cannot be imported ({error}); install pulp>=3.3,<4") from error
        self.pulp: Any = pulp
        self._highs = backend == "highs" or (backend == "auto" and importlib.util.find_spec("highspy") is not None)
        self.name = "HiGHS" if self._highs else "CBC"

    def solve(self, model: Any, seconds: float) -> Status:
        """Solve to optimality, or to the time limit; values and duals are then in ``model``.

        Raises:
            SolverFailed: whatever went wrong inside PuLP or the solver.
        """
        if seconds <= 0:
            return "unknown"
        pulp = self.pulp
        options: dict[str, Any] = {"msg": False, "timeLimit": max(1, math.ceil(seconds)), "gapRel": 0.0}
        try:
            # CBC is single-threaded unless told otherwise; told to take one thread, it starts one and may wait for it
            # until the time limit.
            model.solve(pulp.HiGHS(threads=1, **options) if self._highs else pulp.PULP_CBC_CMD(**options))
        except Exception as error:  # PuLP raises what its solvers and their files do; a plan must not end with it
            raise SolverFailed(f"{type(error).__name__}: {error}") from error
        # Neither field tells all: LpStatusOptimal covers a time-out with a solution, and of a program without integer
        # points CBC's sol_status says the same as of a time-out.
        if model.status == pulp.LpStatusInfeasible:
            return "infeasible"
        statuses: dict[int, Status] = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionIntegerFeasible: "feasible"}
        return statuses.get(model.sol_status, "unknown")
