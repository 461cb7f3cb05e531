"""Each heuristic does something that the ones before it do not; plans without an exact method are made by them."""

from __future__ import annotations

from instances import ALMOST_FREE, GRAHAM, make_matrices, shape_costs

from dmuon.solver import SolveOptions, plan

GREEDY = SolveOptions(method="greedy", byte_slack=0.0)


def test_packing_keeps_batches_together_that_greedy_deals_out() -> None:
    case = make_matrices([4, 4, 4]), 3, ALMOST_FREE
    assert plan(*case, GREEDY).makespan_ns == 110  # 305, class by class to whom is done first


def test_search_swaps_its_way_out_of_the_worst_case_of_lpt() -> None:
    assert plan(*GRAHAM, GREEDY).makespan_ns == 9


def test_levelling_spreads_what_a_free_batch_lets_pile_up() -> None:
    free = shape_costs(dict.fromkeys((1, 2, 4, 8, 16), 1000))
    assert plan(make_matrices([16]), 4, free, GREEDY).rank_matrices == (4, 4, 4, 4)
