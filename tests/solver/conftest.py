"""The search in this process, and a planner without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from instances import search_here

from dmuon.solver import exact, planner


@pytest.fixture(scope="session", autouse=True)
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "run_search", search_here)
        yield


@pytest.fixture
def lpt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """LPT alone starts, and nothing searches, so that patterns must find what is shorter."""
    monkeypatch.setattr(planner, "_starts", lambda p, bound: [("lpt", planner.longest_first(p))])
    monkeypatch.setattr(planner, "shorten", lambda problem, counts, bound: counts)
    monkeypatch.setattr(exact, "shorten", lambda problem, counts, bound: counts)
