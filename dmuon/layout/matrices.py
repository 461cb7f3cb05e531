"""Where the matrices of a tensor lie, also where it is more than one: stacks, fused projections, kernels.

And matrices that lie alike and have one owner: who sends what to the owner, and who gets what back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, product
from math import prod
from typing import Literal

import torch
from torch import Tensor

from dmuon.layout.shards import Piece, Run, Runs, ShardLayout, cells, flat_piece, joined, within
from dmuon.layout.topology import Position, positions
from dmuon.model.matrix_spec import MatrixSpec

# -- matrices that lie alike, on their way ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """The way of ``count`` matrices that lie alike, from ranks that have parts of them to ranks that want parts.

    Each receiver gets what a sender has of what it wants.

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
        """What goes from one rank to another, which may be itself; perhaps nothing."""
        piece, wanted = self.senders[sender], self.receivers[receiver]
        if piece.covers(self.layout.shape):
            return wanted
        return piece if wanted.covers(self.layout.shape) else piece.meet(wanted)

    def place(self, piece: Piece, whole: Piece) -> Piece:
        """Where ``piece`` is in what a rank has or wants, ``whole``, whose index it gives."""
        if self.layout.flat and whole.covers(self.layout.shape):
            return piece  # of the matrix as one row
        return piece.seen_from(whole)

    @property
    def travels(self) -> bool:
        """Whether anything may go from one rank to another; the same on all ranks."""
        here = len(self.senders) == len(self.receivers) == 1 and self.senders.keys() == self.receivers.keys()
        return bool(self.senders) and not here

    def numel_out(self, position: Position) -> int:
        """Elements that the rank at ``position`` sends to others."""
        others = self.receivers.keys() - {position} if position in self.senders else ()
        return self.count * sum(self.piece(position, to).numel for to in others)

    def numel_in(self, position: Position) -> int:
        """Elements that the rank at ``position`` gets from others."""
        others = self.senders.keys() - {position} if position in self.receivers else ()
        return self.count * sum(self.piece(of, position).numel for of in others)


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
    def slices(self) -> dict[Position, Piece]:
        """A part of the long side for each holder, as it is orthogonalized by all of them together.

        It is out of what a rank has, wherever pieces cut nothing but the long side: then it is what the rank's copies
        leave it of that. Else all slices are of one length, but for a remainder.
        """
        dim = int(self.layout.shape[0] <= self.layout.shape[1])
        groups: Iterable[tuple[Sequence[Position], Run]] = [(self.holders, (0, self.layout.shape[dim]))]
        if self.slices_are_here:
            groups = [(line, self.pieces[line[0]].runs[dim][0]) for line in self.lines]
        found = dict.fromkeys(self.holders, self.part_of_long_side(0, 0))
        for members, (start, stop) in groups:
            found |= self.cut_among(members, start, stop)
        return found

    def cut_among(self, members: Sequence[Position], start: int = 0, stop: int | None = None) -> dict[Position, Piece]:
        """Equal slices of a range of the long side, but for a remainder; by default of all of it."""
        length = (max(self.layout.shape) if stop is None else stop) - start
        bounds = [start + length * i // len(members) for i in range(len(members) + 1)]
        return {m: self.part_of_long_side(*pair) for m, pair in zip(members, pairwise(bounds), strict=True)}

    def part_of_long_side(self, start: int, stop: int) -> Piece:
        """All of the short side, also where there is nothing of the long one: such slices add zeros to a sum."""
        dim, whole = int(self.layout.shape[0] <= self.layout.shape[1]), Piece.whole(self.layout.shape)
        return Piece(
            tuple(runs if d != dim else ((start, stop),) * (start < stop) for d, runs in enumerate(whole.runs))
        )

    @cached_property
    def slices_are_here(self) -> bool:
        """Whether each rank has its slice."""
        dim, cut = int(self.layout.shape[0] <= self.layout.shape[1]), self.layout.split_dim
        return dim == cut or all(piece.covers(self.layout.shape) for piece in self.parts.values())

    @cached_property
    def lines(self) -> tuple[tuple[Position, ...], ...]:
        """Holders of the same part, one of each copy; ascending."""
        alike: dict[Piece, list[Position]] = {}
        for position, piece in self.parts.items():
            alike.setdefault(piece, []).append(position)
        assert all(len(line) == self.copies for line in alike.values()), "copies that are cut in different ways"
        return tuple(sorted(map(tuple, alike.values())))

    def copy_with(self, holder: Position) -> dict[Position, Piece]:
        """The pieces of the copy that ``holder`` has part in."""
        return self._copies[self._copy_of[holder]]

    def holders_with(self, holder: Position) -> list[Position]:
        """All of the copy that ``holder`` has part in, also those with nothing of it."""
        return [other for other, copy in self._copy_of.items() if copy == self._copy_of[holder]]

    def source(self, holder: Position, owner: Position) -> Position:
        """Of the ranks that have the same part as ``holder``, the one of the copy that ``owner`` has part in."""
        return self._sources[self._copy_of[owner]][self.pieces[holder]]

    @cached_property
    def _copy_of(self) -> dict[Position, int]:
        return dict(zip(self.holders, self.layout.replicas, strict=True))

    @cached_property
    def _copies(self) -> dict[int, dict[Position, Piece]]:
        """By number, the pieces of each copy that are not empty."""
        copies: dict[int, dict[Position, Piece]] = {copy: {} for copy in self.layout.replicas}
        for holder, piece in self.parts.items():
            copies[self._copy_of[holder]][holder] = piece
        return copies

    @cached_property
    def _sources(self) -> dict[int, dict[Piece, Position]]:
        return {copy: {piece: holder for holder, piece in pieces.items()} for copy, pieces in self._copies.items()}


@lru_cache(maxsize=256)
def spread_over_all(layout: ShardLayout) -> Spread:
    """Of a matrix that all ranks of a domain hold."""
    return Spread(layout, positions(len(layout.pieces)))


Strategy = Literal["owner", "replicated", "sharded", "full_replication", "fused"]


def team_size(way: str) -> int:
    """Of ``"sharded:4"``, 4: so many ranks orthogonalize a matrix together, or all if they are fewer. Else 0."""
    name, _, number = way.partition(":")
    return int(number) if name == "sharded" and number.isdecimal() else 0


def ways_of(strategy: object) -> Mapping[str, str]:
    """Patterns of names and what they have, as a user gives them; a name alone is for all.

    Raises:
        TypeError: neither.
    """
    given = {"*": strategy} if isinstance(strategy, str) else strategy
    if not isinstance(given, Mapping) or not all(isinstance(one, str) for pair in given.items() for one in pair):
        raise TypeError(f"strategy must be a name, or a mapping of patterns of names to names, got {strategy!r}")
    return given


@dataclass(frozen=True)
class Parcel:
    """``count`` matrices that lie alike and are orthogonalized in one way.

    Attributes:
        spread: where each of them lies.
        owner: position in the domain of the rank that orthogonalizes them; where several do, of the first of them.
        strategy: ``"owner"``: that rank alone; ``"replicated"`` and ``"full_replication"``: each rank that has a part;
            ``"sharded"``: all of them together, each a slice; ``"fused"``: that one rank, later.
        team: positions of the ranks that have slices, where these are not all of the domain.
    """

    count: int
    spread: Spread
    owner: Position
    strategy: Strategy = "owner"
    team: tuple[Position, ...] = ()

    @property
    def way(self) -> str:
        """The strategy as a user says it."""
        return f"{self.strategy}:{len(self.team)}" if self.team else self.strategy

    def is_for(self, position: Position) -> bool:
        """Whether the rank at ``position`` orthogonalizes them, perhaps as others do."""
        return position == self.owner if self.has_owner else not self.team or position in self.team

    @property
    def has_owner(self) -> bool:
        """Whether one rank alone orthogonalizes them."""
        return self.strategy in ("owner", "fused")

    @property
    def numel(self) -> int:
        return self.count * prod(self.spread.layout.shape)

    @cached_property
    def to_owner(self) -> Route:
        """Before Newton–Schulz: the owner gets its own copy, from those that share it."""
        senders = self.spread.copy_with(self.owner)
        return self._route(senders, {self.owner: Piece.whole(self.spread.layout.shape)})

    @cached_property
    def from_owner(self) -> Route:
        """After Newton–Schulz: those that share the owner's copy get the update of their parts, and pass it on."""
        receivers = self.spread.copy_with(self.owner)
        return self._route({self.owner: Piece.whole(self.spread.layout.shape)}, receivers)

    def routes(self, position: Position) -> tuple[Route, Route]:
        """Before and after Newton–Schulz, what concerns the rank at ``position``; others may have routes of their own.

        With copies, ranks that all orthogonalize get what they want out of the copy that they have part in.
        """
        if self.has_owner:
            return self.to_owner, self.from_owner
        spread = self.spread
        if self.team:  # from the owner's copy alone, so that either route is the same on all ranks
            wanted = spread.cut_among(self.team)
            slices = {member: piece for member, piece in wanted.items() if piece.numel}
            return self._route(spread.copy_with(self.owner), wanted), self._route(slices, spread.parts)
        at = position if position in spread.pieces else self.owner
        copy = spread.copy_with(at)
        if self.strategy != "sharded":
            whole, piece = Piece.whole(self.spread.layout.shape), copy.get(position)
            own = ({}, {}) if piece is None else ({position: whole}, {position: piece})
            return self._route(copy, dict.fromkeys(copy, whole)), self._route(*own)
        slices = {holder: piece for holder, piece in spread.slices.items() if piece.numel}
        mine = {position: spread.slices.get(position, spread.part_of_long_side(0, 0))}
        if not spread.slices_are_here:
            of_copy = {h: slices[h] for h in spread.holders_with(at) if h in slices}
            return self._route(copy, of_copy | mine), self._route(slices, spread.parts)
        kept = {position: copy[position]} if position in copy else {}
        before = self._route(kept, mine)
        if spread.copies > 1:
            return before, self._route(slices, spread.parts)
        return before, self._route(mine if kept else {}, kept)

    def _route(self, senders: Mapping[Position, Piece], receivers: Mapping[Position, Piece]) -> Route:
        return Route(self.count, self.spread.layout, senders, receivers)


# -- matrices of a tensor ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """Some matrices of a local tensor, which lie alike: for each, the same rows or columns of a matrix of a stack.

    Attributes:
        stack: ``(e, m, n)``, the local tensor as a stack.
        span: which matrices of the stack.
        dim: of the stack, 1 or 2: along which ``runs`` go.
        runs: local indices.
        offset: in a flat local tensor, where the stack begins.
        row_offset: where it does in what has one number for each output.
        is_all: the tensor is one matrix, of which a flat shard is here.
    """

    stack: tuple[int, int, int]
    span: Run
    dim: int
    runs: Runs
    offset: int = 0
    row_offset: int = 0
    is_all: bool = False

    @property
    def count(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of what is here of each matrix."""
        length = sum(run[1] - run[0] for run in self.runs)
        return (length, self.stack[2]) if self.dim == 1 else (self.stack[1], length)

    @property
    def is_slice(self) -> bool:
        """Whether :meth:`take` gives a view of a contiguous tensor."""
        return not self.runs or _step(self.runs) is not None

    def part(self, begin: int, end: int) -> Region:
        """Matrices ``begin`` to ``end`` of these."""
        first, last = self.span
        return replace(self, span=(min(first + begin, last), min(first + end, last)))

    def take(self, local: Tensor) -> Tensor:
        """``(count, …)`` from a local tensor: a view of it where that is possible."""
        stack = self._stacked(local)[slice(*self.span)]
        step = _step(self.runs)
        if step is not None:
            last = self.runs[-1][1]
            return (
                stack[:, self.runs[0][0] : last : step] if self.dim == 1 else stack[..., self.runs[0][0] : last : step]
            )
        parts = [stack.narrow(self.dim, start, stop - start) for start, stop in self.runs]
        return torch.cat(parts, self.dim) if parts else stack.narrow(self.dim, 0, 0)

    def put(self, local: Tensor, matrices: Sequence[Tensor]) -> None:
        """Write ``matrices``, parts of what :meth:`take` gave, back to ``local``, if they are copies."""
        stack = self._stacked(local)
        is_view = stack.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        if is_view and self.is_slice:
            return
        for whole, matrix in zip(stack[slice(*self.span)].unbind(0), matrices, strict=True):
            begin = 0
            for start, stop in self.runs:
                part = matrix.narrow(self.dim - 1, begin, stop - start)
                whole.narrow(self.dim - 1, start, stop - start).copy_(part)
                begin += stop - start
        if not is_view:
            local.copy_(stack.view(local.shape))

    def _stacked(self, local: Tensor) -> Tensor:
        if local.ndim == 1:
            local = local[self.offset : self.offset + prod(self.stack)]
        return local.reshape(self.stack)  # a view, unless it is stored in another order


def _step(runs: Runs) -> int | None:
    """The step of a slice that takes the same; None if there is none."""
    if len(runs) == 1:
        return 1
    step = runs[1][0] - runs[0][0] if runs else 0
    alike = all(run == (runs[0][0] + i * step, runs[0][0] + i * step + 1) for i, run in enumerate(runs))
    return step if runs and alike else None


@dataclass(frozen=True, slots=True)
class Share:
    """Matrices of a tensor that the same ranks hold in the same way.

    Attributes:
        part: number of the part of each matrix of the stack.
        start, stop: which matrices of the stack.
        spread: of one part of one matrix; holders are ascending positions in the layout of the tensor.
        runs: by holder, its local indices along the dimension that parts cut.
    """

    part: int
    start: int
    stop: int
    spread: Spread
    runs: Mapping[Position, Runs]


def stack_shape(shape: Sequence[int], spec: MatrixSpec) -> tuple[int, int, int]:
    """``(e, m, n)`` of a part of a tensor, of any length along the dimensions that are cut."""
    return MatrixSpec(transposed=spec.transposed, flattened=spec.flattened).matrix_shape(shape)


def local_regions(shape: Sequence[int], spec: MatrixSpec) -> list[Region]:
    """Of a tensor of ``shape`` that one rank has whole, the region of each part."""
    stack = spec.matrix_shape(shape)
    return [Region(stack, (0, stack[0]), spec.dim, runs) for runs in spec.runs(stack[spec.dim])]


@lru_cache(maxsize=1024)
def shares(layout: ShardLayout, spec: MatrixSpec) -> tuple[Share, ...]:
    """All matrices of a tensor that lies as ``layout`` says, in the order of the stack, then of the parts.

    Raises:
        ValueError: the tensor has another shape than ``spec`` says, or is cut along a dimension of a kernel.
    """
    if layout.flat:
        return tuple(_flat_shares(layout, spec))
    stacked = _stacked(layout, spec)
    axis = spec.dim - 1
    result = []
    for (begin, end), holders, layout in cells(stacked):
        for part, runs in enumerate(spec.runs(stacked.shape[spec.dim])):
            cut = [within(piece.runs[axis], runs) for piece in layout.pieces]
            pieces = tuple(
                Piece((*piece.runs[:axis], of_part, *piece.runs[axis + 1 :]))
                for piece, (of_part, _) in zip(layout.pieces, cut, strict=True)
            )
            shape = list(layout.shape)
            shape[axis] = sum(stop - start for start, stop in runs)
            of_matrix = ShardLayout(tuple(shape), pieces, layout.replicas)
            local = {holder: runs for holder, (_, runs) in zip(holders, cut, strict=True)}
            result.append(Share(part, begin, end, Spread(of_matrix, holders), local))
    return tuple(result)


def _flat_shares(layout: ShardLayout, spec: MatrixSpec) -> Iterator[Share]:
    """Each matrix on its own. Ranks without an element of it hold it too, and may own it."""
    e, m, n = spec.matrix_shape(layout.shape)
    holders = positions(len(layout.pieces))
    for number, (part, runs) in product(range(e), enumerate(spec.runs((e, m, n)[spec.dim]))):
        length = sum(stop - start for start, stop in runs)
        if spec.transposed:
            rows = range(number * m * n, (number + 1) * m * n, n)
            shape, wanted = (m, length), joined((row + start, row + stop) for row in rows for start, stop in runs)
        else:
            first = number * m
            shape, wanted = (length, n), tuple(((first + start) * n, (first + stop) * n) for start, stop in runs)
        cut = [within(piece.runs[1], wanted) for piece in layout.pieces]
        pieces = tuple(flat_piece(of_matrix) for of_matrix, _ in cut)
        local = {holder: held for holder, (_, held) in zip(holders, cut, strict=True)}
        spread = Spread(ShardLayout(shape, pieces, layout.replicas, flat=True), holders)
        yield Share(part, number, number + 1, spread, local)


@lru_cache(maxsize=1024)
def numbered(layout: ShardLayout, spec: MatrixSpec, first: int = 0) -> tuple[tuple[Share, range], ...]:
    """:func:`shares`, and the numbers of the matrices of each among all matrices of the tensor.

    Args:
        first: number of the first matrix of the stack, of a part of one.
    """
    of_tensor = shares(layout, spec)
    parts = 1 + max((share.part for share in of_tensor), default=0)
    spans = [((first + one.start) * parts + one.part, (first + one.stop) * parts + one.part) for one in of_tensor]
    return tuple((one, range(start, stop, parts)) for one, (start, stop) in zip(of_tensor, spans, strict=True))


@lru_cache(maxsize=256)
def _stacked(layout: ShardLayout, spec: MatrixSpec) -> ShardLayout:
    """The same layout of the tensor as a stack ``(e, m, n)``."""
    shape = spec.matrix_shape(layout.shape)
    if len(layout.shape) == 3 and not spec.flattened:
        return layout
    pieces = []
    for piece in layout.pieces:
        runs = piece.runs
        if spec.flattened:
            inner = prod(layout.shape[2:])
            if Piece(runs[2:]) != Piece.whole(layout.shape[2:]) and piece.numel:
                raise ValueError(
                    f"a kernel of shape {layout.shape} is cut along one of the dimensions behind its second; shard it "
                    "along another"
                )
            # A rank with nothing of the dimensions behind has nothing of any row, whatever it has of the second.
            runs = (runs[0], tuple((start * inner, stop * inner) for start, stop in runs[1] if all(runs[2:])))
        pieces.append(Piece((((0, 1),), *runs)))
    return ShardLayout(shape, tuple(pieces), layout.replicas)
