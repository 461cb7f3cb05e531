"""Each heuristic does something that the ones before it do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from instances import ALMOST_FREE, GRAHAM, Case, built, linear_costs, make_matrices, problems, shape_costs

from dmuon.solver import CostTable
from dmuon.solver.heuristics import batch_greedy, level_bytes, longest_first, multifit, shorten
from dmuon.solver.problem import Problem, lower_bound


def build(counts: list[int], ranks: int, costs: CostTable) -> Problem:
    return built(make_matrices(counts), ranks, costs)


def test_greedy_sees_a_batch_where_lpt_sees_single_matrices() -> None:
    # Six matrices in one batch cost less than the dear one beside them; LPT weighs them at 600 ns and splits them.
    problem = build([6, 0, 1], 2, shape_costs({1: 100, 2: 105, 4: 110}, {}, {1: 300}))
    makespans = problem.makespan(batch_greedy(problem)), problem.makespan(longest_first(problem))
    assert makespans == (300, 400)


def test_multifit_keeps_batches_together_that_greedy_deals_out() -> None:
    problem = build([4, 4, 4], 3, ALMOST_FREE)
    greedy = problem.makespan(batch_greedy(problem))
    packed = multifit(problem, lower_bound(problem), greedy)
    assert packed is not None
    assert (problem.makespan(packed), greedy) == (110, 305)


def test_search_swaps_its_way_out_of_the_worst_case_of_lpt() -> None:
    problem = built(*GRAHAM)
    start = longest_first(problem)
    assert (problem.makespan(start), problem.makespan(shorten(problem, start, 9))) == (11, 9)


def test_search_empties_a_rank_that_holds_everything() -> None:
    problem = build([8], 4, linear_costs(10))
    counts = np.array([[8], [0], [0], [0]])
    assert shorten(problem, counts, 20).tolist() == [[2]] * 4


def test_levelling_spreads_what_a_free_batch_lets_pile_up() -> None:
    problem = build([16], 4, shape_costs(dict.fromkeys((1, 2, 4, 8, 16), 1000)))
    assert level_bytes(problem, np.array([[16], [0], [0], [0]]), 1000).tolist() == [[4]] * 4


def test_levelling_stops_at_the_limit() -> None:
    problem = build([4, 1], 2, linear_costs(10, 40))
    counts = np.array([[4, 0], [0, 1]])
    assert level_bytes(problem, counts, 40).tolist() == sorted(counts.tolist())
    assert problem.makespan(level_bytes(problem, counts, 50)) <= 50


@pytest.mark.pitfall("P52")
@given(problems())
@settings(deadline=None, max_examples=40)
def test_search_and_levelling_keep_every_matrix_and_never_lengthen(case: Case) -> None:
    problem = built(*case)
    start = longest_first(problem)
    shorter = shorten(problem, start, lower_bound(problem))
    level = level_bytes(problem, shorter, problem.makespan(shorter))
    assert problem.is_complete(shorter) and problem.is_complete(level)
    assert problem.makespan(level) <= problem.makespan(shorter) <= problem.makespan(start)
    assert problem.rank_bytes(level).max() <= problem.rank_bytes(shorter).max()
