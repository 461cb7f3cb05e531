"""The cost table: what it accepts, what it says a batch costs, and plans on their way through JSON and as text."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import linear_costs, make_matrices

from dmuon.solver import CostTable, Plan, plan, unmeasured_batch

S = (64, 256)

entries = st.dictionaries(st.integers(1, 40), st.integers(1, 10**9), max_size=6).flatmap(
    lambda rest: st.integers(1, 10**9).map(lambda single: {**rest, 1: single})
)


@given(entries)
@settings(deadline=None, max_examples=40)
def test_cost_is_zero_for_nothing_and_never_falls(measured: dict[int, int]) -> None:
    table = CostTable({S: measured})
    costs = [table.cost(S, n) for n in range(100)]
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert table.costs_up_to(S, 99).tolist() == costs


@given(entries)
@settings(deadline=None, max_examples=40)
def test_chunk_is_measured_and_within_three_percent_of_the_best_average(measured: dict[int, int]) -> None:
    table = CostTable({S: measured})
    chunk = table.chunk(S)
    isotonic = {k: max(t for j, t in measured.items() if j <= k) for k in measured}
    best = min(t / k for k, t in isotonic.items())
    assert chunk in measured
    assert isotonic[chunk] / chunk <= 1.03 * best * (1 + 1e-12)
    assert all(isotonic[k] / k > 1.03 * best * (1 - 1e-12) for k in measured if k < chunk)


@pytest.mark.parametrize(
    ("measured", "chunk", "costs"),
    [
        ({1: 100, 4: 160}, 4, {0: 0, 1: 100, 2: 120, 3: 140, 4: 160}),  # linear between measurements
        ({1: 100, 2: 120, 4: 240}, 2, {2: 120, 3: 220, 4: 240, 7: 460}),  # beyond: chunks and a remainder
        ({1: 100, 2: 180, 4: 170}, 4, {1: 100, 2: 180, 3: 180, 4: 180}),  # noise that makes it cheaper is flattened
    ],
)
def test_costs_and_chunks_by_hand(measured: dict[int, int], chunk: int, costs: dict[int, int]) -> None:
    table = CostTable({S: measured})
    assert table.chunk(S) == chunk
    assert {n: table.cost(S, n) for n in costs} == costs


def test_flop_estimates_follow_the_cheaper_form() -> None:
    shapes = [(1024, 1024), (1024, 4096)]
    table = CostTable.from_flops(shapes)
    assert table.estimated == tuple(shapes)
    square, wide = (table.cost(shape, 1) for shape in shapes)
    assert square == 1024**3 * 20 // 400_000  # 9 m²n + 11 m³
    assert wide == 1024**3 * 41 // 400_000  # 6 m²n + 17 m³
    assert table.cost(shapes[0], 7) == 7 * square


def test_estimates_say_nothing_of_batches() -> None:
    table = CostTable(
        {S: {1: 1, 4: 2}, (8, 8): {1: 1}, (2**13, 2**14): {1: 1}}, dict.fromkeys([(8, 8), (2**13, 2**14)], "estimated")
    )
    assert [table.batch_size(shape) for shape in table.costs] == [2**25 // 64, 4, 1]
    assert table.chunk((8, 8)) == 1
    assert CostTable({S: {1: 2, 4: 4}}, {S: "estimated"}).batch_size(S) == 4, "this one does"
    assert unmeasured_batch((8, 4)) == unmeasured_batch((4, 8)) == 2**20


def test_sources_are_tagged_per_shape() -> None:
    table = CostTable({S: {1: 1}, (8, 8): {1: 1}}, {(8, 8): "estimated"})
    assert table.sources == {S: "measured", (8, 8): "estimated"}
    assert table.estimated == ((8, 8),)


@pytest.mark.pitfall("P50", "P52")
@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ({S: {1: 0}}, r"shape \(64, 256\), batch size 1: 0 must be a positive whole number"),
        ({S: {1: -5}}, r"batch size 1: -5 .* measure it again"),
        ({S: {1: float("nan")}}, r"batch size 1: nan"),
        ({S: {1: 10, 4: float("inf")}}, r"batch size 4: inf"),
        ({S: {1: True}}, r"batch size 1: True"),
        ({S: {0: 10, 1: 10}}, r"batch size 0 must be an integer of at least 1"),
        ({S: {2: 10}}, r"shape \(64, 256\) has no entry for batch size 1; measure it"),
        ({(256, 64): {1: 10}}, r"shape \(256, 64\) must be \(small side, large side\); write \(64, 256\)"),
        ({(0, 64): {1: 10}}, r"two positive integers"),
    ],
)
def test_impossible_costs_are_refused_by_name(costs: dict[Any, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostTable(costs)


def test_unknown_sources_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="'guess'"):
        CostTable({S: {1: 1}}, {S: "guess"})
    with pytest.raises(ValueError, match=r"shape \(8, 8\) has no costs"):
        CostTable({S: {1: 1}}, {(8, 8): "estimated"})
    with pytest.raises(ValueError, match=r"no cost for shape \(8, 8\); measure it with dmuon-profile"):
        CostTable({S: {1: 1}}).cost((8, 8), 1)


def test_a_transfer_is_paid_for_each_matrix_of_a_batch() -> None:
    table = CostTable({(4, 8): {1: 100, 2: 150, 4: 260}, (8, 8): {1: 10}}, {(4, 8): "measured", (8, 8): "estimated"})
    dearer = table.with_transfer({(4, 8): 7})
    assert dearer.costs == {(4, 8): {1: 107, 2: 164, 4: 288}, (8, 8): {1: 10}}
    assert dearer.sources == table.sources
    assert table.costs[4, 8][2] == 150, "the table itself stays"


# -- a plan through JSON, and as text ----------------------------------------------------------------------------------


RESULT = plan(make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130))


def test_json_and_pickle_give_the_plan_back() -> None:
    again = Plan.from_json(json.loads(json.dumps(RESULT.to_json())))
    assert again == RESULT
    assert again.digest == RESULT.digest
    assert pickle.loads(pickle.dumps(RESULT)) == RESULT


Change = Callable[[dict[str, Any]], object]


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data["matrices"][0].__setitem__(6, 4), "the owner of .* is rank 4, outside 0 … 3"),
        (lambda data: data["matrices"].append(data["matrices"][0]), "owners and matrices must name the same matrices"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(change: Change, says: str) -> None:
    data = copy.deepcopy(RESULT.to_json())
    change(data)
    with pytest.raises(ValueError, match=says):
        Plan.from_json(data)


def test_report_names_makespan_bound_gap_stage_and_every_rank() -> None:
    lines = RESULT.report().splitlines()
    assert lines[0] == "21 matrices in 2 blocks over 4 ranks"
    assert f"{RESULT.gap:.2%}" in RESULT.report() and RESULT.stage in RESULT.report()
    rows = [line.split() for line in lines[-4:]]
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3]
    assert max(float(row[3].rstrip("%")) for row in rows) == 100.0
    assert sum(int(row[5]) for row in rows) == 21


def test_report_of_many_ranks_shows_the_extremes_and_counts_the_rest() -> None:
    text = plan(make_matrices([9]), 100, linear_costs(70)).report()
    assert "… 68 more ranks" in text
    assert len(text.splitlines()) == 9 + 33


def test_report_says_when_costs_are_estimates() -> None:
    estimated = plan(make_matrices([4, 4]), 2, CostTable.from_flops([(64, 64), (64, 256)]))
    assert "estimated for 2 of 2 shapes" in estimated.report()
    assert "costs     measured" in RESULT.report()
