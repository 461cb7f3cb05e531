"""One digest from run to run, and from solver to solver."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
from instances import SHAPES, linear_costs, make_matrices
from test_pattern_milp import LLAMA, llama, staircase

from dmuon.solver import CostTable, Matrix, Plan, SolveOptions, exact, plan, planner

BATCHED = CostTable({SHAPES[0]: {1: 70, 4: 200}, SHAPES[1]: {1: 110, 4: 390}, SHAPES[2]: {1: 130, 4: 500}})
CASES: dict[str, tuple[list[Matrix], int, CostTable]] = {
    "heuristic": (make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130)),
    "column generation": (llama(40), 64, CostTable({shape: staircase(shape) for shape in LLAMA})),
    "batched": (make_matrices([23, 17, 11], blocks=6), 7, BATCHED),
    "many ranks": (make_matrices([93, 71, 55], blocks=30), 40, BATCHED),
}


def solve(name: str, backend: str, gap: float = 0.01) -> Plan:
    matrices, ranks, costs = CASES[name]
    return plan(matrices, ranks, costs, SolveOptions(backend=backend, gap_target=gap))  # type: ignore[arg-type]


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize("runs", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["auto", "cbc"])
@pytest.mark.parametrize("name", CASES)
def test_all_runs_give_one_digest(name: str, backend: str, runs: int) -> None:
    assert len({solve(name, backend).digest for _ in range(runs)}) == 1


@pytest.mark.pitfall("P51")
def test_small_milps_never_run_to_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to take one thread, CBC waited for it until the limit in one of five solves of this very model."""
    monkeypatch.setattr(exact.PatternPool, "refute", lambda self, capacity: "unknown")
    monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: None)
    monkeypatch.setattr(exact, "_REPACK_FAILURES", 0)
    costs = CostTable({SHAPES[0]: {1: 100, 4: 110}, SHAPES[1]: {1: 60, 2: 66}, SHAPES[2]: {1: 130}})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(20):
            result = plan(make_matrices([7, 5, 3], blocks=3), 3, costs, SolveOptions(backend="cbc"))
            assert result.gap <= 0.01


both = pytest.mark.skipif(not importlib.util.find_spec("highspy"), reason="HiGHS is not installed")


@both
@pytest.mark.pitfall("P21")
@pytest.mark.parametrize("gap", [0.01, 0.001])
@pytest.mark.parametrize("name", CASES)
def test_two_solvers_give_one_digest(name: str, gap: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        highs, cbc = solve(name, "highs", gap), solve(name, "cbc", gap)
    assert highs.digest == cbc.digest
    assert (highs.makespan_ns, highs.bound_ns) == (cbc.makespan_ns, cbc.bound_ns)


@both
@pytest.mark.parametrize("stage", ["patterns", "milp"])
def test_two_solvers_choose_the_same_of_many_optima(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """From a poor start, so that the counts are the solver's own."""
    monkeypatch.setattr(planner, "_starts", lambda p, bound: [("lpt", planner.longest_first(p))])
    monkeypatch.setattr(planner, "shorten", lambda problem, counts, bound: counts)
    monkeypatch.setattr(exact, "shorten", lambda problem, counts, bound: counts)
    monkeypatch.setattr(exact, "_REPACK_FAILURES", 0)
    if stage == "milp":
        monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: None)
    costs = CostTable({SHAPES[0]: {1: 100, 4: 110}, SHAPES[1]: {1: 60, 2: 66}, SHAPES[2]: {1: 130}})
    results = [
        plan(make_matrices([7, 5, 3], blocks=3), 3, costs, SolveOptions(backend=backend))  # type: ignore[arg-type]
        for backend in ("highs", "cbc")
    ]
    assert {r.stage for r in results} <= {"patterns", "milp"}
    assert results[0].digest == results[1].digest
    assert max(r.gap for r in results) <= 0.01


def test_a_forced_time_out_still_gives_a_whole_plan() -> None:
    matrices, ranks, costs = CASES["many ranks"]
    with pytest.warns(UserWarning, match="best so far"):
        result = plan(matrices, ranks, costs, SolveOptions(gap_target=0.0, time_limit_s=1e-9))
    assert len(result.owners) == len(matrices)
