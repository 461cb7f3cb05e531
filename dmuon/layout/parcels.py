"""Matrices that lie alike and have one owner: who sends what to the owner, and who gets what back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dmuon.layout.ranks import Position
from dmuon.layout.shards import Piece, ShardLayout

__all__ = ["Parcel", "gathers", "received_numel", "scatters"]


@dataclass(frozen=True)
class Parcel:
    """``count`` matrices that lie alike and have one owner.

    Attributes:
        layout: of one of them, ``(m, n)``.
        holders: positions in the domain of the layout's pieces.
        owner: position in the domain of the rank that orthogonalizes them.
    """

    count: int
    layout: ShardLayout
    holders: tuple[Position, ...]
    owner: Position

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.layout.shape)

    @cached_property
    def pieces(self) -> dict[Position, Piece]:
        """What each holder has of each matrix, by position in the domain."""
        return dict(zip(self.holders, self.layout.pieces, strict=True))

    @cached_property
    def senders(self) -> dict[Position, Piece]:
        """Positions from which the owner gets its copy, itself included, and what each has, by first index."""
        ordered = self.layout.order(self.holders.index(self.owner))
        return {self.holders[i]: self.layout.pieces[i] for i in ordered}

    @cached_property
    def receivers(self) -> dict[Position, Piece]:
        """Positions that want the update, the owner included, and which part each wants."""
        return {position: piece for position, piece in self.pieces.items() if piece.numel}

    @cached_property
    def packed_numel(self) -> int:
        """Elements that the owner sends: as many copies as there are elsewhere."""
        return self.count * sum(piece.numel for to, piece in self.receivers.items() if to != self.owner)


def gathers(parcels: Sequence[Parcel]) -> bool:
    """Whether anything has to travel before Newton-Schulz: not if every owner has all of what it owns."""
    return any(len(parcel.senders) > 1 or parcel.owner not in parcel.senders for parcel in parcels)


def scatters(parcels: Sequence[Parcel]) -> bool:
    """Whether anything has to travel after Newton-Schulz."""
    return any(len(parcel.receivers) > 1 or parcel.owner not in parcel.receivers for parcel in parcels)


def received_numel(parcels: Sequence[Parcel], position: Position) -> tuple[int, int]:
    """Elements that the rank at ``position`` gets from others before, and after Newton-Schulz."""
    before = after = 0
    for parcel in parcels:
        if position == parcel.owner:
            before += parcel.count * sum(p.numel for sender, p in parcel.senders.items() if sender != position)
        elif position in parcel.receivers:
            after += parcel.count * parcel.receivers[position].numel
    return before, after
