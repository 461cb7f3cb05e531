"""Matrices that lie alike and have one owner: who sends what to the owner, and who gets what back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dmuon.layout.shards import Piece, ShardLayout
from dmuon.layout.topology import Position, positions


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
    return any(
        len(route.senders) > 1 or len(route.receivers) > 1 or route.senders.keys() != route.receivers.keys()
        for route in routes
    )


@dataclass(frozen=True)
class Spread:
    """Where the pieces of one matrix lie in a domain; what all matrices that lie alike have in common.

    Attributes:
        layout: of the matrix, ``(m, n)``.
        holders: positions in the domain of the layout's pieces.
    """

    layout: ShardLayout
    holders: tuple[Position, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.holders))

    @cached_property
    def pieces(self) -> dict[Position, Piece]:
        """What each holder has, by position in the domain."""
        return dict(zip(self.holders, self.layout.pieces, strict=True))

    @cached_property
    def parts(self) -> dict[Position, Piece]:
        """The pieces that are not empty."""
        return {position: piece for position, piece in self.pieces.items() if piece.numel}

    @cached_property
    def copies(self) -> int:
        """How many ranks have each part."""
        return len(set(self.layout.replicas))

    @cached_property
    def lines(self) -> tuple[tuple[Position, ...], ...]:
        """Holders of the same part, one of each copy; ascending."""
        alike: dict[Piece, list[Position]] = {}
        for position, piece in self.parts.items():
            alike.setdefault(piece, []).append(position)
        assert all(len(line) == self.copies for line in alike.values()), "copies that are cut in different ways"
        return tuple(sorted(map(tuple, alike.values())))

    def copy_with(self, holder: Position) -> dict[Position, Piece]:
        """The pieces of the copy that ``holder`` has part in, by first index."""
        at = self._index[holder]
        copy = self.layout.replicas[at]
        if copy not in self._copies:
            self._copies[copy] = {self.holders[i]: self.layout.pieces[i] for i in self.layout.order(at)}
        return self._copies[copy]

    def source(self, holder: Position, owner: Position) -> Position:
        """Of the ranks that have the same part as ``holder``, the one of the copy that ``owner`` has part in."""
        copy = self.layout.replicas[self._index[owner]]
        if copy not in self._sources:
            self._sources[copy] = {piece: position for position, piece in self.copy_with(owner).items()}
        return self._sources[copy][self.pieces[holder]]

    @cached_property
    def _index(self) -> dict[Position, int]:
        return {holder: index for index, holder in enumerate(self.holders)}

    @cached_property
    def _copies(self) -> dict[int, dict[Position, Piece]]:
        return {}

    @cached_property
    def _sources(self) -> dict[int, dict[Piece, Position]]:
        return {}


@lru_cache(maxsize=256)
def spread_over_all(layout: ShardLayout) -> Spread:
    """Of a matrix that all ranks of a domain hold."""
    return Spread(layout, positions(len(layout.pieces)))


@dataclass(frozen=True)
class Parcel:
    """``count`` matrices that lie alike and have one owner.

    Attributes:
        spread: where each of them lies.
        owner: position in the domain of the rank that orthogonalizes them.
    """

    count: int
    spread: Spread
    owner: Position

    @property
    def layout(self) -> ShardLayout:
        """Of one of them, ``(m, n)``."""
        return self.spread.layout

    @property
    def holders(self) -> tuple[Position, ...]:
        """Positions in the domain of the layout's pieces."""
        return self.spread.holders

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.layout.shape)

    @property
    def pieces(self) -> dict[Position, Piece]:
        """What each holder has of each matrix, by position in the domain."""
        return self.spread.pieces

    @cached_property
    def to_owner(self) -> Route:
        """Before Newton–Schulz: the owner gets its own copy, from those that share it, by first index."""
        senders = self.spread.copy_with(self.owner)
        return Route(self.count, self.layout, senders, {self.owner: Piece.whole(self.layout.shape)})

    @cached_property
    def from_owner(self) -> Route:
        """After Newton–Schulz: those that share the owner's copy get the update of their parts, and pass it on."""
        receivers = self.spread.copy_with(self.owner)
        return Route(self.count, self.layout, {self.owner: Piece.whole(self.layout.shape)}, receivers)
