"""Matrices that lie alike and have one owner: who sends what to the owner, and who gets what back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from dmuon.layout.shards import Piece, ShardLayout
from dmuon.layout.topology import Position


@dataclass(frozen=True, slots=True)
class Route:
    """The way of ``count`` matrices that lie alike, from ranks that have parts of them to ranks that want parts.

    Either one rank wants the matrices whole, or one rank has them whole.

    Attributes:
        layout: of one matrix, ``(m, n)``.
        senders: by position in the domain, what each has of each matrix; a whole is gathered in this order.
        receivers: by position in the domain, what each wants.
    """

    count: int
    layout: ShardLayout
    senders: Mapping[Position, Piece]
    receivers: Mapping[Position, Piece]

    def piece(self, sender: Position, receiver: Position) -> Piece:
        """What goes from one rank to another, which may be itself."""
        piece = self.senders[sender]
        return self.receivers[receiver] if piece.covers(self.layout.shape) else piece

    def numel_out(self, position: Position) -> dict[Position, int]:
        """Elements that the rank at ``position`` sends to each other one."""
        if position not in self.senders:
            return {}
        return {to: self._numel(position, to) for to in self.receivers if to != position}

    def numel_in(self, position: Position) -> dict[Position, int]:
        """Elements that the rank at ``position`` gets from each other one."""
        if position not in self.receivers:
            return {}
        return {of: self._numel(of, position) for of in self.senders if of != position}

    def _numel(self, sender: Position, receiver: Position) -> int:
        return self.count * self.piece(sender, receiver).numel


def travels(routes: Iterable[Route]) -> bool:
    """Whether anything has to go from one rank to another."""
    return any(len(route.senders.keys() | route.receivers.keys()) > 1 for route in routes)


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
    def to_owner(self) -> Route:
        """Before Newton–Schulz: the owner gets its own copy, from those that share it, by first index."""
        ordered = self.layout.order(self.holders.index(self.owner))
        senders = {self.holders[i]: self.layout.pieces[i] for i in ordered}
        return Route(self.count, self.layout, senders, {self.owner: Piece.whole(self.layout.shape)})

    @cached_property
    def from_owner(self) -> Route:
        """After Newton–Schulz: all that hold a part, of whatever copy, get the update of it."""
        receivers = {position: piece for position, piece in self.pieces.items() if piece.numel}
        return Route(self.count, self.layout, {self.owner: Piece.whole(self.layout.shape)}, receivers)
