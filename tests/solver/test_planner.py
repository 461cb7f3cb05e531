"""The planner against exhaustion, against its inputs' order, and against what breaks planners."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import (
    ALMOST_FREE,
    BATCHED,
    LLAMA_8B,
    LLAMA_70B,
    STEEP,
    Case,
    decoder,
    exact_makespan,
    linear_costs,
    make_matrices,
    problems,
    recomputed_loads,
    shape_costs,
    wave_costs,
)

from dmuon.solver import CostTable, Matrix, Rank, SolveOptions, plan
from dmuon.solver.planner import xor_labels

GREEDY = SolveOptions(method="greedy")


@given(problems())
@settings(deadline=None, max_examples=50)
def test_bound_is_below_and_makespan_above_the_optimum(case: Case) -> None:
    result, optimum = plan(*case, SolveOptions(byte_slack=0.0)), exact_makespan(*case)
    assert optimum is not None
    assert result.bound_ns <= optimum <= result.makespan_ns
    assert result.gap <= 0.01 or result.makespan_ns - result.bound_ns <= 1


@given(problems())
@settings(deadline=None, max_examples=50)
def test_every_matrix_has_one_owner_and_the_loads_are_those_of_the_owners(case: Case) -> None:
    matrices, ranks, costs = case
    result = plan(matrices, ranks, costs, GREEDY)
    assert list(result.owners) == sorted(m.name for m in matrices)
    assert set(result.owners.values()) <= set(range(ranks))
    assert list(result.loads_ns) == recomputed_loads(result, costs)
    assert sum(result.rank_matrices) == len(matrices)
    assert result.gap == (result.makespan_ns - result.bound_ns) / result.makespan_ns


@given(problems())
@settings(deadline=None, max_examples=40)
def test_slack_gives_up_no_more_than_allowed_and_never_the_proof(case: Case) -> None:
    strict, even = (plan(*case, SolveOptions(byte_slack=slack, gap_target=0.1)) for slack in (0.0, 0.05))
    assert even.makespan_ns <= 1.05 * strict.makespan_ns
    assert even.gap <= 0.1 or even.makespan_ns == strict.makespan_ns
    assert max(even.rank_bytes) <= max(strict.rank_bytes)


@pytest.mark.pitfall("P21")
@given(problems())
@settings(deadline=None, max_examples=40)
def test_permuted_input_gives_the_same_digest(case: Case) -> None:
    matrices, ranks, costs = case
    shuffled = random.Random(0).sample(matrices, len(matrices))
    assert plan(shuffled, ranks, costs, GREEDY).digest == plan(*case, GREEDY).digest


@given(problems())
@settings(deadline=None, max_examples=10)
def test_milp_without_a_gap_reaches_the_optimum(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a solver that fails here must not hide behind the fallback
        result = plan(*case, SolveOptions(method="milp", gap_target=0.0))
    assert result.makespan_ns == result.bound_ns == exact_makespan(*case)


STRICT = SolveOptions(method="greedy", byte_slack=0.0)
WIDE, TALL = Matrix("wide", 64, 256, "b"), Matrix("tall", 256, 64, "b")
PAIR = shape_costs({}, {1: 100, 2: 110})
PLANNED: dict[str, tuple[list[Matrix], int, CostTable, SolveOptions, dict[str, Any]]] = {
    # LPT, which prices matrices one by one, deals each shape out: more than 200 ns.
    "batches are kept together": (make_matrices([4, 4, 4]), 3, ALMOST_FREE, STRICT, {"makespan_ns": 110}),
    "a batch that costs the same whatever its size does not pile up on one rank": (
        make_matrices([16]), 4, shape_costs(dict.fromkeys((1, 2, 4, 8, 16), 1000)), STRICT,
        {"makespan_ns": 1000, "rank_matrices": (4, 4, 4, 4)},
    ),
    # 2 more if each class is dealt out as if it were alone.
    "greedy counts what ranks have of other classes": (
        make_matrices([11, 9, 12]), 3, linear_costs(21, 23, 1), STRICT, {"makespan_ns": 151},
    ),
    "local search where every start falls short, at 186 ns": (
        make_matrices([3, 3, 1]), 2, shape_costs({1: 60, 2: 66}, {1: 60, 2: 90}, {1: 60, 2: 60}), GREEDY,
        {"makespan_ns": 180, "stage": "lpt+search"},
    ),
    "bytes are levelled between assignments of one makespan: the large one alone": (
        make_matrices([2, 1]), 2, linear_costs(90, 90), GREEDY,
        {"makespan_ns": 180, "rank_bytes": (64 * 256 * 4, 2 * 64 * 64 * 4)},
    ),
    # What runs stacks matrices as they are stored: two wide ones are a batch, a wide and a tall one are two.
    "matrices that are stored transposed share none": ([WIDE, TALL], 1, PAIR, GREEDY, {"makespan_ns": 200}),
}  # fmt: skip


@pytest.mark.pitfall("P52", "P53")
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_as_worked_out_by_hand(name: str) -> None:
    matrices, ranks, costs, options, expected = PLANNED[name]
    result = plan(matrices, ranks, costs, options)
    assert {field: getattr(result, field) for field in expected} == expected


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_decoder_is_spread_as_far_as_its_matrices_allow(ranks: int) -> None:
    """Of each block the largest owner has an even share, or one matrix."""
    matrices = decoder(32, *LLAMA_8B)
    result = plan(matrices, ranks, CostTable.from_flops({m.shape for m in matrices}), GREEDY)
    for block, (largest, _) in result.block_balance.items():
        sizes = [m.nbytes for m in matrices if m.block == block]
        assert largest <= 1.001 * max(sum(sizes) / ranks, *sizes), block


HUGE = Matrix("huge", 10**5, 10**5, "b")


@pytest.mark.pitfall("P14", "P52", "P53")
@pytest.mark.parametrize(
    ("matrices", "ranks", "costs", "most"),
    [
        *((make_matrices([12, 12, 4]), ranks, linear_costs(1, 1, 1), -(-28 // ranks)) for ranks in (2, 3, 4, 7)),
        (make_matrices([12, 0, 1]), 4, linear_costs(1, 1, 10**6), 5),  # cheap ones beside a dear one
        (make_matrices([3, 2]), 64, linear_costs(10, 30), 1),
        ([*make_matrices([8]), HUGE], 3, CostTable.from_flops([(64, 64), HUGE.shape]), 4),
    ],
)
def test_no_rank_has_more_matrices_than_it_must(
    matrices: list[Matrix], ranks: int, costs: CostTable, most: int
) -> None:
    result = plan(matrices, ranks, costs)
    assert max(result.rank_matrices) <= most and result.gap == 0.0
    if HUGE in matrices:
        assert result.rank_matrices[result.owners["huge"]] == 1


@pytest.mark.pitfall("P53")
@pytest.mark.parametrize(
    ("matrices", "ranks", "says"),
    [
        ([], 2, "no matrix to plan for"),
        (make_matrices([4]), 2, "many days"),  # a cost that would overflow
        (make_matrices([1]), 0, "at least one rank, got 0"),
        (make_matrices([1]), [Rank(0), Rank(2)], r"0 … 1, each once, got \[0, 2\]"),
        (make_matrices([1]) * 2, 2, "'b0.s0.0' is listed twice"),
        (make_matrices([1, 1]), 2, r"no cost for shape \(64, 256\)"),
    ],
)
def test_problems_without_an_answer_are_refused(matrices: list[Matrix], ranks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(matrices, ranks, linear_costs(2**61 if says == "many days" else 1))


NEEDED = {Matrix: {"name": "w", "rows": 4, "cols": 2, "block": "b"}, SolveOptions: {}, Rank: {"index": 0}}


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (Matrix, {"rows": 0}, "'w': rows must be an integer of at least 1, got 0"),
        (SolveOptions, {"method": "exact"}, "one of auto, milp, greedy, got 'exact'"),
        (SolveOptions, {"gap_target": float("nan")}, "gap_target"),
        (SolveOptions, {"spread_cap": 1.5}, "spread_cap=1.5: was removed: every block is spread"),
        (Rank, {"speed": 0}, "rank 0: speed must be from 0.001 to 1000, got 0"),
    ],
)
def test_impossible_fields_are_refused(kind: Any, fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(**{**NEEDED[kind], **fields})


def test_llama_70b_over_1024_ranks_plans_within_seconds() -> None:
    matrices = decoder(80, *LLAMA_70B)
    began = time.perf_counter()
    result = plan(matrices, 1024, CostTable.from_flops({m.shape for m in matrices}), GREEDY)
    assert time.perf_counter() - began < 5.0  # 0.02 s on an idle core
    assert result.gap == 0.0


# -- one digest from run to run ----------------------------------------------------------------------------------------


LLAMA = decoder(40, *LLAMA_8B)
SEVERAL: dict[str, Case] = {
    "heuristic": (make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130)),
    "column generation": (LLAMA, 64, wave_costs(LLAMA)),
    "many ranks": (make_matrices([93, 71, 55], blocks=30), 40, BATCHED),
}


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize("name", SEVERAL)
def test_all_runs_give_one_digest(name: str) -> None:
    matrices, ranks, costs = SEVERAL[name]
    assert len({plan(matrices, ranks, costs).digest for _ in range(3)}) == 1


@pytest.mark.pitfall("P51")
def test_small_milps_never_run_to_the_time_limit() -> None:
    """Told to take one thread, CBC waited for it until the limit in one of five solves of this very model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3):
            assert plan(make_matrices([7, 5, 3], blocks=3), 3, STEEP).gap <= 0.01


