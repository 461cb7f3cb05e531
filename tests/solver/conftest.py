"""Parts of the exact methods that can be left out, so that what remains must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from dmuon.solver import compact_milp, exact, planner
from dmuon.solver.milp_process import MilpProcess

LeaveOut = Callable[..., None]


class Kept(MilpProcess):
    """Ended at the end of all tests, or when it cannot go on: these plan by the hundreds, and a start takes 0.2 s."""

    kept: ClassVar[dict[str, Kept]] = {}

    @classmethod
    def get(cls, name: str, command: str) -> Kept:
        if name not in cls.kept:
            cls.kept[name] = cls(name, command)
        return cls.kept[name]

    def ask(self, *args: Any) -> None:
        try:
            super().ask(*args)
        except BaseException:
            Kept.kept = {name: each for name, each in Kept.kept.items() if each is not self}
            super().close()
            raise

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_milp, "MilpProcess", Kept.get)
        yield
    for process in Kept.kept.values():
        MilpProcess.close(process)


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> LeaveOut:
    """``leave_out(*names)``: of "proofs" and "finds" by patterns, "repacking", and "search" (then LPT alone starts)."""

    def leave(*names: str) -> None:
        if "proofs" in names:
            monkeypatch.setattr(exact.PatternPool, "refute", lambda self, capacity: "unknown")
        if "finds" in names:
            monkeypatch.setattr(exact.PatternPool, "assign", lambda self, capacity: None)
        if "repacking" in names:
            monkeypatch.setattr(exact, "_REPACK_FAILURES", 0)
        if "search" in names:
            monkeypatch.setattr(planner, "_starts", lambda p, bound: [("lpt", planner.longest_first(p))])
            monkeypatch.setattr(planner, "shorten", lambda problem, counts, bound: counts)
            monkeypatch.setattr(exact, "shorten", lambda problem, counts, bound: counts)

    return leave


@pytest.fixture
def compact_only(leave_out: LeaveOut) -> None:
    """Column generation proves and finds nothing, so that the compact MILP must."""
    leave_out("proofs", "finds", "repacking")
