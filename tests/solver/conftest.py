"""The search in this process, so that parts of it can be left out and what remains must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from instances import search_here

from dmuon.solver import exact, planner

LeaveOut = Callable[..., None]


@pytest.fixture(scope="session", autouse=True)
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "run_search", search_here)
        yield


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> LeaveOut:
    """``leave_out(*names)``: of "proofs" and "finds" by patterns, and "search" (then LPT alone starts)."""

    def leave(*names: str) -> None:
        if "proofs" in names:
            monkeypatch.setattr(exact.PatternPool, "refute", lambda self, capacity: "unknown")
        if "finds" in names:
            monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: None)
        if "search" in names:
            monkeypatch.setattr(planner, "_starts", lambda p, bound: [("lpt", planner.longest_first(p))])
            monkeypatch.setattr(planner, "shorten", lambda problem, counts, bound: counts)
            monkeypatch.setattr(exact, "shorten", lambda problem, counts, bound: counts)

    return leave


@pytest.fixture
def patterns_only(leave_out: LeaveOut) -> None:
    """LPT alone starts, so that patterns must find what is shorter."""
    leave_out("search")
