"""The cost table: what it accepts, what it says a batch costs, and plans on their way through JSON and as text."""

from __future__ import annotations

import copy
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


@pytest.mark.pitfall("P50", "P52")
@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ({S: {1: 0}}, r"shape \(64, 256\), batch size 1: 0 must be a positive whole number"),
        ({S: {1: float("nan")}}, r"batch size 1: nan"),
        ({S: {2: 10}}, r"shape \(64, 256\) has no entry for batch size 1; measure it"),
        ({(256, 64): {1: 10}}, r"shape \(256, 64\) must be \(small side, large side\); write \(64, 256\)"),
    ],
)
def test_impossible_costs_are_refused_by_name(costs: dict[Any, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostTable(costs)


def test_a_transfer_is_paid_for_each_matrix_of_a_batch() -> None:
    table = CostTable({(4, 8): {1: 100, 2: 150, 4: 260}, (8, 8): {1: 10}}, {(4, 8): "measured", (8, 8): "estimated"})
    dearer = table.with_transfer({(4, 8): 7})
    assert dearer.costs == {(4, 8): {1: 107, 2: 164, 4: 288}, (8, 8): {1: 10}}
    assert dearer.sources == table.sources
    assert table.costs[4, 8][2] == 150, "the table itself stays"


# -- a plan through JSON, and as text ----------------------------------------------------------------------------------


RESULT = plan(make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130))


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
