"""Lines of the report, judged over all ranks and printed by the first one as they come."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from dmuon.check.ranks import Ranks
from dmuon.comm.monitor import CollectiveError

Status = Literal["pass", "fail", "skip", "warn", "info"]


class Stopped(Exception):
    """A fault on some ranks only: they no longer run the same collectives, so nothing more can be checked."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one rank measured; it passes if ``value`` is at most ``limit``.

    Attributes:
        text: for people. That of the worst rank is printed.
        unit: how ``value`` is named when it is printed; empty where it is a count of what is wrong.
        same: must be equal on all ranks, besides.
    """

    check: str
    text: str
    value: float
    limit: float
    unit: str = ""
    same: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report; ``rank`` is the worst one."""

    status: Status
    check: str
    where: str
    text: str
    value: float | None = None
    limit: float | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.status:<6}{self.check:<13}{self.where:<38}{self.text}"


class Board:
    """Collects lines; every rank holds all of them, rank 0 prints.

    Args:
        seconds: for one check; then the process ends with exit status 1, whatever it waits for.

    Attributes:
        tracebacks: of what checks raised on this rank.
    """

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        self.ranks = ranks
        self.lines: list[Line] = []
        self.tracebacks: list[str] = []
        self._seconds = seconds

    @property
    def failed(self) -> int:
        """Lines that failed."""
        return sum(line.status == "fail" for line in self.lines)

    def say(self, status: Status, check: str, where: str, text: str, **numbers: Any) -> None:
        """Add a line; the same on all ranks."""
        self._add(Line(status, check, where, text, **numbers))

    def judge(self, check: str, where: str, work: Callable[[], list[Reading] | None]) -> bool:
        """Run ``work`` on every rank and add a line per reading, if it has any; a fault is a line named ``check``.

        Returns:
            Whether ``work`` ended without a fault, on all ranks.

        Raises:
            Stopped: not all ranks had the same fault, or a collective failed.
        """
        fault: str | None = None
        fatal = False
        readings: list[Reading] = []
        with self._time_limit(f"{check} {where}"):
            try:
                readings = work() or []
            except Exception as error:
                fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
                fatal = isinstance(error, (CollectiveError, dist.DistError))
                self.tracebacks.append(f"{check} {where}: {traceback.format_exc()}")
                print(f"dmuon-check: rank {self.ranks.rank}: {check} {where}: {fault}", file=sys.stderr, flush=True)
            everyone = self.ranks.gather((fault, fatal, readings))
        faults = {rank: text for rank, (text, _, _) in enumerate(everyone) if text is not None}
        if not faults:
            for same in zip(*(theirs for _, _, theirs in everyone), strict=True):
                self._add(_worst(same, where))
            return True
        rank, text = next(iter(faults.items()))
        many = f"{len(faults)} of {len(everyone)} ranks, first " if len(everyone) > 1 else ""
        self.say("fail", check, where, f"{many}rank {rank}: {text}", rank=rank)
        kinds = {re.sub(r"\d+", "", said) for said in faults.values()}
        if len(faults) < len(everyone) or len(kinds) > 1 or any(hopeless for _, hopeless, _ in everyone):
            raise Stopped(f"{check} {where}")
        return False

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        if self.ranks.rank == 0:
            print(line, flush=True)

    @contextmanager
    def _time_limit(self, doing: str) -> Iterator[None]:
        timer = threading.Timer(self._seconds, _give_up, (self.ranks.rank, doing, self._seconds))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _worst(readings: tuple[Reading, ...], where: str) -> Line:
    """One line of the same reading on every rank: NaN is worst, then what exceeds its limit most."""
    others = [rank for rank, reading in enumerate(readings) if reading.same != readings[0].same]
    if others:
        text = f"{readings[0].text}: rank {others[0]} has others than rank 0 ({len(others)} ranks in all)"
        return Line("fail", readings[0].check, where, text, len(others), 0.0, others[0])
    rank = max(range(len(readings)), key=lambda r: _excess(readings[r]))
    worst = readings[rank]
    passed = worst.value <= worst.limit
    text = worst.text
    if worst.unit:
        text += f"; {worst.unit} {worst.value:.2g} (limit {worst.limit:.2g})"
    if not passed:
        text += f", on rank {rank}"
    return Line("pass" if passed else "fail", worst.check, where, text, worst.value, worst.limit, rank)


def _excess(reading: Reading) -> float:
    excess = reading.value - reading.limit
    return excess if excess == excess else float("inf")


def _give_up(rank: int, doing: str, seconds: float) -> None:
    print(f"dmuon-check: rank {rank}: {doing}: no end within {seconds:g} s", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(1)
