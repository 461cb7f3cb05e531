"""When the MILP runs, what it is believed, and what happens when its solver fails."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pulp
import pytest
from instances import linear_costs, make_matrices

from dmuon.solver import Plan, SolveOptions, milp, plan, planner

EXACT = SolveOptions(gap_target=0.0)
REAL_SOLVE = pulp.PULP_CBC_CMD.actualSolve


def solve(options: SolveOptions = EXACT) -> Plan:
    """One matrix of 10 ns, two of 7: the envelope says 12, the optimum is 14, so only a MILP closes the gap."""
    return plan(make_matrices([1, 2]), 2, linear_costs(10, 7), options)


def test_milp_closes_the_gap_that_the_bound_leaves() -> None:
    greedy, exact = solve(SolveOptions(method="greedy", gap_target=0.0)), solve()
    assert (greedy.bound_ns, greedy.makespan_ns) == (12, 14)
    assert (exact.bound_ns, exact.makespan_ns) == (14, 14)


def test_milp_proves_a_start_that_is_already_the_optimum() -> None:
    # With the makespan capped exactly at 758 ns, CBC's preprocessing called this model infeasible.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = plan(make_matrices([2, 1]), 2, linear_costs(732, 26), EXACT)
    assert (result.bound_ns, result.makespan_ns) == (758, 758)


def test_milp_finds_what_lpt_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_heuristic", lambda problem, bound: ("lpt", planner.longest_first(problem)))
    matrices, costs = make_matrices([2, 2, 3]), linear_costs(5, 4, 3)  # Graham's worst case of LPT on three ranks
    assert plan(matrices, 3, costs, SolveOptions(method="greedy")).makespan_ns == 11
    result = plan(matrices, 3, costs, EXACT)
    assert (result.makespan_ns, result.bound_ns, result.stage) == (9, 9, "milp")


def test_milp_is_skipped_when_the_bound_already_proves_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> int:
        raise AssertionError("the MILP ran")

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", never)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = plan(make_matrices([8]), 4, linear_costs(10), SolveOptions(method="milp"))
        assert solve(SolveOptions(method="greedy")).gap > 0.1
        assert "binaries, more than 5" in solve(SolveOptions(search_space_threshold=5)).reason
    assert result.gap == 0.0


def test_milp_raises_no_warning_of_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve().gap == 0.0


def test_a_model_too_large_to_build_is_refused_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "_LARGEST_MODEL", 5)
    with pytest.warns(UserWarning, match=r"binaries, more than 5; use method='auto'"):
        assert solve(SolveOptions(method="milp", gap_target=0.0)).makespan_ns == 14


def crash(solver: Any, model: Any) -> int:
    raise pulp.PulpSolverError("Pulp: Error while trying to execute cbc")


def run_out_of_time(solver: Any, model: Any) -> int:
    model.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
    return pulp.LpStatusNotSolved


def call_infeasible(solver: Any, model: Any) -> int:
    model.assignStatus(pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible)
    return pulp.LpStatusInfeasible


def call_nothing_optimal(solver: Any, model: Any) -> int:
    model.assignVarsVals({v.name: 0 for v in model.variables()})
    model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionOptimal)
    return pulp.LpStatusOptimal


def understate(solver: Any, model: Any) -> int:
    status = REAL_SOLVE(solver, model)
    model.variablesDict()["makespan"].varValue *= 0.9
    return status


def call_worse_optimal(solver: Any, model: Any) -> int:
    """The dear matrix and a cheap one together, 17 ns, declared optimal."""
    REAL_SOLVE(solver, model)
    chosen = {"x_0_0_1", "x_1_0_1", "x_0_1_0", "x_1_1_1"}
    for variable in model.variables():
        variable.varValue = 1000 * 17 / 14 if variable.name == "makespan" else float(variable.name in chosen)
    return pulp.LpStatusOptimal


@pytest.mark.pitfall("P51")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (crash, "PulpSolverError: Pulp: Error while trying to execute cbc"),
        (run_out_of_time, "no assignment of every matrix came back .*No Solution Found"),
        (call_infeasible, "no assignment of every matrix came back .*No Solution Exists"),
        (call_nothing_optimal, "no assignment of every matrix"),
        (understate, "claims an optimum of 13 ns; its assignment takes 14 ns"),
        (call_worse_optimal, "claims an optimum of 17 ns; its assignment takes 17 ns, 14 ns was known"),
    ],
)
@pytest.mark.parametrize("method", ["auto", "milp"])
def test_a_failing_solver_leaves_the_heuristic_plan_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any, Any], int], says: str, method: Any
) -> None:
    heuristic = solve(SolveOptions(method="greedy", gap_target=0.0))
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fault)
    with pytest.warns(UserWarning, match=says):
        result = solve(SolveOptions(method=method, gap_target=0.0))
    assert result.digest == heuristic.digest
    assert (result.bound_ns, result.makespan_ns) == (12, 14)


@pytest.mark.pitfall("P51")
def test_a_missing_solver_leaves_the_heuristic_plan_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    heuristic = solve(SolveOptions(method="greedy", gap_target=0.0))
    monkeypatch.setitem(sys.modules, "pulp", None)
    with pytest.warns(UserWarning, match=r"PuLP cannot be imported .* install pulp>=3.3,<4"):
        result = solve()
    assert result.digest == heuristic.digest


@pytest.mark.pitfall("P51")
def test_optimal_at_the_time_limit_is_kept_but_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_early(solver: Any, model: Any) -> int:
        REAL_SOLVE(solver, model)
        model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
        return pulp.LpStatusOptimal

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", stop_early)
    with pytest.warns(UserWarning, match="stopped at the time limit of 10 s"):
        result = solve()
    assert (result.bound_ns, result.makespan_ns) == (12, 14)


@pytest.mark.pitfall("P51")
def test_planning_needs_no_pulp_until_a_milp_is_solved() -> None:
    code = (
        "import sys; sys.modules['pulp'] = None\n"
        "from dmuon.solver import plan, CostTable, Matrix\n"
        "p = plan([Matrix(str(i), 4, 4, 'b') for i in range(4)], 2, CostTable({(4, 4): {1: 5}}))\n"
        "assert p.makespan_ns == 10"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)
