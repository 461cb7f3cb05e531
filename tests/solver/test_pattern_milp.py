"""Column generation: what a knapsack is worth, what it proves, and what it finds."""

from __future__ import annotations

import math
import time
from itertools import product

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import (
    BATCHED,
    LLAMA_8B,
    Case,
    LimitedCase,
    built,
    decoder,
    exact_makespan,
    limited_problems,
    linear_costs,
    make_matrices,
    problems,
    wave_costs,
)

from dmuon.solver import Infeasible, Rank, SolveOptions, plan
from dmuon.solver.compact_milp import MilpSolver
from dmuon.solver.pattern_milp import PatternPool, _Knapsack
from dmuon.solver.problem import Problem, lower_bound


def pool(problem: Problem) -> PatternPool:
    return PatternPool(problem, MilpSolver(pulp.PULP_CBC_CMD.pulp_cbc_path), time.monotonic() + 30)


def most_valuable(problem: Problem, kind: int, capacity: int, prices: np.ndarray) -> float:
    """By trying every pattern that fits."""
    rows = np.array(list(product(*(range(n + 1) for n in problem.members))))
    fits = problem.loads(rows, np.full(len(rows), kind)) <= capacity
    return float((rows[fits] @ prices).max())


@given(limited_problems(), st.integers(1, 2000), st.lists(st.integers(0, 50), min_size=8, max_size=8), st.data())
@settings(deadline=None, max_examples=40)
def test_the_relaxed_knapsack_is_an_upper_bound_and_the_strict_one_fits(
    case: LimitedCase, capacity: int, values: list[int], data: st.DataObject
) -> None:
    try:
        problem = built(*case)
    except Infeasible:
        return
    members = np.array(problem.members)
    prices = np.array(values[: len(members)], dtype=np.float64)
    kind = data.draw(st.integers(0, problem.kinds - 1))
    best = most_valuable(problem, kind, capacity, prices)
    value, _ = _Knapsack(problem, kind, capacity, members, strict=False).best(prices)
    assert value >= best - 1e-9
    _, row = _Knapsack(problem, kind, capacity, members, strict=True).best(prices)
    assert problem.loads(row[None], np.array([kind]))[0] <= capacity
    assert prices @ row <= best + 1e-9
    if problem.room[0, kind] < 2**61:
        return
    # Without a limit on memory all that can be lost is the rounding to cells, at most one for each class.
    rounding = math.ceil(len(members) * capacity / 8192)
    assert value <= most_valuable(problem, kind, capacity + rounding, prices) + 1e-9
    assert prices @ row >= most_valuable(problem, kind, max(0, capacity - rounding), prices) - 1e-9


@given(problems())
@settings(deadline=None, max_examples=40)
def test_patterns_refute_no_capacity_that_suffices_and_assign_every_matrix_within_it(case: Case) -> None:
    problem, optimum = built(*case), exact_makespan(*case)
    assert optimum is not None
    patterns = pool(problem)
    assert patterns.refute(optimum) != "infeasible"
    envelope = lower_bound(problem)
    if envelope > 1:
        assert patterns.refute(envelope - 1) == "infeasible"
    counts = pool(problem).assign(optimum)
    assert counts is not None and problem.is_complete(counts)


def test_the_bound_sees_that_few_matrices_fit_a_rank() -> None:
    # Five of 10 ns over 2 ranks: some rank holds three. With one of 11 ns beside them no fraction of a rank helps.
    problem = built(make_matrices([5, 1]), 3, linear_costs(10, 11))
    assert lower_bound(problem) == 21
    assert pool(problem).refute(lower_bound(problem)) != "infeasible"
    wide = built(make_matrices([0, 7]), 4, linear_costs(1, 10))
    assert pool(wide).refute(19) == "infeasible"


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
