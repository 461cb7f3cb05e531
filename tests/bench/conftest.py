"""Programs of bench/ as modules, and their ranks as those of the pool."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from harness.commands import BENCH, bench_worker
from harness.limits import PROGRAM_SECONDS
from harness.pool import RankPool


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What a file of tests calls ``MODULE``."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(request.module.MODULE)


@pytest.fixture
def run_in_pool(
    bench: ModuleType, ranks: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """``run_in_pool("step", *arguments)``: what ``bench/step.py`` prints, on ranks that need not be started."""
    harness = importlib.import_module("common.harness")

    def of_first_rank(world: int, worker: Callable[..., Any], *args: Any) -> Any:
        return json.loads(json.dumps(ranks(world, bench_worker, worker, *args, timeout=PROGRAM_SECONDS)[0]))

    def run(name: str, *arguments: object) -> str:
        program: Any = importlib.import_module(name)
        measure = getattr(program, "measure", None) or harness.on_ranks(program.worker)
        capsys.readouterr()
        assert harness.run(program.Settings, program.__doc__, measure, program.table, [*map(str, arguments)]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(harness, "run_ranks", of_first_rank)
    return run
