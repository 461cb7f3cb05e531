"""The compact MILP over counts per rank, solved by CBC through PuLP."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from .problem import Counts, Problem
from .types import SolveOptions

__all__ = ["MilpResult", "SolverFailed", "search_space", "solve_milp"]

_LARGEST_MODEL = 50_000  # binaries; beyond it, building the model takes longer than any time limit
_SCALE = 1000.0  # the makespan to beat in the units of the model; nanoseconds would drown in the solver's tolerances
_TOLERANCE = 1e-6
_ROOM = 1 + 1e-4  # above the makespan to beat: exactly at an optimum, rounding makes CBC call the model infeasible


class SolverFailed(Exception):
    """The MILP gave nothing that can be used; the message says what happened."""


@dataclass(frozen=True, slots=True, eq=False)
class MilpResult:
    """Counts from the solver, checked in Python.

    Attributes:
        counts: ``(ranks, classes)``.
        bound: nanoseconds proven by the solver, or 0 without a proof.
        note: why the search ended.
    """

    counts: Counts
    bound: int
    note: str


def search_space(problem: Problem, makespan: int) -> int:
    """Binaries of the MILP when no rank may exceed ``makespan`` nanoseconds: ``R Σ (K_s + 1)``."""
    return problem.ranks * sum(k + 1 for k in _most_per_rank(problem, makespan))


def solve_milp(problem: Problem, start: Counts, bound: int, options: SolveOptions) -> MilpResult:
    """Minimise the makespan, starting from ``start``.

    ``x[s, r, k]`` says that rank ``r`` owns exactly ``k`` matrices of class ``s``; the ranks are not ordered by load,
    because solvers then find no solution at all.

    Args:
        bound: a proven lower bound in nanoseconds.

    Raises:
        SolverFailed: PuLP or CBC is missing, crashed, found nothing in time, or its answer does not hold.
    """
    best = problem.makespan(start)
    if search_space(problem, best) > _LARGEST_MODEL:
        raise SolverFailed(
            f"the MILP has {search_space(problem, best)} binaries, more than {_LARGEST_MODEL}; use method='auto'"
        )
    try:
        import pulp

        with warnings.catch_warnings():
            # PuLP 3.3 announces what 4.0 removes; the dependency is pinned below 4.
            warnings.simplefilter("ignore", DeprecationWarning)
            status, objective, counts = _run(pulp, problem, start, bound, options)
    except ImportError as error:
        raise SolverFailed(f"PuLP cannot be imported ({error}); install pulp>=3.3,<4") from error
    except Exception as error:  # PuLP raises what its solvers and their files do; a plan must not end with it
        raise SolverFailed(f"{type(error).__name__}: {error}") from error
    if counts is None or not problem.is_complete(counts):
        raise SolverFailed(f"no assignment of every matrix came back (status {status!r})")
    found = problem.makespan(counts)
    if status != "optimal":
        return MilpResult(counts, 0, f"stopped at the time limit of {options.time_limit_s:g} s")
    # PuLP and CBC have called answers optimal that were not; what they claim must match what the answer costs.
    if found > best or abs(objective - found) > 10 * _TOLERANCE * best or found < bound:
        raise SolverFailed(
            f"the solver claims an optimum of {objective:.0f} ns; its assignment takes {found} ns, {best} ns was known"
        )
    proven = math.ceil(found * (1 - _solver_gap(options)) - _TOLERANCE * best)
    return MilpResult(counts, proven, f"proven within {options.gap_target:.2%}")


def _run(
    pulp: Any, problem: Problem, start: Counts, bound: int, options: SolveOptions
) -> tuple[str, float, Counts | None]:
    """Build and solve; ``(status, objective in nanoseconds, counts)``."""
    best = problem.makespan(start)
    unit = _SCALE / best
    ranks, classes = range(problem.ranks), range(len(problem.shapes))
    most = _most_per_rank(problem, best)
    model = pulp.LpProblem("owners", pulp.LpMinimize)
    makespan = pulp.LpVariable("makespan", bound * unit, best * unit * _ROOM)
    makespan.setInitialValue(best * unit)
    model += makespan
    x = {
        (s, r, k): pulp.LpVariable(f"x_{s}_{r}_{k}", cat=pulp.LpBinary)
        for s in classes
        for r in ranks
        for k in range(most[s] + 1)
    }
    for (s, r, k), variable in x.items():
        variable.setInitialValue(int(start[r, s] == k))
    for r in ranks:
        for s in classes:
            model += pulp.lpSum(x[s, r, k] for k in range(most[s] + 1)) == 1
        model += (
            pulp.lpSum(float(problem.costs[s][k]) * unit * x[s, r, k] for s in classes for k in range(1, most[s] + 1))
            <= makespan
        )
    for s in classes:
        model += pulp.lpSum(k * x[s, r, k] for r in ranks for k in range(1, most[s] + 1)) == problem.members[s]
    solver = pulp.PULP_CBC_CMD(
        msg=False, threads=1, timeLimit=options.time_limit_s, gapRel=_solver_gap(options), warmStart=True
    )
    model.solve(solver)
    # LpStatusOptimal covers a time-out with a solution; only sol_status tells them apart.
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return pulp.LpSolution[model.sol_status], 0.0, None
    counts = np.zeros((problem.ranks, len(problem.shapes)), dtype=np.int64)
    for (s, r, k), variable in x.items():
        if (variable.value() or 0.0) > 0.5:
            counts[r, s] += k
    status = "optimal" if model.sol_status == pulp.LpSolutionOptimal else "feasible"
    return status, float(makespan.value()) / unit, counts


def _solver_gap(options: SolveOptions) -> float:
    """The gap that the solver proves: a little under the target, to leave room for its tolerances."""
    return max(0.0, options.gap_target - 2 * _TOLERANCE)


def _most_per_rank(problem: Problem, makespan: int) -> list[int]:
    """Per class, the most matrices that one rank can own within ``makespan`` nanoseconds."""
    return [int(np.searchsorted(cost, makespan, side="right")) - 1 for cost in problem.costs]
