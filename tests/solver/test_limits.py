"""Ranks of unequal speed, memory and pools, and what is said where these leave no room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from instances import LimitedCase, exact_makespan, limited_problems, linear_costs, make_matrices

from dmuon.solver import Infeasible, Matrix, Plan, Rank, SolveOptions, baseline, plan

STATE = make_matrices([1])[0].state_bytes  # of a 64 x 64 matrix


def check(result: Plan, ranks: list[Rank]) -> None:
    held = [0] * len(ranks)
    for m in result.matrices:
        owner = result.owners[m.name]
        held[owner] += m.state_bytes
        assert ranks[owner].may_own(m.pool)
    assert all(rank.memory is None or n <= rank.memory for n, rank in zip(held, ranks, strict=True))


@given(limited_problems())
@settings(deadline=None, max_examples=30)
def test_limits_hold_and_bound_and_makespan_enclose_the_optimum(case: LimitedCase) -> None:
    optimum = exact_makespan(*case)
    try:
        result = plan(*case)
    except Infeasible as error:
        assert optimum is None, "there is an assignment within the limits"
        assert any(word in str(error) for word in ("memory", "pool"))
        return
    assert optimum is not None
    check(result, case[1])
    assert result.bound_ns <= optimum <= result.makespan_ns


def staged(count: int, stages: int) -> tuple[list[Matrix], list[Rank]]:
    """As many matrices, one block each, in a pool a stage, and two ranks for each of them."""
    matrices = [Matrix(f"s{i % stages}.{i}", 64, 64, f"b{i}", pool=f"stage{i % stages}") for i in range(count)]
    return matrices, [Rank(i, pools=frozenset({f"stage{i // 2}"})) for i in range(2 * stages)]


# Experts on two of four ranks; the rest of the work goes to the other two first.
EXPERTS = [Matrix(f"e{i}", 64, 64, f"b{i}", pool="experts") for i in range(6)]
EXPERT_RANKS = [Rank(i, pools=frozenset({"", "experts"} if i < 2 else {""})) for i in range(4)]


@pytest.mark.parametrize(
    ("matrices", "ranks", "held", "makespan"),
    [
        (make_matrices([10]), [Rank(0), Rank(1, speed=0.5), Rank(2)], (4, 2, 4), 40),
        (make_matrices([9]), [Rank(0, memory=STATE), Rank(1), Rank(2, memory=2 * STATE)], (1, 6, 2), 60),
        (*staged(12, 2), (3, 3, 3, 3), 30),  # problems of their own
        ([*EXPERTS, *make_matrices([6])], EXPERT_RANKS, (3, 3, 3, 3), 30),  # pools that share ranks
        (make_matrices([2]), [Rank(i, start_ns=10 * (i % 2)) for i in range(4)], (1, 0, 1, 0), 10),
        (make_matrices([5]), [Rank(0, start_ns=60), Rank(1, start_ns=20), Rank(2)], (0, 2, 3), 60),
    ],
    ids=["a slow rank gets less", "memory moves work", "pools", "shared pools", "who has none", "who has less"],
)
def test_work_goes_where_the_ranks_can_take_it(
    matrices: list[Matrix], ranks: list[Rank], held: tuple[int, ...], makespan: int
) -> None:
    result = plan(matrices, ranks, linear_costs(10))
    check(result, ranks)
    assert result.rank_matrices == held
    assert result.loads_ns == tuple(10 * n / rank.speed for n, rank in zip(held, ranks, strict=True))
    assert (result.makespan_ns, result.gap) == (makespan, 0.0)
    assert result.ends_ns == tuple(load + rank.start_ns for load, rank in zip(result.loads_ns, ranks, strict=True))


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([Rank(0, pools=frozenset())], r"matrix 'b0.s0.0': no rank takes pool ''; add it to the pools of a rank"),
        ([Rank(0, memory=STATE - 1)], rf"needs {STATE} bytes .* no rank that may own it has more than {STATE - 1}"),
        (
            [Rank(0, memory=STATE), Rank(1, memory=STATE)],
            "memory leaves no room for all .*; raise memory",
        ),
    ],
)
def test_limits_that_leave_no_room_are_named(ranks: list[Rank], says: str) -> None:
    with pytest.raises(Infeasible, match=says):
        plan(make_matrices([4]), ranks, linear_costs(10))


def test_all_ranks_together_too_small_is_named() -> None:
    ranks = [Rank(i, memory=5 * STATE) for i in range(2)]  # a large matrix takes four times a small one
    with pytest.raises(Infeasible, match=r"memory leaves no room .* the ranks have .* in all; raise memory"):
        plan(make_matrices([3, 2]), ranks, linear_costs(10, 10))


def test_byte_slack_trades_makespan_for_even_bytes() -> None:
    # 100 ns on each of two ranks: one wide matrix against ten small ones. Levelling the bytes costs 30 ns.
    found = {}
    for slack, gap in ((0.5, 0.01), (0.5, 0.5), (0.0, 0.5)):
        options = SolveOptions(method="greedy", byte_slack=slack, gap_target=gap)
        result = plan(make_matrices([10, 1]), 2, linear_costs(10, 100), options)
        found[slack, gap] = result.makespan_ns, max(result.rank_bytes)
    even, uneven = (130, 7 * 64 * 64 * 4), (100, 10 * 64 * 64 * 4)
    assert found == {(0.5, 0.01): uneven, (0.5, 0.5): even, (0.0, 0.5): uneven}, "a gap of 1 % comes first"


@pytest.mark.parametrize("name", ["round-robin", "lpt", "greedy"])
def test_baselines_own_everything_within_pools(name: str) -> None:
    stages, ranks = staged(12, 2)
    check(baseline(name, stages, ranks, linear_costs(10)), ranks)
    with pytest.raises(ValueError, match="baseline 'best' is unknown; use one of round-robin, lpt, greedy"):
        baseline("best", stages, ranks, linear_costs(10))
