"""The two numbers that a rank goes by; a type checker keeps them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

GlobalRank = NewType("GlobalRank", int)
"""A process among all of them, as ``torch.distributed.get_rank()`` counts."""

Position = NewType("Position", int)
"""A process among some ranks that are listed in ascending order: those of a group, a line, a domain or a plan."""


def positions(count: int) -> tuple[Position, ...]:
    """All positions among ``count`` ranks."""
    return tuple(map(Position, range(count)))


def position_in(ranks: Sequence[GlobalRank], rank: GlobalRank) -> Position:
    """Where ``rank`` stands in ``ranks``.

    Raises:
        ValueError: it is not one of them.
    """
    return Position(ranks.index(rank))
