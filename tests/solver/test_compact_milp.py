"""When the exact methods run, what is believed of them, and what happens when their solver fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pulp
import pytest
from instances import linear_costs, make_matrices

from dmuon.solver import Plan, Rank, SolveOptions, exact, plan, planner
from dmuon.solver.compact_milp import assign_within
from dmuon.solver.milp_solver import MilpSolver
from dmuon.solver.problem import Problem, build_problem

EXACT = SolveOptions(gap_target=0.0, backend="cbc")
REAL_SOLVE = pulp.PULP_CBC_CMD.actualSolve
BACKENDS = [
    "cbc",
    pytest.param("highs", marks=pytest.mark.skipif(not importlib.util.find_spec("highspy"), reason="no HiGHS")),
]


@pytest.fixture
def no_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column generation proves and finds nothing, so that the compact MILP must."""
    monkeypatch.setattr(exact.PatternPool, "refute", lambda self, capacity: "unknown")
    monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: None)
    monkeypatch.setattr(exact, "_REPACK_FAILURES", 0)


def solve(options: SolveOptions = EXACT) -> Plan:
    """One matrix of 10 ns, two of 7: the envelope says 12, the optimum is 14; only exact methods close the gap."""
    return plan(make_matrices([1, 2]), 2, linear_costs(10, 7), options)


def built(counts: list[int], ranks: int, *single: int) -> Problem:
    return build_problem(make_matrices(counts), [Rank(i) for i in range(ranks)], linear_costs(*single))


def test_column_generation_closes_the_gap_that_the_envelope_leaves() -> None:
    greedy, closed = solve(SolveOptions(method="greedy", gap_target=0.0)), solve()
    assert (greedy.bound_ns, greedy.makespan_ns) == (12, 14)
    assert (closed.bound_ns, closed.makespan_ns) == (14, 14)
    assert closed.reason == "proven within 0.00% of the optimum by column generation"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("no_patterns")
def test_the_compact_milp_closes_it_too(backend: Any) -> None:
    result = solve(SolveOptions(gap_target=0.0, backend=backend))
    assert (result.bound_ns, result.makespan_ns) == (14, 14)
    assert "by the compact MILP" in result.reason


@pytest.mark.usefixtures("no_patterns")
def test_milp_proves_a_start_that_is_already_the_optimum() -> None:
    # With the makespan capped exactly at 758 ns, CBC's preprocessing called such a model infeasible.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = plan(make_matrices([2, 1]), 2, linear_costs(732, 26), EXACT)
    assert (result.bound_ns, result.makespan_ns) == (758, 758)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capacity_that_is_exactly_the_optimum_is_possible_and_one_less_is_not(backend: Any) -> None:
    problem, solver = built([2, 1], 2, 732, 26), MilpSolver(backend)
    status, counts = assign_within(problem, 758, solver, 10)
    assert status == "feasible" and counts is not None and problem.makespan(counts) == 758
    assert assign_within(problem, 757, solver, 10) == ("infeasible", None)


def lpt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_starts", lambda p, bound: [("lpt", planner.longest_first(p))])
    monkeypatch.setattr(planner, "shorten", lambda problem, counts, bound: counts)
    monkeypatch.setattr(exact, "shorten", lambda problem, counts, bound: counts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("no_patterns")
def test_milp_finds_what_lpt_misses(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    lpt_only(monkeypatch)
    matrices, costs = make_matrices([2, 2, 3]), linear_costs(5, 4, 3)  # Graham's worst case of LPT on three ranks
    assert plan(matrices, 3, costs, SolveOptions(method="greedy")).makespan_ns == 11
    result = plan(matrices, 3, costs, SolveOptions(gap_target=0.0, backend=backend))
    assert (result.makespan_ns, result.bound_ns, result.stage) == (9, 9, "milp")


@pytest.mark.parametrize("backend", BACKENDS)
def test_patterns_find_what_lpt_misses(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    lpt_only(monkeypatch)
    result = plan(make_matrices([2, 2, 3]), 3, linear_costs(5, 4, 3), SolveOptions(gap_target=0.0, backend=backend))
    assert (result.makespan_ns, result.bound_ns, result.stage) == (9, 9, "patterns")


@pytest.mark.usefixtures("no_patterns")
def test_repacking_a_few_ranks_finds_what_lpt_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    lpt_only(monkeypatch)
    monkeypatch.setattr(exact, "_REPACK_FAILURES", 12)
    problem = planner.baseline("lpt", make_matrices([2, 2, 3]), 3, linear_costs(5, 4, 3))
    assert problem.makespan_ns == 11
    result = plan(make_matrices([2, 2, 3]), 3, linear_costs(5, 4, 3), EXACT)
    assert (result.makespan_ns, result.stage) == (9, "milp")
    assert "MILPs over a few ranks" in result.reason


def test_nothing_is_solved_when_the_envelope_already_proves_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> int:
        raise AssertionError("a solver ran")

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", never)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = plan(make_matrices([8]), 4, linear_costs(10), SolveOptions(method="milp", backend="cbc"))
        assert solve(SolveOptions(method="greedy")).gap > 0.1
        assert solve(SolveOptions(method="greedy")).reason == "method 'greedy' runs no MILP"
    assert result.gap == 0.0


@pytest.mark.usefixtures("no_patterns")
def test_auto_builds_no_compact_milp_above_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    result = solve(SolveOptions(gap_target=0.0, search_space_threshold=5))
    assert result.reason == "found nothing shorter; the gap stays 14.29%"
    monkeypatch.setattr(exact, "_LARGEST_KNAPSACK", 1)
    assert "pricing problem" in solve(SolveOptions(gap_target=0.0, search_space_threshold=5)).reason
    forced = solve(SolveOptions(method="milp", gap_target=0.0, search_space_threshold=5, backend="cbc"))
    assert forced.gap == 0.0


def test_exact_methods_raise_no_warning_of_their_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve().gap == 0.0


def test_an_explicit_back_end_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="backend='highs' needs the package highspy; install it"):
        solve(SolveOptions(backend="highs"))
    assert MilpSolver("auto").name == "CBC"


def crash(solver: Any, model: Any) -> int:
    raise pulp.PulpSolverError("Pulp: Error while trying to execute cbc")


def run_out_of_time(solver: Any, model: Any) -> int:
    model.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
    return pulp.LpStatusNotSolved


def call_nothing_optimal(solver: Any, model: Any) -> int:
    model.assignVarsVals({v.name: 0 for v in model.variables()})
    model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionOptimal)
    return pulp.LpStatusOptimal


def call_too_long_optimal(solver: Any, model: Any) -> int:
    """The dear matrix and a cheap one together, 17 ns, declared to fit."""
    chosen = {"x_0_0_1", "x_1_0_1", "x_0_1_0", "x_1_1_1"}
    model.assignVarsVals({v.name: float(v.name in chosen) for v in model.variables()})
    model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionOptimal)
    return pulp.LpStatusOptimal


