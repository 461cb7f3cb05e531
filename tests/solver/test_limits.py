"""Ranks of unequal speed, memory and pools; caps on spread; and what is said where these leave no room."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from instances import SHAPES, exact_makespan, limited_problems, linear_costs, make_matrices

from dmuon.solver import CostTable, Infeasible, Matrix, Plan, Rank, SolveOptions, baseline, plan
from dmuon.solver.spread import block_bytes

Case = tuple[list[Matrix], list[Rank], CostTable]
STATE = make_matrices([1])[0].state_bytes  # of a 64 x 64 matrix


def check(result: Plan, ranks: list[Rank]) -> None:
    held = [0] * len(ranks)
    for m in result.matrices:
        owner = result.owners[m.name]
        held[owner] += m.state_bytes
        assert ranks[owner].may_own(m.pool)
    assert all(rank.memory is None or n <= rank.memory for n, rank in zip(held, ranks, strict=True))


@given(limited_problems())
@settings(deadline=None, max_examples=150)
def test_limits_hold_and_bound_and_makespan_enclose_the_optimum(case: Case) -> None:
    matrices, ranks, costs = case
    optimum = exact_makespan(matrices, ranks, costs)
    try:
        result = plan(matrices, ranks, costs)
    except Infeasible as error:
        assert optimum is None, "there is an assignment within the limits"
        assert any(word in str(error) for word in ("memory", "pool"))
        return
    assert optimum is not None
    check(result, ranks)
    assert result.bound_ns <= optimum <= result.makespan_ns


def test_a_slow_rank_gets_less() -> None:
    ranks = [Rank(0), Rank(1, speed=0.5), Rank(2)]
    result = plan(make_matrices([10]), ranks, linear_costs(10))
    assert result.rank_matrices == (4, 2, 4)
    assert result.loads_ns == (40, 40, 40)
    assert result.gap == 0.0


def test_memory_moves_work_to_ranks_that_have_it() -> None:
    ranks = [Rank(0, memory=STATE), Rank(1), Rank(2, memory=2 * STATE)]
    result = plan(make_matrices([9]), ranks, linear_costs(10))
    assert result.rank_matrices == (1, 6, 2)
    assert (result.makespan_ns, result.bound_ns) == (60, 60)


def test_pools_are_problems_of_their_own() -> None:
    stages = [Matrix(f"s{i % 2}.{i}", 64, 64, f"b{i}", pool=f"stage{i % 2}") for i in range(12)]
    ranks = [Rank(i, pools=frozenset({f"stage{i // 2}"})) for i in range(4)]
    result = plan(stages, ranks, linear_costs(10))
    assert result.rank_matrices == (3, 3, 3, 3)
    assert all(result.owners[m.name] // 2 == int(m.pool[-1]) for m in stages)
    assert result.gap == 0.0


def test_pools_that_share_ranks_are_balanced_together() -> None:
    # Experts on two of four ranks; the rest of the work goes to the other two first.
    experts = [Matrix(f"e{i}", 64, 64, f"b{i}", pool="experts") for i in range(6)]
    ranks = [Rank(i, pools=frozenset({"", "experts"}) if i < 2 else frozenset({""})) for i in range(4)]
    result = plan([*experts, *make_matrices([6])], ranks, linear_costs(10))
    assert result.rank_matrices == (3, 3, 3, 3)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([Rank(0, pools=frozenset())], r"matrix 'b0.s0.0': no rank takes pool ''; add it to the pools of a rank"),
        ([Rank(0, memory=STATE - 1)], rf"needs {STATE} bytes .* no rank that may own it has more than {STATE - 1}"),
        ([Rank(0, memory=STATE), Rank(1, memory=STATE)], "4 matrices of shape 64x64 .* leave room for 2; raise memory"),
    ],
)
@pytest.mark.parametrize("cap", [None, 1.5, "auto"])
def test_limits_that_leave_no_room_are_named(ranks: list[Rank], says: str, cap: Any) -> None:
    with pytest.raises(Infeasible, match=says):
        plan(make_matrices([4]), ranks, linear_costs(10), SolveOptions(spread_cap=cap))


def test_all_ranks_together_too_small_is_named() -> None:
    ranks = [Rank(i, memory=5 * STATE) for i in range(2)]  # a large matrix takes four times a small one
    with pytest.raises(
        Infeasible, match=r"the matrices take .* bytes, but memory leaves the ranks .* in all; raise memory"
    ):
        plan(make_matrices([3, 2]), ranks, linear_costs(10, 10))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"index": -1}, "index must be an integer of at least 0, got -1"),
        ({"node": 1.5}, "node must be an integer"),
        ({"speed": 0}, "rank 0: speed must be from 0.001 to 1000, got 0"),
        ({"speed": float("nan")}, "speed must be"),
        ({"memory": -1}, r"rank 0: memory must be None or bytes up to 2\*\*60, got -1"),
        ({"memory": 2**70}, "memory must be None or bytes"),
        ({"pools": {"a"}}, "rank 0: pools must be None or a frozenset"),
    ],
)
def test_impossible_ranks_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Rank(**{"index": 0, **fields})  # type: ignore[arg-type]


def batched() -> tuple[list[Matrix], CostTable]:
    """Eight blocks of four equal matrices; a batch of 32 costs as much as one matrix."""
    matrices = [Matrix(f"b{b}.{i}", 64, 64, f"b{b}") for b in range(8) for i in range(4)]
    return matrices, CostTable({SHAPES[0]: {1: 100, 32: 101}})


def largest_share(result: Plan) -> int:
    return max(max(row.values()) for row in block_bytes(result.matrices, result.owners).values())


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_a_spread_cap_holds_in_every_block(cap: float) -> None:
    matrices, costs = batched()
    result = plan(matrices, 4, costs, SolveOptions(spread_cap=cap))
    assert largest_share(result) <= cap * matrices[0].nbytes
    assert result.spread <= cap
    assert max(result.rank_matrices) <= 8 * cap  # inside the search: one or two of each of eight blocks


def test_a_spread_cap_is_part_of_the_bound() -> None:
    # Each rank could own all of one shape in one batch, but within the cap it owns half of every block.
    matrices = [Matrix(f"b{i // 2}.{i % 2}", *SHAPES[2 * (i // 8)], f"b{i // 2}") for i in range(16)]
    costs = CostTable({shape: {1: 100, 4: 104, 8: 110} for shape in (SHAPES[0], SHAPES[2])})
    free, capped = (plan(matrices, 2, costs, SolveOptions(method="greedy", spread_cap=cap)) for cap in (None, 1.0))
    assert (free.bound_ns, free.makespan_ns) == (110, 110)
    assert (capped.bound_ns, capped.makespan_ns, capped.spread) == (208, 208, 1.0)


def test_spread_is_measured_against_the_ranks_that_may_own_the_block() -> None:
    stages = [Matrix(f"s{i // 8}.{i}", 64, 64, f"b{i // 8}", pool=f"stage{i // 8}") for i in range(32)]
    ranks = [Rank(i, pools=frozenset({f"stage{i // 2}"})) for i in range(8)]
    result = plan(stages, ranks, linear_costs(10), SolveOptions(spread_cap=1.0))
    assert (result.spread, result.makespan_ns) == (1.0, 40)


def test_another_assignment_is_tried_where_the_shortest_cannot_be_spread() -> None:
    # Capped at the largest matrix, the block splits one way only: the two small ones together.
    matrices = [Matrix("s", 64, 64, "b", 33000), Matrix("t", 64, 64, "b"), Matrix("u", 64, 256, "b")]
    ranks = [Rank(0, speed=2, memory=81008), Rank(1, speed=2)]
    costs = CostTable({SHAPES[0]: {1: 721}, SHAPES[1]: {1: 575}})
    for method in ("greedy", "auto"):
        result = plan(matrices, ranks, costs, SolveOptions(method=method, spread_cap=1.0))  # type: ignore[arg-type]
        assert (result.owners["s"], result.owners["t"], result.owners["u"]) == (0, 0, 1)


def test_auto_takes_the_cap_with_the_shortest_predicted_step() -> None:
    matrices, costs = batched()
    loose = plan(matrices, 4, costs)
    by_bytes = plan(matrices, 4, costs, SolveOptions(spread_cap="auto"), predict=lambda p: p.spread)
    assert by_bytes.spread == 1.0
    by_time = plan(matrices, 4, costs, SolveOptions(spread_cap="auto"), predict=lambda p: p.makespan_ns)
    assert by_time.makespan_ns == loose.makespan_ns
    nominal = plan(matrices, 4, costs, SolveOptions(spread_cap="auto"))
    assert nominal.spread <= loose.spread


def test_byte_slack_trades_makespan_for_even_bytes() -> None:
    # 100 ns on each of two ranks: one wide matrix against ten small ones. Levelling the bytes costs 30 ns.
    matrices, costs = make_matrices([10, 1]), linear_costs(10, 100)
    strict = plan(matrices, 2, costs, SolveOptions(method="greedy", byte_slack=0.5))
    assert (strict.makespan_ns, max(strict.rank_bytes)) == (100, 10 * 64 * 64 * 4)  # the gap of 1 % comes first
    slack = plan(matrices, 2, costs, SolveOptions(method="greedy", byte_slack=0.5, gap_target=0.5))
    assert (slack.makespan_ns, max(slack.rank_bytes)) == (130, 7 * 64 * 64 * 4)
    none = plan(matrices, 2, costs, SolveOptions(method="greedy", byte_slack=0.0, gap_target=0.5))
    assert none.makespan_ns == 100


def test_permuted_input_gives_the_same_digest_within_limits() -> None:
    matrices, ranks = make_matrices([9, 7, 5]), [Rank(i, speed=1 + i % 2, memory=10**8) for i in range(5)]
    shuffled = random.Random(0).sample(matrices, len(matrices))
    costs = linear_costs(70, 110, 130)
    assert plan(shuffled, ranks[::-1], costs).digest == plan(matrices, ranks, costs).digest


@pytest.mark.parametrize("name", ["round-robin", "lpt", "greedy"])
def test_baselines_own_everything_within_pools(name: str) -> None:
    stages = [Matrix(f"s{i % 2}.{i}", 64, 64, f"b{i}", pool=f"stage{i % 2}") for i in range(12)]
    ranks = [Rank(i, pools=frozenset({f"stage{i // 2}"})) for i in range(4)]
    check(baseline(name, stages, ranks, linear_costs(10)), ranks)
    with pytest.raises(ValueError, match="baseline 'best' is unknown; use one of round-robin, lpt, greedy"):
        baseline("best", stages, ranks, linear_costs(10))