# -- labels by the XOR layout: what ranks own stays, where they stand changes ------------------------------------------


Task = tuple[dict[str, int], list[Rank]]


def grid(nodes: int, lanes: int) -> list[Rank]:
    return [Rank(i, node=i // lanes) for i in range(nodes * lanes)]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Owners at random, and nodes of uneven sizes with two kinds of ranks."""
    nodes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    speeds = st.sampled_from([1.0, 1.0, 2.0])
    places = [node for node, size in enumerate(nodes) for _ in range(size)]
    ranks = [Rank(i, node=node, speed=draw(speeds)) for i, node in enumerate(places)]
    return {f"m{i}": draw(st.integers(0, len(ranks) - 1)) for i in range(draw(st.integers(1, 20)))}, ranks


@given(tasks())
@settings(deadline=None, max_examples=40)
def test_ranks_keep_what_they_own_and_trade_labels_with_their_like(task: Task) -> None:
    owners, ranks = task
    labels = xor_labels(owners, ranks)
    assert list(labels) == list(owners)
    pairs = {(owners[name], labels[name]) for name in owners}
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
    assert all(ranks[old].speed == ranks[new].speed for old, new in pairs)


def test_consecutive_owners_go_to_other_nodes_and_lanes() -> None:
    owners = {f"{i}": i for i in range(16)}
    places = [divmod(rank, 4) for rank in xor_labels(owners, grid(4, 4)).values()]
    assert places[:8] == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (1, 0), (2, 3), (3, 2)]
    rotated = [divmod(rank, 3) for rank in xor_labels(owners, grid(6, 3)).values()]
    assert rotated[:6] == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
