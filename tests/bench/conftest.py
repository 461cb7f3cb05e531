"""Programs of bench/ as modules."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from harness.commands import BENCH


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What a file of tests calls ``MODULE``."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(request.module.MODULE)
