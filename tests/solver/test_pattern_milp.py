"""Column generation: what it proves, and what it finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from instances import (
    BATCHED,
    LLAMA_8B,
    Case,
    decoder,
    exact_makespan,
    linear_costs,
    make_matrices,
    problems,
    wave_costs,
)

from dmuon.solver import Rank, SolveOptions, plan


@given(problems())
@settings(deadline=None, max_examples=25)
@pytest.mark.usefixtures("patterns_only")
def test_patterns_refute_no_capacity_that_suffices_and_assign_every_matrix_within_it(case: Case) -> None:
    optimum, result = exact_makespan(*case), plan(*case, SolveOptions(gap_target=0.0))
    assert optimum is not None and result.bound_ns <= optimum <= result.makespan_ns
    assert result.bound_ns >= plan(*case, SolveOptions(method="greedy")).bound_ns


def test_the_bound_sees_that_few_matrices_fit_a_rank() -> None:
    # Five of 10 ns over 2 ranks: some rank holds three. With one of 11 ns beside them no fraction of a rank helps.
    exact = SolveOptions(gap_target=0.0)
    assert plan(make_matrices([5, 1]), 3, linear_costs(10, 11), SolveOptions(method="greedy")).bound_ns == 21
    assert plan(make_matrices([5, 1]), 3, linear_costs(10, 11), exact).bound_ns >= 21
    assert plan(make_matrices([0, 7]), 4, linear_costs(1, 10), exact).bound_ns == 20


@pytest.mark.parametrize("ranks", [24, 64, 100, 1024])
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
