"""The fit of the terms of predictions: its record is what the code predicts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("common.fit")


@pytest.fixture
def record() -> dict[str, dict[str, float]]:
    cases = json.loads((BENCH / "results/simulation-fit.json").read_text())["cases"]
    return {f"{case['name']}, {case['program']}, {case['source'].rpartition('/')[2]}": case for case in cases}


def test_a_published_step_is_predicted_as_the_record_says(fit: ModuleType, record: dict[str, dict[str, float]]) -> None:
    case = next(case for case in fit.CASES if case.model == "llama-3.2-3b")
    base, seconds = fit.scenario_of(case)
    predicted, efficiency = fit.overhead(case, base, seconds)
    written = next(one for one in record.values() if one["name"] == case.name)
    assert base.workload.tokens == written["tokens"]
    assert predicted == pytest.approx(written["predicted"], abs=2e-3)
    assert efficiency == pytest.approx(written["efficiency"], rel=1e-2)
