"""When the exact methods run, what is believed of them, and what happens when their solver fails."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pulp
import pytest
from instances import GRAHAM, linear_costs, make_matrices

from dmuon.solver import Plan, SolveOptions, baseline, child, exact, plan, planner

EXACT = SolveOptions(gap_target=0.0)
GREEDY = SolveOptions(method="greedy", gap_target=0.0)


def solve(options: SolveOptions = EXACT) -> Plan:
    """One matrix of 10 ns, two of 7: the envelope says 12, the optimum is 14; only exact methods close the gap."""
    return plan(make_matrices([1, 2]), 2, linear_costs(10, 7), options)


def test_column_generation_closes_the_gap_that_the_envelope_leaves() -> None:
    greedy, closed = solve(GREEDY), solve()
    assert (greedy.bound_ns, greedy.makespan_ns) == (12, 14)
    assert (closed.bound_ns, closed.makespan_ns) == (14, 14)
    assert closed.reason == "proven within 0.00% of the optimum by column generation"


@pytest.mark.usefixtures("compact_only")
def test_the_compact_milp_closes_it_too() -> None:
    result = solve()
    assert (result.bound_ns, result.makespan_ns) == (14, 14)
    assert "by the compact MILP" in result.reason


@pytest.mark.usefixtures("compact_only")
def test_milp_proves_a_start_that_is_already_the_optimum() -> None:
    # With the makespan capped exactly at 758 ns, CBC's preprocessing called such a model infeasible.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = plan(make_matrices([2, 1]), 2, linear_costs(732, 26), EXACT)
    assert (result.bound_ns, result.makespan_ns) == (758, 758)


@pytest.mark.parametrize(
    ("missing", "stage", "reason"),
    [
        ((), "patterns", ""),
        (("proofs", "finds"), "milp", "by the compact MILP"),
    ],
    ids=["patterns", "compact"],
)
def test_exact_methods_find_what_lpt_misses(
    leave_out: Callable[..., None], missing: tuple[str, ...], stage: str, reason: str
) -> None:
    assert baseline("lpt", *GRAHAM).makespan_ns == 11
    leave_out("search", *missing)
    assert plan(*GRAHAM, SolveOptions(method="greedy")).makespan_ns == 11
    result = plan(*GRAHAM, EXACT)
    assert (result.makespan_ns, result.bound_ns, result.stage) == (9, 9, stage)
    assert reason in result.reason


def test_nothing_is_solved_when_the_envelope_already_proves_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> int:
        raise AssertionError("a solver ran")

    monkeypatch.setattr(exact, "run_search", never)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = plan(make_matrices([8]), 4, linear_costs(10), SolveOptions(method="milp"))
        greedy = solve(SolveOptions(method="greedy"))
    assert result.gap == 0.0
    assert greedy.gap > 0.1 and greedy.reason == "method 'greedy' runs no MILP"


@pytest.mark.usefixtures("compact_only")
def test_auto_builds_no_compact_milp_above_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    result = solve(SolveOptions(gap_target=0.0, search_space_threshold=5))
    assert result.reason == "found nothing shorter; the gap stays 14.29%"
    monkeypatch.setattr(exact, "_LARGEST_KNAPSACK", 1)
    assert "pricing problem" in solve(SolveOptions(gap_target=0.0, search_space_threshold=5)).reason
    forced = solve(SolveOptions(method="milp", gap_target=0.0, search_space_threshold=5))
    assert forced.gap == 0.0


def test_exact_methods_raise_no_warning_of_their_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve().gap == 0.0


# What CBC may do instead of solving.


def crash(model: Any) -> None:
    raise pulp.PulpSolverError("Pulp: Error while trying to execute cbc")


def run_out_of_time(model: Any) -> None:
    model.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)


def call_optimal(*chosen: str) -> Callable[[Any], None]:
    """Declare as the optimum that these variables are 1 and all others 0."""

    def answer(model: Any) -> None:
        model.assignVarsVals({v.name: float(v.name in chosen) for v in model.variables()})
        model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionOptimal)

    return answer


def that_does(fault: Callable[[Any], None]) -> type:
    """What is taken for CBC."""
    return type("Faulty", (), {"__init__": lambda self, **_: None, "actualSolve": lambda self, model: fault(model)})


TOO_LONG = ("x_0_0_1", "x_1_0_1", "x_0_1_0", "x_1_1_1")  # the dear matrix and a cheap one together


@pytest.mark.pitfall("P51")
@pytest.mark.parametrize(
    ("fault", "missing", "options", "says"),
    [
        *(
            (fault, ("proofs", "finds"), {"method": method}, f"the MILP failed: .*{says}")
            for fault, says in (
                (crash, "PulpSolverError: Pulp: Error while trying to execute cbc"),
                (call_optimal(), "no assignment of every matrix"),
                (call_optimal(*TOO_LONG), "claims an assignment within 1[23] ns; it takes 17 ns"),
            )
            for method in ("auto", "milp")
        ),
        (crash, (), {}, "the MILP failed: "),  # in column generation
        (run_out_of_time, (), {}, "the MILP failed: "),
        (None, (), {}, r"PuLP cannot be imported .* install pulp>=3.3,<4"),
        (..., (), {"time_limit_s": 1e-9}, "the MILP stopped at the time limit of 1e-09 s. The plan is the best so far"),
    ],
)
def test_a_failing_solver_leaves_the_heuristic_plan_and_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    leave_out: Callable[..., None],
    fault: Any,
    missing: tuple[str, ...],
    options: dict[str, Any],
    says: str,
) -> None:
    """``fault`` is what CBC does, None if PuLP is not installed, or ``...`` if nothing is wrong but the time."""
    leave_out(*missing)
    heuristic = solve(GREEDY)
    if fault is None:
        monkeypatch.setattr(exact, "run_search", child.run_search)
        monkeypatch.setitem(sys.modules, "pulp", None)
    elif fault is not ...:
        monkeypatch.setattr(pulp, "COIN_CMD", that_does(fault))
    with pytest.warns(UserWarning, match=says):
        result = solve(SolveOptions(gap_target=0.0, **options))
    assert result.digest == heuristic.digest
    assert (result.bound_ns, result.makespan_ns) == (12, 14)
    assert result.reason.startswith("failed") or "failed" not in says


@pytest.mark.pitfall("P51")
@pytest.mark.usefixtures("compact_only")
def test_a_solver_that_finds_nothing_in_time_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp, "COIN_CMD", that_does(run_out_of_time))
    result = solve()
    assert (result.bound_ns, result.makespan_ns) == (12, 14)


@pytest.mark.pitfall("P51")
def test_a_claim_that_an_assignment_refutes_ends_the_search(
    monkeypatch: pytest.MonkeyPatch, leave_out: Callable[..., None]
) -> None:
    leave_out("search")  # 11 ns, where 9 ns is possible
    monkeypatch.setattr(exact, "_DIVES", (0.0,))
    monkeypatch.setattr(exact._Search, "_raise_bound", lambda self, pool: setattr(self, "bound", 10))
    monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: planner.multifit(self.problem, 9, 11))
    with pytest.warns(UserWarning, match="a bound of 10 ns was claimed; an assignment takes 9 ns"):
        result = plan(*GRAHAM, EXACT)
    assert (result.bound_ns, result.makespan_ns) == (9, 11)
