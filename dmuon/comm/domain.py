"""Ranks that hold matrices together: pieces travel to the rank that orthogonalizes a matrix, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.agreement import Election, Verdict, Vote
from dmuon.comm.lines import Line
from dmuon.comm.monitor import Monitor, Pending
from dmuon.comm.process_groups import connect, make_group, named, this_rank
from dmuon.layout.parcels import Route, Spread, travels
from dmuon.layout.shards import Piece
from dmuon.layout.topology import GlobalRank, Position, Ranks, position_in
from dmuon.platform.streams import Stream
from dmuon.platform.torch_private import default_group_is_bound


@dataclass(slots=True, eq=False)
class Domain:
    """Ranks that hold matrices together.

    Attributes:
        ranks: ascending.
        position: of this rank.
        group: of dmuon's own.
        lane: of the monitor; None where that is of more ranks than these.
        lines: by where matrices lie of which there are copies, the ranks that have the same parts as this one; None
            where it has none.
    """

    ranks: Ranks
    position: Position
    device: torch.device
    group: dist.ProcessGroup
    monitor: Monitor
    lane: str | None = "exchange"
    lines: dict[Spread, Line | None] = field(default_factory=dict)
    _vote_stream: Stream | None = None

    @property
    def world(self) -> int:
        return len(self.ranks)

    def vote(self, vote: Vote) -> Verdict:
        """What all ranks say, which no rank's device has to compute first. Collective.

        Raises:
            CollectiveError: on all ranks, if they issued different collectives before.
        """
        if self._vote_stream is None:
            self._vote_stream = Stream(self.device, priority=-1)
        with self._vote_stream.alone():
            return Election(vote, self.group, self.monitor, self.device, "vote before step()").verdict()


def make_domain(ranks: Sequence[GlobalRank], device: torch.device, timeout: timedelta | None = None) -> Domain:
    """Connect ``ranks``. Collective over them, and over no others.

    Raises:
        ValueError: some of all ranks, and the default process group is bound to a device.
    """
    members = Ranks(sorted(ranks))
    if default_group_is_bound() and len(members) < dist.get_world_size():
        raise ValueError(
            f"ranks {list(members)} hold matrices together, and the default process group was bound to a device, which "
            "makes creating groups collective over all ranks; leave device_id out of init_process_group"
        )
    group = make_group(device, [members], "exchange", timeout)
    with named(f"first use of the process group of ranks {list(members)}"):
        connect(group, device, exchanges=True, gathers=True)
    rank = this_rank()
    return Domain(members, position_in(members, rank), device, group, Monitor(rank, group, device))


class Itinerary:
    """What this rank sends and gets on some routes; worked out once for any number of redistributions.

    Args:
        stacks: routes whose parts here are given as one tensor, one after the other, by the number of the first; by
            numbers of them. Each part stays as it is, and goes to or comes from another rank. Of what comes, neighbours
            of one stack are one tensor likewise, by the number of the first of them.

    Attributes:
        travels: anything goes from one rank to another.
        held: numbers by which this rank gives parts.
        kept: those of them of which it wants something itself.
        outgoing, incoming: elements that it sends to each rank and gets from each.
    """

    def __init__(self, routes: Sequence[Route], domain: Domain, stacks: Iterable[Sequence[int]] = ()) -> None:
        here = domain.position
        self.travels = travels(routes)
        rows: dict[int, tuple[int, int]] = {}  # by number of the route: of which stack, and where in it
        for stack in stacks:
            begin = 0
            for i in stack:
                rows[i] = stack[0], begin
                begin += routes[i].count
        held = [i for i, route in enumerate(routes) if here in route.senders]
        self.held = [*dict.fromkeys(rows[i][0] if i in rows else i for i in held)]
        self.kept = {i for i in self.held if here in routes[i].receivers}
        sends: list[tuple[Position, int, Piece, Piece]] = []
        gets: list[tuple[Position, int, Piece]] = []
        self._wanted: list[_Wanted] = []
        for i, route in enumerate(routes):
            own = route.senders.get(here)
            for receiver in route.receivers if own is not None else ():
                if receiver != here and own is not None:
                    sends.append((receiver, i, own, route.piece(here, receiver)))
                    assert i not in rows or route.piece(here, receiver) == own, "a stack travels as it is"
            if here in route.receivers:
                parts = [(sender, route.piece(sender, here)) for sender in route.senders]
                gets += [(sender, i, piece) for sender, piece in parts if sender != here]
                assert i not in rows or own is None, "a part of a stack stays on no rank"
                if i not in rows:
                    self._wanted.append(_Wanted(i, route, route.receivers[here], parts, here))
        # Pieces lie by rank, and of one rank in the order of the routes.
        sends.sort(key=lambda one: one[0])
        gets.sort(key=lambda one: one[0])
        sizes = [routes[i].count * piece.numel for _, i, _, piece in sends]
        self.outgoing = _by_rank(domain.world, (one[0] for one in sends), sizes)
        self._sends: list[_Send] = []
        for _, i, own, piece in sends:
            count, (number, begin) = routes[i].count, rows.get(i, (i, 0))
            last = self._sends[-1] if self._sends else None
            if i in rows and last is not None and (last.number, last.end) == (number, begin):
                last.end += count
            else:
                self._sends.append(_Send(number, begin, begin + count, _Cut.between(own, piece)))
        lengths = [routes[i].count * piece.numel for _, i, piece in gets]
        self.incoming = _by_rank(domain.world, (one[0] for one in gets), lengths)
        self._lengths: list[int] = []
        self._runs: list[_Run] = []
        arrives = {wanted.number: wanted for wanted in self._wanted}
        follows: tuple[int, int] | None = None  # of which stack, and where in it, the next one would join a run
        for (sender, i, piece), length in zip(gets, lengths, strict=True):
            if i in rows and rows[i] == follows:
                self._lengths[-1] += length
                self._runs[-1].count += routes[i].count
            else:
                if i in rows:
                    self._runs.append(_Run(i, len(self._lengths), routes[i].count, piece.shape))
                else:
                    arrives[i].sections[sender] = len(self._lengths)
                self._lengths.append(length)
            follows = (rows[i][0], rows[i][1] + routes[i].count) if i in rows else None

    def pack(self, tensors: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """What this rank sends, one after the other, of the tensors that it has by number."""
        parts = []
        for send in self._sends:
            held = tensors[send.number]
            if len(held) > send.end - send.begin:
                held = held[send.begin : send.end]
            parts.append(held if send.cut is None else send.cut.of(held))
        sent = like.new_empty(sum(self.outgoing))
        if parts:
            slots = sent.split([part.numel() for part in parts])
            torch._foreach_copy_([slot.view(part.shape) for slot, part in zip(slots, parts, strict=True)], parts)
        return sent

    def unpack(self, received: Tensor | None, tensors: Mapping[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """What this rank wanted, by number; perhaps views of what it got or had."""
        sections = () if received is None else received.split(self._lengths)
        found = {wanted.number: wanted.of(sections, tensors.get(wanted.number), like) for wanted in self._wanted}
        for run in self._runs:
            found[run.number] = sections[run.section].view(run.count, *run.shape)
        return found


@dataclass(slots=True)
class _Send:
    """Matrices that are sent one after the other: rows of what this rank has, of each the piece that goes out."""

    number: int
    begin: int
    end: int
    cut: _Cut | None


@dataclass(slots=True)
class _Run:
    """Matrices of a stack that arrive one after the other: of ``number`` and the routes that follow it there."""

    number: int
    section: int
    count: int
    shape: tuple[int, ...]


class _Wanted:
    """Matrices of which this rank wants something, ``piece`` of each.

    Attributes:
        number: of the route.
        sections: of what arrives, by sender.
    """

    def __init__(
        self, number: int, route: Route, piece: Piece, parts: Sequence[tuple[Position, Piece]], here: Position
    ) -> None:
        self.number, self.here = number, here
        self.sections: dict[Position, int] = {}
        self._shape = (route.count, *piece.shape)
        self._parts = [(sender, part, (route.count, *part.shape)) for sender, part in parts]
        self._split_dim = route.layout.split_dim
        self._is_one = len(parts) == 1 and parts[0][1] == piece
        own = next((part for sender, part in parts if sender == here), None)
        self._cut = None if own is None else _Cut.between(route.senders[here], own)

    def of(self, sections: Sequence[Tensor], tensor: Tensor | None, like: Tensor) -> Tensor:
        """``(count, …)``, of what arrived and of what this rank has, ``tensor``."""
        parts = []
        for sender, _, shape in self._parts:
            if sender == self.here:
                assert tensor is not None
                parts.append(tensor if self._cut is None else self._cut.of(tensor))
            else:
                parts.append(sections[self.sections[sender]].view(shape))
        if self._is_one:
            return parts[0]
        if parts and self._split_dim is not None:  # one kernel instead of one a piece
            return torch.cat(parts, self._split_dim + 1)
        whole = like.new_empty(self._shape)
        for (_, piece, _), part in zip(self._parts, parts, strict=True):
            for block, of_whole in piece.blocks():
                whole[_each(of_whole)].copy_(part[_each(block)])
        return whole


class _Cut:
    """``piece`` of each matrix, from the whole."""

    def __init__(self, piece: Piece) -> None:
        self._shape = piece.shape
        self._blocks = [(_each(block), _each(of_whole)) for block, of_whole in piece.blocks()]

    @classmethod
    def between(cls, source: Piece, piece: Piece) -> _Cut | None:
        """What ``source`` has is the same, for which nothing is to do, or the whole."""
        return None if piece == source else cls(piece)

    def of(self, tensor: Tensor) -> Tensor:
        """``(count, …)``. A view where it is one block."""
        if len(self._blocks) == 1:
            view: Tensor = tensor[self._blocks[0][1]]
            return view
        part = tensor.new_empty((len(tensor), *self._shape))
        for block, of_whole in self._blocks:
            part[block].copy_(tensor[of_whole])
        return part


def _by_rank(world: int, ranks: Iterable[Position], sizes: Sequence[int]) -> list[int]:
    """The sum of the sizes for each of ``world`` ranks."""
    total = [0] * world
    for rank, size in zip(ranks, sizes, strict=True):
        total[rank] += size
    return total


class Redistribution:
    """Matrices on their way, in one direction or the other, by one uneven all-to-all.

    Each rank sends what it has to those who want it. Collective over the domain, in one order on all ranks.

    Args:
        routes: or what was worked out of them.
        tensors: by number, ``(count, …)`` of what this rank has, in the dtype of ``like``.
        like: has the dtype and device of what travels, also where this rank has no part of anything.
        what: names the redistribution, the same on all ranks.

    Attributes:
        travels: anything goes from one rank to another.
    """

    def __init__(
        self,
        routes: Sequence[Route] | Itinerary,
        tensors: Mapping[int, Tensor],
        domain: Domain,
        like: Tensor,
        what: str,
    ) -> None:
        self._itinerary = routes if isinstance(routes, Itinerary) else Itinerary(routes, domain)
        self.like = like
        self.travels = self._itinerary.travels
        self._kept = {i: tensors[i] for i in self._itinerary.kept}
        self._pending: Pending | None = None
        if not self.travels:
            return
        outgoing, incoming = self._itinerary.outgoing, self._itinerary.incoming
        self._sent = sent = self._itinerary.pack(tensors, like)
        self._received = received = like.new_empty(sum(incoming))

        def launch() -> list[dist.Work | None]:
            return [dist.all_to_all_single(received, sent, incoming, outgoing, group=domain.group, async_op=True)]

        self._pending = domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> dict[int, Tensor]:
        """By number, ``(count, …)`` of what this rank wanted; perhaps views of what it had."""
        received = None
        if self._pending is not None:
            self._pending.wait()
            received = self._received
            del self._sent, self._received  # only now: the collective read and wrote them
        wanted = self._itinerary.unpack(received, self._kept, self.like)
        self._pending, self._kept = None, {}
        return wanted


def redistribute(route: Route, tensor: Tensor | None, domain: Domain, like: Tensor, what: str) -> Tensor | None:
    """Bring one matrix, of which this rank has ``tensor``, to those who want it. Collective over the domain.

    Returns:
        What this rank wanted, perhaps a view of ``tensor``; None if it wants nothing.
    """
    held = {} if tensor is None else {0: tensor[None]}
    wanted = redistribute_all([route], held, domain, like, what)
    return wanted[0][0] if wanted else None


def redistribute_all(
    routes: Sequence[Route], tensors: Mapping[int, Tensor], domain: Domain, like: Tensor, what: str
) -> dict[int, Tensor]:
    """A :class:`Redistribution` from its start to its end. Collective over the domain."""
    return Redistribution(routes, tensors, domain, like.new_empty(0), what).wait()


def _each(block: tuple[slice, ...]) -> tuple[slice, ...]:
    """Of every matrix of a stack."""
    return slice(None), *block
