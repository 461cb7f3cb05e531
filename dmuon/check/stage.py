"""What a section of the first run is given on each rank: where it runs, how long, and where its results go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from dmuon.check.ranks import Ranks
from dmuon.check.report import Board


@dataclass(frozen=True, slots=True)
class Launch:
    """The ranks of a section.

    Attributes:
        kind: type of their devices.
        devices: how many there are; rank ``r`` computes on number ``r % devices``.
        backend: of process groups.
        topologies: those that are tried on so many ranks.
        timeout: of collectives, in seconds.
    """

    kind: str
    devices: int
    world: int
    backend: str
    topologies: tuple[str, ...] = ()
    timeout: float = 60.0

    def __str__(self) -> str:
        shared = ", all on one GPU" if self.kind == "cuda" and self.world > self.devices > 0 else ""
        return f"{self.world} rank{'s' if self.world > 1 else ''} by {self.backend}{shared}"


@dataclass(frozen=True, slots=True)
class Result:
    """What one rank says of a section.

    Attributes:
        lines: of the report, as dictionaries; the same on all ranks.
        left_out: what did not fit the time; the same on all ranks.
        facts: that a section found beside its lines.
        tracebacks: of what was raised on this rank.
        ended: nothing was raised that ended it, and it came to its end.
    """

    lines: list[dict[str, Any]]
    left_out: list[str]
    facts: dict[str, Any]
    tracebacks: list[str]
    ended: bool


class Stage:
    """On one rank.

    Args:
        deadline: on the monotonic clock, after which nothing new begins.
        save: called with what there is so far.

    Attributes:
        facts: what a section found beside its lines.
        left_out: what did not fit the time.
    """

    def __init__(
        self, launch: Launch, ranks: Ranks, board: Board, deadline: float, save: Callable[[Result], None]
    ) -> None:
        self.launch = launch
        self.board = board
        self.facts: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._ranks = ranks
        self._deadline = deadline
        self._save = save
        self._begun: float | None = None
        self._longest = 0.0

    @property
    def device(self) -> torch.device:
        if self.launch.kind == "cpu":
            return torch.device("cpu")
        return torch.device(self.launch.kind, self._ranks.rank % max(1, self.launch.devices))

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.launch.timeout)

    @property
    def seconds(self) -> float:
        """What is left."""
        return max(0.0, self._deadline - time.monotonic())

    def fits(self, what: str) -> bool:
        """Whether ``what`` may begin, on all ranks: what came before it took less than what is left.

        What does not fit is listed. Collective over the ranks, by the store.
        """
        now = time.monotonic()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self.save()
        fitting: bool = self._ranks.gather(now + self._longest < self._deadline)[0]
        self._begun = time.monotonic() if fitting else None
        if not fitting:
            self.left_out.append(what)
        return fitting

    def gather(self, item: Any) -> list[Any]:
        """Every rank's ``item``, by the store."""
        return self._ranks.gather(item)

    def save(self, ended: bool = False) -> None:
        """Write what there is, so that a rank that dies loses nothing that came before."""
        lines = [asdict(line) for line in self.board.lines]
        self._save(Result(lines, list(self.left_out), self.facts, list(self.board.tracebacks), ended))
