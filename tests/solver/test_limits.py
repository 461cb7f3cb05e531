"""Ranks of unequal speed and pools, and what is said where these leave no room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from instances import LimitedCase, exact_makespan, limited_problems, linear_costs, make_matrices

from dmuon.solver import Infeasible, Matrix, Plan, Rank, plan


def check(result: Plan, ranks: list[Rank]) -> None:
    assert all(ranks[result.owners[m.name]].may_own(m.pool) for m in result.matrices)


@given(limited_problems())
@settings(deadline=None, max_examples=30)
def test_limits_hold_and_bound_and_makespan_enclose_the_optimum(case: LimitedCase) -> None:
    optimum = exact_makespan(*case)
    try:
        result = plan(*case)
    except Infeasible as error:
        assert optimum is None, "there is an assignment within the limits"
        assert "pool" in str(error)
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
        (*staged(12, 2), (3, 3, 3, 3), 30),  # problems of their own
        ([*EXPERTS, *make_matrices([6])], EXPERT_RANKS, (3, 3, 3, 3), 30),  # pools that share ranks
        (make_matrices([2]), [Rank(i, start_ns=10 * (i % 2)) for i in range(4)], (1, 0, 1, 0), 10),
        (make_matrices([5]), [Rank(0, start_ns=60), Rank(1, start_ns=20), Rank(2)], (0, 2, 3), 60),
    ],
    ids=["a slow rank gets less", "pools", "shared pools", "who has none", "who has less"],
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


def test_a_pool_that_no_rank_takes_is_named() -> None:
    with pytest.raises(Infeasible, match=r"matrix 'b0.s0.0': no rank takes pool ''; add it to the pools of a rank"):
        plan(make_matrices([4]), [Rank(0, pools=frozenset())], linear_costs(10))
