"""The collectives that a rank has started, one list per lane, and where two ranks' lists first differ."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dmuon.layout.ranks import GlobalRank

__all__ = ["Lane", "Report", "first_beyond", "numbered"]

_REMEMBERED = 512  # collectives per lane


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others when something failed.

    Attributes:
        message: what failed, and where.
        arrival: how many ranks had reported before.
        journal: by lane, how many collectives were started, and the last ones.
    """

    rank: GlobalRank
    message: str
    arrival: int
    journal: dict[str, tuple[int, list[str]]]


class Lane:
    """Collectives that come in the same order on all ranks."""

    def __init__(self) -> None:
        self.digest = 0
        self.count = 0
        self.recent: deque[str] = deque(maxlen=_REMEMBERED)

    def note(self, what: str) -> None:
        self.digest = zlib.crc32(what.encode() + b"\n", self.digest)
        self.count += 1
        self.recent.append(what)


def first_beyond(
    journal: Mapping[str, tuple[int, list[str]]], other: Mapping[str, tuple[int, list[str]]]
) -> str | None:
    """The first collective of ``journal`` that ``other`` has not come to, of the last lane where there is one."""
    for name in sorted(journal, reverse=True):  # a step of the optimizer says most
        entries, count = numbered(journal[name]), other.get(name, (0, []))[0]
        if count in entries:
            return entries[count]
    return None


def numbered(lane: tuple[int, list[str]] | None) -> dict[int, str]:
    """The remembered collectives of a lane by their position since the beginning."""
    if lane is None:
        return {}
    count, recent = lane
    return {count - len(recent) + i: what for i, what in enumerate(recent)}
