"""Ranks that hold matrices together: pieces travel to the rank that orthogonalizes a matrix, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.agreement import Election, Verdict, Vote, destroy_released
from dmuon.comm.lifetime import Groups
from dmuon.comm.lines import Line
from dmuon.comm.monitor import Monitor, Pending
from dmuon.comm.process_groups import connect, make_group, named, this_rank
from dmuon.layout.parcels import Route, Spread, travels
from dmuon.layout.shards import Piece
from dmuon.layout.topology import GlobalRank, Position, Ranks, position_in
from dmuon.platform.streams import Stream
from dmuon.platform.torch_private import default_group_is_bound, default_store


@dataclass(slots=True, eq=False)
class Domain:
    """Ranks that hold matrices together.

    Attributes:
        ranks: ascending.
        position: of this rank.
        group: of dmuon's own.
        lane: of the monitor's journal; None where it is that of more ranks than these.
        groups: of this domain; None where they belong to more ranks than these.
        lines: by where matrices lie of which there are copies, the ranks that have the same parts as this one; None
            where it has none.
    """

    ranks: Ranks
    position: Position
    device: torch.device
    group: dist.ProcessGroup
    monitor: Monitor
    lane: str | None = "exchange"
    groups: Groups | None = None
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
    groups = Groups()
    group = groups.keep(make_group(device.type, [members], "exchange", timeout))
    with named(f"first use of the process group of ranks {list(members)}"):
        connect(group, device, exchanges=True, gathers=True)
    destroy_released(group)
    rank = this_rank()
    monitor = Monitor(members, rank, default_store(), group.group_name, device=device, groups=groups)
    return Domain(members, position_in(members, rank), device, group, monitor, groups=groups)


class Itinerary:
    """What this rank sends and gets on some routes; worked out once for any number of redistributions.

    Attributes:
        travels: anything goes from one rank to another.
        held: numbers of the routes of whose matrices this rank has parts.
        kept: those of them of which it wants something itself.
    """

    def __init__(self, routes: Sequence[Route], domain: Domain) -> None:
        here = domain.position
        self.travels = travels(routes)
        self.held = [i for i, route in enumerate(routes) if here in route.senders]
        self.kept = {i for i in self.held if here in routes[i].receivers}
        sends: list[tuple[Position, int, Piece | None, Piece, tuple[int, ...]]] = []
        self._wanted: list[_Wanted] = []
        gets: list[tuple[Position, int]] = []  # sender and elements, in the order of the routes
        for i, route in enumerate(routes):
            own = route.senders.get(here)
            for receiver in route.receivers if own is not None else ():
                if receiver != here and own is not None:
                    piece = route.piece(here, receiver)
                    shape = (route.count, *piece.shape)
                    sends.append((receiver, i, None if piece == own else own, piece, shape))
            if here in route.receivers:
                parts = []
                for sender, source in route.senders.items():
                    piece = route.piece(sender, here)
                    if sender != here:
                        gets.append((sender, route.count * piece.numel))
                    parts.append((piece, None if sender != here else source, (route.count, *piece.shape)))
                self._wanted.append(_Wanted(i, route, route.receivers[here], parts))
        sends.sort(key=lambda one: one[0])  # pieces lie by rank, and of one rank in the order of the routes
        self._sends = [(i, own, piece, shape) for _, i, own, piece, shape in sends]
        self._sizes = [prod(shape) for *_, shape in self._sends]
        self._outgoing = _by_rank((one[0] for one in sends), self._sizes)
        self._order = sorted(range(len(gets)), key=lambda number: gets[number][0])
        self._lengths = [gets[number][1] for number in self._order]
        self._incoming = _by_rank((gets[number][0] for number in self._order), self._lengths)

    def pack(self, tensors: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """What this rank sends, one after the other, of the tensors that it has by number of the route."""
        parts = [tensors[i] if own is None else _cut(tensors[i], own, piece) for i, own, piece, _ in self._sends]
        sent = like.new_empty(sum(self._sizes))
        if parts:
            slots = sent.split(self._sizes)
            shapes = (shape for *_, shape in self._sends)
            torch._foreach_copy_([slot.view(shape) for slot, shape in zip(slots, shapes, strict=True)], parts)
        return sent

    def outgoing(self, world: int) -> list[int]:
        """Elements that this rank sends to each one."""
        return _listed(self._outgoing, world)

    def incoming(self, world: int) -> list[int]:
        """Elements that this rank gets from each one."""
        return _listed(self._incoming, world)

    def unpack(self, received: Tensor | None, tensors: Mapping[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """What this rank wanted, by number of the route; perhaps views of what it got or had."""
        arrived: list[Tensor] = [like] * len(self._order)
        if received is not None:
            for number, part in zip(self._order, received.split(self._lengths), strict=True):
                arrived[number] = part
        coming = iter(arrived)
        found: dict[int, Tensor] = {}
        for wanted in self._wanted:
            parts = [
                (piece, next(coming).view(shape) if own is None else _cut(tensors[wanted.number], own, piece))
                for piece, own, shape in wanted.parts
            ]
            found[wanted.number] = parts[0][1] if wanted.is_one else _assembled(wanted, parts, like)
        return found


class _Wanted:
    """Matrices of which this rank wants something.

    Attributes:
        number: of the route.
        piece: what this rank wants of each.
        parts: what comes together to that: a piece, what this rank itself has of which it is cut (None: it comes from
            another rank), and the shape of it.
        is_one: nothing has to be put together.
    """

    def __init__(
        self,
        number: int,
        route: Route,
        piece: Piece,
        parts: Sequence[tuple[Piece, Piece | None, tuple[int, ...]]],
    ) -> None:
        self.number, self.piece, self.parts = number, piece, parts
        self.count, self.split_dim = route.count, route.layout.split_dim
        self.is_one = len(parts) == 1 and parts[0][0] == piece


def _by_rank(ranks: Iterable[Position], sizes: Sequence[int]) -> dict[int, int]:
    total: dict[int, int] = {}
    for rank, size in zip(ranks, sizes, strict=True):
        total[rank] = total.get(rank, 0) + size
    return total


def _listed(of_rank: Mapping[int, int], world: int) -> list[int]:
    """What ``of_rank`` has of each rank; 0 where it has nothing."""
    sizes = [0] * world
    for rank, size in of_rank.items():
        sizes[rank] = size
    return sizes


class Redistribution:
    """Matrices on their way, in one direction or the other, by one uneven all-to-all.

    Each rank sends what it has to those who want it. Collective over the domain, in one order on all ranks.

    Args:
        routes: or what was worked out of them.
        tensors: by number of the route, ``(count, …)`` of what this rank has, in the dtype of ``like``.
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
        held = {i: tensors[i] for i in self._itinerary.held}
        self._kept = {i: tensor for i, tensor in held.items() if i in self._itinerary.kept}
        self._pending = self._start(held, domain, what) if self.travels else None

    def _start(self, tensors: Mapping[int, Tensor], domain: Domain, what: str) -> Pending:
        self._sent = sent = self._itinerary.pack(tensors, self.like)
        outgoing, incoming = (numels(domain.world) for numels in (self._itinerary.outgoing, self._itinerary.incoming))
        self._received = received = self.like.new_empty(sum(incoming))

        def launch() -> list[dist.Work | None]:
            return [dist.all_to_all_single(received, sent, incoming, outgoing, group=domain.group, async_op=True)]

        return domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> dict[int, Tensor]:
        """By number of the route, ``(count, …)`` of what this rank wanted; perhaps views of what it had."""
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


def _assembled(wanted: _Wanted, parts: Sequence[tuple[Piece, Tensor]], like: Tensor) -> Tensor:
    """``(count, …)`` of what is wanted, from parts of it."""
    if parts and wanted.split_dim is not None:  # one kernel instead of one a piece
        return torch.cat([part for _, part in parts], wanted.split_dim + 1)
    whole = like.new_empty((wanted.count, *wanted.piece.shape))
    for piece, part in parts:
        for block, of_whole in piece.blocks():
            whole[_each(of_whole)].copy_(part[_each(block)])
    return whole


def _each(block: tuple[slice, ...]) -> tuple[slice, ...]:
    """Of every matrix of a stack."""
    return slice(None), *block


def _cut(tensor: Tensor, source: Piece, piece: Piece) -> Tensor:
    """``(count, …)`` of ``piece``, from what ``source`` has: the same, or the whole. A view where it is one block."""
    if piece == source:
        return tensor
    blocks = piece.blocks()
    if len(blocks) == 1:
        view: Tensor = tensor[_each(blocks[0][1])]
        return view
    part = tensor.new_empty((tensor.shape[0], *piece.shape))
    for block, of_whole in blocks:
        part[_each(block)].copy_(tensor[_each(of_whole)])
    return part
