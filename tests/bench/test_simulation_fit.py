"""The fit of the terms of predictions: its record is what the code predicts."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from harness.commands import BENCH

MODULE = "common.fit"


def test_a_published_step_is_predicted_as_the_record_says(bench: ModuleType) -> None:
    case = next(case for case in bench.CASES if case.model == "llama-3.2-3b")
    base, seconds = bench.scenario_of(case)
    predicted, efficiency = bench.overhead(case, base, seconds)
    record = json.loads((BENCH / "results/simulation-fit.json").read_text())["cases"]
    written = next(one for one in record if one["name"] == case.name)
    assert base.workload.tokens == written["tokens"]
    assert predicted == pytest.approx(written["predicted"], abs=2e-3)
    assert efficiency == pytest.approx(written["efficiency"], rel=1e-2)