@pytest.mark.pitfall("P51")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (crash, "PulpSolverError: Pulp: Error while trying to execute cbc"),
        (call_nothing_optimal, "no assignment of every matrix"),
        (call_too_long_optimal, "claims an assignment within 1[23] ns; it takes 17 ns"),
    ],
)
@pytest.mark.parametrize("method", ["auto", "milp"])
@pytest.mark.usefixtures("no_patterns")
def test_a_failing_solver_leaves_the_heuristic_plan_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any, Any], int], says: str, method: Any
) -> None:
    heuristic = solve(SolveOptions(method="greedy", gap_target=0.0))
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fault)
    with pytest.warns(UserWarning, match=f"the MILP failed: .*{says}"):
        result = solve(SolveOptions(method=method, gap_target=0.0, backend="cbc"))
    assert result.digest == heuristic.digest
    assert (result.bound_ns, result.makespan_ns) == (12, 14)
    assert result.reason.startswith("failed")


@pytest.mark.pitfall("P51")
@pytest.mark.parametrize("fault", [crash, run_out_of_time])
def test_a_solver_that_fails_in_column_generation_leaves_the_heuristic_plan_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any, Any], int]
) -> None:
    heuristic = solve(SolveOptions(method="greedy", gap_target=0.0))
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fault)
    with pytest.warns(UserWarning, match="the MILP failed: "):
        result = solve()
    assert result.digest == heuristic.digest
    assert (result.bound_ns, result.makespan_ns) == (12, 14)


@pytest.mark.pitfall("P51")
@pytest.mark.usefixtures("no_patterns")
def test_a_solver_that_finds_nothing_in_time_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", run_out_of_time)
    result = solve()
    assert (result.bound_ns, result.makespan_ns) == (12, 14)


@pytest.mark.pitfall("P51")
def test_a_time_limit_ends_the_search_with_a_warning_and_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    heuristic = solve(SolveOptions(method="greedy", gap_target=0.0))
    with pytest.warns(UserWarning, match="the MILP stopped at the time limit of 1e-09 s. The plan is the best so far"):
        result = solve(SolveOptions(gap_target=0.0, time_limit_s=1e-9))
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
def test_a_claim_that_an_assignment_refutes_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    lpt_only(monkeypatch)  # 11 ns, where 9 ns is possible
    monkeypatch.setattr(exact, "_DIVES", (0.0,))
    monkeypatch.setattr(exact._Search, "_raise_bound", lambda self, pool: setattr(self, "bound", 10))
    monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: planner.multifit(self.problem, 9, 11))
    with pytest.warns(UserWarning, match="a bound of 10 ns was claimed; an assignment takes 9 ns"):
        result = plan(make_matrices([2, 2, 3]), 3, linear_costs(5, 4, 3), EXACT)
    assert (result.bound_ns, result.makespan_ns) == (9, 11)


@pytest.mark.pitfall("P51")
def test_planning_needs_no_pulp_until_a_milp_is_solved() -> None:
    code = (
        "import sys; sys.modules['pulp'] = None\n"
        "from dmuon.solver import plan, CostTable, Matrix\n"
        "p = plan([Matrix(str(i), 4, 4, 'b') for i in range(4)], 2, CostTable({(4, 4): {1: 5}}))\n"
        "assert p.makespan_ns == 10"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)
