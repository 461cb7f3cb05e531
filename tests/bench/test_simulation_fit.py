"""The fit of the simulation's terms: its record is what the code predicts, and its solver finds what was put in."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dmuon.simulation.terms import FITTED

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("common.fit")


@pytest.fixture
def record() -> dict[str, dict[str, float]]:
    cases = json.loads((BENCH / "results/simulation-fit.json").read_text())["cases"]
    return {f"{case['name']}, {case['program']}, {case['source'].rpartition('/')[2]}": case for case in cases}


def test_real_runs_are_predicted_as_the_record_says(fit: ModuleType, record: dict[str, dict[str, float]]) -> None:
    for found in fit.measured_here():
        written = record[f"{found.name}, {found.program}, {found.source.rpartition('/')[2]}"]
        assert found.published == pytest.approx(written["published"])
        assert found.predicted == pytest.approx(written["predicted"], abs=2e-3)
        assert found.error == pytest.approx(found.predicted - found.published)


@pytest.mark.slow
def test_a_published_step_is_predicted_as_the_record_says(fit: ModuleType, record: dict[str, dict[str, float]]) -> None:
    case = next(case for case in fit.CASES if case.grid["world"] == 8)
    base, seconds = fit.scenario_of(case)
    predicted, efficiency = fit.overhead(case, base, seconds, FITTED)
    written = next(one for one in record.values() if one["name"] == case.name)
    assert base.workload.tokens == written["tokens"]
    assert predicted == pytest.approx(written["predicted"], abs=2e-3)
    assert efficiency == pytest.approx(written["efficiency"], rel=1e-2)


def test_host_times_are_of_the_size_that_was_measured(fit: ModuleType) -> None:
    host = fit.fit_host()
    for name in ("host_module_s", "host_call_s", "host_exchanged_s"):  # of a machine that others use
        assert getattr(FITTED, name) / 4 < getattr(host, name) < getattr(FITTED, name) * 4


def test_least_squares_find_what_was_put_in(fit: ModuleType) -> None:
    table = np.random.default_rng(0).random((12, 3))
    assert fit._nonnegative(table, table @ [2.0, 0.0, 3.0]) == pytest.approx([2.0, 0.0, 3.0])
    assert fit._nonnegative(table, table @ [2.0, -1.0, 3.0])[1] == 0.0
