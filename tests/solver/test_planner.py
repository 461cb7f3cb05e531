"""The planner against exhaustion, against its inputs' order, and against what breaks planners."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from instances import SHAPES, exact_makespan, linear_costs, make_matrices, problems, recomputed_loads

from dmuon.solver import BASELINES, CostTable, Matrix, Rank, SolveOptions, baseline, plan, planner
from dmuon.solver import local_search as search
from dmuon.solver.bound import lower_bound
from dmuon.solver.exact import refine
from dmuon.solver.problem import build_problem

GREEDY = SolveOptions(method="greedy")
Problem = tuple[list[Matrix], int, CostTable]


@given(problems())
@settings(deadline=None, max_examples=150)
def test_bound_is_below_and_makespan_above_the_optimum_and_no_heuristic_is_better(problem: Problem) -> None:
    matrices, ranks, costs = problem
    result = plan(matrices, ranks, costs, SolveOptions(byte_slack=0.0))
    optimum = exact_makespan(matrices, ranks, costs)
    assert optimum is not None
    assert result.bound_ns <= optimum <= result.makespan_ns
    assert result.gap <= 0.01 or result.makespan_ns - result.bound_ns <= 1
    assert all(result.makespan_ns <= baseline(name, matrices, ranks, costs).makespan_ns for name in BASELINES)


@given(problems())
@settings(deadline=None, max_examples=150)
def test_every_matrix_has_one_owner_and_the_loads_are_those_of_the_owners(problem: Problem) -> None:
    matrices, ranks, costs = problem
    result = plan(matrices, ranks, costs, GREEDY)
    assert list(result.owners) == sorted(m.name for m in matrices)
    assert set(result.owners.values()) <= set(range(ranks))
    assert list(result.loads_ns) == recomputed_loads(result, costs)
    assert sum(result.rank_matrices) == len(matrices)
    assert result.gap == (result.makespan_ns - result.bound_ns) / result.makespan_ns


@given(problems())
@settings(deadline=None, max_examples=100)
def test_spread_and_relabelling_leave_the_counts_of_the_search_unchanged(problem: Problem) -> None:
    matrices, ranks, costs = problem
    ordered = tuple(sorted(matrices, key=lambda m: m.name))
    built = build_problem(ordered, [Rank(i) for i in range(ranks)], costs)
    bound, options = lower_bound(built), SolveOptions()
    starts = planner._starts(built, bound)
    found = planner._most_even(built, refine(built, planner._shortest(built, starts, bound), options), starts, options)[
        0
    ]
    result = plan(matrices, ranks, costs)
    rows = [tuple(row.get((rows, cols), 0) for rows, cols, _ in built.classes) for row in result.counts]
    assert sorted(rows) == sorted(map(tuple, found.counts.tolist()))


@given(problems())
@settings(deadline=None, max_examples=100)
def test_slack_gives_up_no_more_than_allowed_and_never_the_proof(problem: Problem) -> None:
    matrices, ranks, costs = problem
    strict = plan(matrices, ranks, costs, SolveOptions(byte_slack=0.0, gap_target=0.1))
    even = plan(matrices, ranks, costs, SolveOptions(byte_slack=0.05, gap_target=0.1))
    assert even.makespan_ns <= 1.05 * strict.makespan_ns
    assert even.gap <= 0.1 or even.makespan_ns == strict.makespan_ns
    assert max(even.rank_bytes) <= max(strict.rank_bytes)


@pytest.mark.pitfall("P21")
@given(problems())
@settings(deadline=None, max_examples=100)
def test_permuted_input_gives_the_same_digest(problem: Problem) -> None:
    matrices, ranks, costs = problem
    shuffled = random.Random(0).sample(matrices, len(matrices))
    assert plan(shuffled, ranks, costs, GREEDY).digest == plan(matrices, ranks, costs, GREEDY).digest


@given(problems())
@settings(deadline=None, max_examples=25)
def test_milp_without_a_gap_reaches_the_optimum(problem: Problem) -> None:
    matrices, ranks, costs = problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a solver that fails here must not hide behind the fallback
        result = plan(matrices, ranks, costs, SolveOptions(method="milp", gap_target=0.0))
    assert result.makespan_ns == result.bound_ns == exact_makespan(matrices, ranks, costs)


@given(problems())
@settings(deadline=None, max_examples=15)
def test_scaled_costs_scale_the_optimum(problem: Problem) -> None:
    matrices, ranks, costs = problem
    single = {shape: {1: entries[1]} for shape, entries in costs.costs.items()}
    scaled = {shape: {1: 1000 * entries[1]} for shape, entries in single.items()}
    exact = SolveOptions(method="milp", gap_target=0.0)
    first, second = plan(matrices, ranks, CostTable(single), exact), plan(matrices, ranks, CostTable(scaled), exact)
    assert second.makespan_ns == 1000 * first.makespan_ns
    assert second.bound_ns == pytest.approx(1000 * first.bound_ns, rel=1e-5)


def test_a_plan_is_the_same_on_every_run_and_in_every_process() -> None:
    code = (
        "from instances import make_matrices, linear_costs; from dmuon.solver import plan;"
        "print(plan(make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130)).digest)"
    )
    here = plan(make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130)).digest
    path = str(Path(__file__).parent)
    env = {"PYTHONHASHSEED": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    again = plan(make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130)).digest
    assert here == again == run.stdout.strip()


def test_batching_beats_a_plan_that_prices_matrices_one_by_one() -> None:
    # A batch of four costs little more than one: the plan must group each shape instead of dealing it out.
    costs = CostTable({shape: {1: 100, 2: 105, 4: 110} for shape in SHAPES})
    matrices = make_matrices([4, 4, 4])
    result = plan(matrices, 3, costs)
    assert result.makespan_ns == 110
    assert baseline("lpt", matrices, 3, costs).makespan_ns > 200


@pytest.mark.pitfall("P52")
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_equal_costs_are_spread_evenly(ranks: int) -> None:
    result = plan(make_matrices([12, 12, 4]), ranks, linear_costs(1, 1, 1))
    assert max(result.rank_matrices) <= -(-28 // ranks)


@pytest.mark.pitfall("P52")
def test_a_batch_that_costs_the_same_whatever_its_size_does_not_pile_up_on_one_rank() -> None:
    costs = CostTable({SHAPES[0]: dict.fromkeys((1, 2, 4, 8, 16), 1000)})
    result = plan(make_matrices([16]), 4, costs)
    assert result.makespan_ns == 1000
    assert result.rank_matrices == (4, 4, 4, 4)


@pytest.mark.pitfall("P52")
def test_cheap_matrices_beside_one_dear_one_are_levelled() -> None:
    result = plan(make_matrices([12, 0, 1]), 4, linear_costs(1, 1, 10**6))
    assert result.makespan_ns == 10**6
    assert max(result.rank_matrices) <= 5


@pytest.mark.pitfall("P53")
def test_one_rank_owns_everything() -> None:
    result = plan(make_matrices([3, 2]), 1, linear_costs(10, 30))
    assert set(result.owners.values()) == {0}
    assert (result.makespan_ns, result.bound_ns) == (90, 90)


@pytest.mark.pitfall("P53", "P14")
def test_more_ranks_than_matrices_gives_each_matrix_a_rank_of_its_own() -> None:
    result = plan(make_matrices([3, 2]), 64, linear_costs(10, 30))
    assert len(set(result.owners.values())) == 5
    assert (result.makespan_ns, result.gap) == (30, 0.0)
    assert result.loads_ns.count(0) == 59


@pytest.mark.pitfall("P53")
def test_one_huge_matrix_is_alone_and_bounds_the_makespan() -> None:
    result = plan(
        [*make_matrices([8]), Matrix("huge", 10**5, 10**5, "b")], 3, CostTable.from_flops([(64, 64), (10**5,) * 2])
    )
    assert result.rank_matrices[result.owners["huge"]] == 1
    assert result.gap == 0.0


@pytest.mark.pitfall("P53")
@pytest.mark.parametrize(
    ("matrices", "ranks", "says"),
    [
        ([], 2, "no matrix to plan for"),
        (make_matrices([1]), 0, "at least one rank, got 0"),
        (make_matrices([1]), -1, "at least one rank"),
        (make_matrices([1]), 1.5, "integer or a sequence of Rank"),
        (make_matrices([1]), [0, 1], "sequence of Rank, got one with 0"),
        (make_matrices([1]), "ab", "sequence of Rank, got one with 'a'"),
        (["w"], 2, "matrices must be dmuon.solver.Matrix, got 'w'"),
        (make_matrices([1]), [Rank(0), Rank(2)], r"0 … 1, each once, got \[0, 2\]"),
        (make_matrices([1]) * 2, 2, "'b0.s0.0' is listed twice"),
        (make_matrices([1, 1]), 2, r"no cost for shape \(64, 256\)"),
    ],
)
def test_problems_without_an_answer_are_refused(matrices: list[Matrix], ranks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(matrices, ranks, linear_costs(1))


def test_costs_that_would_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="many days"):
        plan(make_matrices([4]), 2, linear_costs(2**61))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rows": 0}, "'w': rows must be an integer of at least 1, got 0"),
        ({"cols": 2.0}, "'w': cols must be an integer"),
        ({"nbytes": -1}, "'w': nbytes must be an integer of at least 0"),
        ({"name": ""}, "non-empty string"),
        ({"rows": 2**31}, "'w': rows must be at most 4194304, got 2147483648; check its unit"),
        ({"nbytes": 2**62}, "'w': nbytes must be at most"),
        ({"block": None}, "'w': block must be a string"),
        ({"pool": 3}, "'w': pool must be a string, got 3"),
    ],
)
def test_impossible_matrices_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Matrix(**{"name": "w", "rows": 4, "cols": 2, "block": "b", **fields})  # type: ignore[arg-type]


def test_a_matrix_and_its_transpose_are_one_shape_of_fp32_bytes() -> None:
    assert Matrix("w", 8, 2, "b").shape == Matrix("v", 2, 8, "b").shape == (2, 8)
    assert Matrix("w", 8, 2, "b").nbytes == 64


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "exact"}, "one of auto, milp, greedy, got 'exact'"),
        ({"gap_target": 1.0}, r"gap_target must be in \[0, 1\)"),
        ({"gap_target": float("nan")}, "gap_target"),
        ({"time_limit_s": 0}, "time_limit_s must be a positive number"),
        ({"time_limit_s": float("inf")}, "time_limit_s"),
        ({"search_space_threshold": -1}, "search_space_threshold"),
        ({"backend": "gurobi"}, "backend must be one of auto, highs, cbc, got 'gurobi'"),
        ({"spread_cap": 0.5}, "spread_cap must be None, 'auto' or a number from 1 to 1000000, got 0.5"),
        ({"spread_cap": 1e16}, "spread_cap"),
        ({"spread_cap": "tight"}, "spread_cap"),
        ({"byte_slack": -0.1}, r"byte_slack must be in \[0, 1\)"),
    ],
)
def test_impossible_options_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SolveOptions(**fields)  # type: ignore[arg-type]


def test_llama_70b_over_1024_ranks_plans_within_seconds() -> None:
    matrices = [
        Matrix(f"{layer}.{name}", rows, cols, f"{layer}")
        for layer in range(80)
        for name, rows, cols in [
            ("q", 8192, 8192), ("k", 1024, 8192), ("v", 1024, 8192), ("o", 8192, 8192),
            ("gate", 28672, 8192), ("up", 28672, 8192), ("down", 8192, 28672),
        ]
    ]  # fmt: skip
    began = time.perf_counter()
    result = plan(matrices, 1024, CostTable.from_flops({m.shape for m in matrices}), GREEDY)
    assert time.perf_counter() - began < 5.0  # 0.02 s on an idle core
    assert result.gap == 0.0


def test_plan_uses_multifit_where_dealing_out_breaks_batches() -> None:
    # Two of a shape cost 100 or 90 ns in one batch; dealt out to both ranks, every rank pays 100 + 60.
    costs = CostTable({SHAPES[0]: {1: 100, 2: 100}, SHAPES[1]: {1: 60, 2: 90}})
    result = plan(make_matrices([2, 2]), 2, costs, GREEDY)
    assert (result.makespan_ns, result.stage) == (100, "multifit")


def test_plan_uses_local_search_where_every_start_falls_short() -> None:
    costs = CostTable({SHAPES[0]: {1: 60, 2: 66}, SHAPES[1]: {1: 60, 2: 90}, SHAPES[2]: {1: 60, 2: 60}})
    result = plan(make_matrices([3, 3, 1]), 2, costs, GREEDY)
    assert (result.makespan_ns, result.stage) == (180, "lpt+search")  # 186 without


def test_plan_levels_bytes_between_assignments_of_one_makespan() -> None:
    result = plan(make_matrices([2, 1]), 2, linear_costs(90, 90), GREEDY)
    assert result.makespan_ns == 180
    assert sorted(result.rank_bytes) == [2 * 64 * 64 * 4, 64 * 256 * 4]  # the large one alone


def test_matrices_that_are_stored_transposed_share_no_batch() -> None:
    # What runs stacks matrices as they are stored: two wide ones are a batch, a wide and a tall one are two.
    costs = CostTable({SHAPES[1]: {1: 100, 2: 110}})
    both = [Matrix("wide.0", 64, 256, "b"), Matrix("wide.1", 64, 256, "b")]
    assert plan(both, 1, costs).makespan_ns == 110
    mixed = [Matrix("wide", 64, 256, "b"), Matrix("tall", 256, 64, "b")]
    assert plan(mixed, 1, costs).makespan_ns == 200


def test_the_reason_speaks_of_the_plan_that_is_returned() -> None:
    matrices = [Matrix(f"b{i % 40}.{i}", 64 * (1 + i % 8), 1024, f"b{i % 40}") for i in range(2000)]
    costs = CostTable({m.shape: {1: 10 ** (3 + m.rows // 64 % 7)} for m in matrices})
    result = plan(matrices, 64, costs)
    assert result.reason.startswith(f"proven within {result.gap:.2%} of the optimum")


@pytest.mark.parametrize("ranks", [3, 64])
def test_the_search_over_many_classes_is_bounded(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    shapes = [(64 * (1 + i // 8), 64 * (1 + i // 8 + i % 8)) for i in range(60)]
    matrices = [Matrix(f"b{i % 40}.{i}", *shapes[i % 60], f"b{i % 40}") for i in range(3000)]
    costs = CostTable(
        {shape: {k: 20_000 * (1 + k * shape[0] * shape[1] // 2**21) for k in (1, 4, 16)} for shape in shapes}
    )
    looked_at: list[int] = []
    best_exchange = search._best_exchange

    def counted(problem: Any, patterns: Any, donor: int, deltas: Any, makespan: int) -> Any:
        looked_at.append(len(deltas) * len(patterns.rows) * len(problem.classes))
        return best_exchange(problem, patterns, donor, deltas, makespan)

    monkeypatch.setattr(search, "_best_exchange", counted)
    result = plan(matrices, ranks, costs, GREEDY)
    # Three starts, each with a budget that its last look may pass.
    assert looked_at and sum(looked_at) <= 3 * (search._CELLS + max(looked_at))
    assert result.gap < 0.2
