"""Tables for people: columns of text, numbers with units, and rows that are told as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from dmuon.layout.topology import GlobalRank

_MOST_PARTS = 4  # of what a cell lists


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of columns; a column in which no row but the first has anything is left out."""
    cells = list(rows)
    kept = [i for i in range(len(cells[0])) if len(cells) == 1 or any(row[i] for row in cells[1:])]
    widths = [max(len(row[i]) for row in cells) for i in kept]
    lines = ("  ".join((row[i] or "-").ljust(width) for i, width in zip(kept, widths, strict=True)) for row in cells)
    return [f"  {line}".rstrip() for line in lines]


def pattern(name: str) -> str:
    """``name`` with ``*`` for each number that stands between dots, or for all of a number of a matrix."""
    return re.sub(r"(?<![^.\s])\d+(?![^.\s])", "*", name)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def size_text(nbytes: int | None) -> str:
    """Bytes in a unit that leaves some digits; empty for None."""
    if nbytes is None:
        return ""
    if nbytes < 2**10:
        return f"{nbytes} B"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes < 2**20 else mib(nbytes)


def time_text(ns: float | None) -> str:
    """Predicted time."""
    return "not predicted" if ns is None else f"{ns / 1e6:.3f} ms"


def ranks_text(owners: Iterable[GlobalRank | None]) -> str:
    """Who owns how many of several matrices; a rank alone is just itself."""
    counts = Counter(owner for owner in owners if owner is not None)
    if len(counts) < 2:
        return "".join(map(str, counts))
    by_count: dict[int, list[GlobalRank]] = {}
    for rank, count in sorted(counts.items()):
        by_count.setdefault(count, []).append(rank)
    parts = [f"{spans_text(ranks)}: {count} each" for count, ranks in sorted(by_count.items(), reverse=True)]
    return ", ".join(parts[:_MOST_PARTS]) + (", …" if parts[_MOST_PARTS:] else "")


def spans_text(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours as a span."""
    spans: list[list[int]] = [[numbers[0], numbers[0]]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return " ".join(parts[:_MOST_PARTS]) + (" …" if parts[_MOST_PARTS:] else "")
