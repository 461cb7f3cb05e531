"""One digest from run to run, and from solver to solver."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import pytest
from instances import BATCHED, LLAMA_8B, STEEP, Case, decoder, linear_costs, make_matrices, wave_costs

from dmuon.solver import Plan, SolveOptions, plan

LLAMA = decoder(40, *LLAMA_8B)
CASES: dict[str, Case] = {
    "heuristic": (make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130)),
    "column generation": (LLAMA, 64, wave_costs(LLAMA)),
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
@pytest.mark.usefixtures("compact_only")
def test_small_milps_never_run_to_the_time_limit() -> None:
    """Told to take one thread, CBC waited for it until the limit in one of five solves of this very model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(20):
            assert plan(make_matrices([7, 5, 3], blocks=3), 3, STEEP, SolveOptions(backend="cbc")).gap <= 0.01


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
@pytest.mark.parametrize("missing", [(), ("finds",)], ids=["patterns", "milp"])
def test_two_solvers_choose_the_same_of_many_optima(leave_out: Callable[..., None], missing: tuple[str, ...]) -> None:
    """From a poor start, so that the counts are the solver's own."""
    leave_out("search", "repacking", *missing)
    results = [
        plan(make_matrices([7, 5, 3], blocks=3), 3, STEEP, SolveOptions(backend=backend))  # type: ignore[arg-type]
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
