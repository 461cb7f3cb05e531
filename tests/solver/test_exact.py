"""When the exact methods run, what they prove and find, and what happens when their solver fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pulp
import pytest
from hypothesis import given, settings
from instances import (
    BATCHED,
    GRAHAM,
    LLAMA_8B,
    Case,
    decoder,
    exact_makespan,
    linear_costs,
    make_matrices,
    problems,
    wave_costs,
)

from dmuon.solver import Plan, Rank, SolveOptions, exact, plan, planner

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


@pytest.mark.usefixtures("lpt_alone")
def test_patterns_find_what_lpt_misses() -> None:
    assert plan(*GRAHAM, SolveOptions(method="greedy")).makespan_ns == 11
    result = plan(*GRAHAM, EXACT)
    assert (result.makespan_ns, result.bound_ns, result.stage) == (9, 9, "patterns")


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


# What CBC may do instead of solving.


def crash(model: Any) -> None:
    raise pulp.PulpSolverError("Pulp: Error while trying to execute cbc")


def run_out_of_time(model: Any) -> None:
    model.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)


def that_does(fault: Callable[[Any], None]) -> type:
    """What is taken for CBC."""
    return type("Faulty", (), {"__init__": lambda self, **_: None, "actualSolve": lambda self, model: fault(model)})


@pytest.mark.pitfall("P51")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (crash, "the MILP failed: PulpSolverError: Pulp: Error while trying to execute cbc"),
        (run_out_of_time, "the MILP failed: the covering problem"),
        (..., "the MILP stopped at the time limit of 1e-09 s. The plan is the best so far"),
    ],
)
def test_a_failing_solver_leaves_the_heuristic_plan_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, fault: Any, says: str
) -> None:
    """``fault`` is what CBC does, or ``...`` if nothing is wrong but the time."""
    heuristic = solve(GREEDY)
    if fault is not ...:
        monkeypatch.setattr(pulp, "COIN_CMD", that_does(fault))
    with pytest.warns(UserWarning, match=says):
        result = solve(SolveOptions(gap_target=0.0, time_limit_s=1e-9) if fault is ... else EXACT)
    assert result.digest == heuristic.digest
    assert (result.bound_ns, result.makespan_ns) == (12, 14)
    assert result.reason.startswith("failed") or "failed" not in says


@pytest.mark.pitfall("P51")
@pytest.mark.usefixtures("lpt_alone")
def test_a_claim_that_an_assignment_refutes_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """LPT takes 11 ns, where 9 ns is possible."""
    monkeypatch.setattr(exact, "_DIVES", (0.0,))
    monkeypatch.setattr(exact._Search, "_raise_bound", lambda self, pool: self.tell(bound=10))
    monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: planner.multifit(self.problem, 9, 11))
    with pytest.warns(UserWarning, match="a bound of 10 ns was claimed; an assignment takes 9 ns"):
        result = plan(*GRAHAM, EXACT)
    assert (result.bound_ns, result.makespan_ns) == (9, 11)


# -- column generation: what it proves, and what it finds --------------------------------------------------------------


@given(problems())
@settings(deadline=None, max_examples=25)
@pytest.mark.usefixtures("lpt_alone")
def test_patterns_refute_no_capacity_that_suffices_and_assign_every_matrix_within_it(case: Case) -> None:
    optimum, result = exact_makespan(*case), plan(*case, SolveOptions(gap_target=0.0))
    assert optimum is not None and result.bound_ns <= optimum <= result.makespan_ns
    assert result.bound_ns >= plan(*case, SolveOptions(method="greedy")).bound_ns


@pytest.mark.parametrize("ranks", [64, 1024])
def test_large_worlds_are_proven_within_one_percent(ranks: int) -> None:
    matrices = decoder(40, *LLAMA_8B)
    result, greedy = (plan(matrices, ranks, wave_costs(matrices), SolveOptions(method=m)) for m in ("auto", "greedy"))
    assert result.gap <= 0.01
    assert greedy.bound_ns <= result.bound_ns <= result.makespan_ns <= greedy.makespan_ns


def test_unequal_ranks_get_patterns_of_their_own() -> None:
    ranks = [Rank(i, speed=1.0 if i < 30 else 0.5) for i in range(40)]
    result = plan(make_matrices([93, 71, 55], blocks=30), ranks, BATCHED)
    assert result.gap <= 0.01
    held = result.rank_matrices
    assert sum(held[:30]) / 30 > 1.2 * sum(held[30:]) / 10
