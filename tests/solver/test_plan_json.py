"""A plan on its way through JSON, and as text."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from instances import linear_costs, make_matrices

from dmuon.solver import CostTable, Plan, plan

RESULT = plan(make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130))


def test_json_and_pickle_give_the_plan_back() -> None:
    again = Plan.from_json(json.loads(json.dumps(RESULT.to_json())))
    assert again == RESULT
    assert again.digest == RESULT.digest
    assert pickle.loads(pickle.dumps(RESULT)) == RESULT


Change = Callable[[dict[str, Any]], object]


def of_first(field: int, value: object) -> Change:
    return lambda data: data["matrices"][0].__setitem__(field, value)


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.update(bound_ns=521), "bound .* is not in"),
        (of_first(6, 4), "the owner of .* is rank 4, outside 0 … 3"),
        (of_first(6, "0"), "a field is ill-typed"),
        (lambda data: data["loads_ns"].__setitem__(0, 1.5), "loads must be whole nanoseconds"),
        (lambda data: data.pop("stage"), "field 'stage' is missing"),
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
