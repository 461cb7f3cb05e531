"""Ranks that hold matrices together: pieces travel to the rank that orthogonalizes a matrix, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

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
    group = groups.keep(make_group(device, [members], "exchange", timeout))
    with named(f"first use of the process group of ranks {list(members)}"):
        connect(group, device, exchanges=True, gathers=True)
    destroy_released(group)
    rank = this_rank()
    monitor = Monitor(members, rank, default_store(), group.group_name, device=device, groups=groups)
    return Domain(members, position_in(members, rank), device, group, monitor, groups=groups)


class AllToAll:
    """What this rank sends and gets on some routes, by one uneven all-to-all; worked out once for any number of times.

    Parts lie in what is sent and received by rank, and of one rank in the order of the routes.

    Args:
        stacks: routes whose parts here are given as one tensor, one after the other, by the number of the first; by
            numbers of them. Each part stays as it is, and goes to or comes from another rank. Of what comes, neighbours
            of one stack are one tensor likewise, by the number of the first of them.

    Attributes:
        travels: anything goes from one rank to another.
        outgoing, incoming: elements to and from each rank.
        kept: numbers by which this rank gives what it wants something of itself.
    """

    def __init__(self, routes: Sequence[Route], domain: Domain, stacks: Iterable[Sequence[int]] = ()) -> None:
        here = domain.position
        self.domain = domain
        self.travels = travels(routes)
        rows: dict[int, tuple[int, int]] = {}  # by number of the route: of which stack, and where in it
        for stack in stacks:
            begin = 0
            for i in stack:
                rows[i] = stack[0], begin
                begin += routes[i].count
        self.kept = [i for i, route in enumerate(routes) if here in route.senders and here in route.receivers]
        self._plan_sends(routes, here, rows)
        self._plan_wants(routes, here, rows)

    def _plan_sends(self, routes: Sequence[Route], here: Position, rows: Mapping[int, tuple[int, int]]) -> None:
        self.outgoing = [0] * self.domain.world
        self._sends: list[_Send] = []
        sends = [(to, i) for i, r in enumerate(routes) if here in r.senders for to in r.receivers if to != here]
        for receiver, i in sorted(sends):
            own, piece, count = routes[i].senders[here], routes[i].piece(here, receiver), routes[i].count
            assert i not in rows or piece == own, "a stack travels as it is"
            self.outgoing[receiver] += count * piece.numel
            number, begin = rows.get(i, (i, 0))
            last = self._sends[-1] if self._sends else None
            if i in rows and last is not None and (last.number, last.end) == (number, begin):
                last.end += count
            else:
                self._sends.append(_Send(number, begin, begin + count, piece.numel, _cut_between(own, piece)))
        self._lengths = [(send.end - send.begin) * send.numel for send in self._sends]

    def _plan_wants(self, routes: Sequence[Route], here: Position, rows: Mapping[int, tuple[int, int]]) -> None:
        self.incoming = [0] * self.domain.world
        self._sections: list[int] = []  # lengths of what arrives
        wanted: dict[int, _Wanted] = {}
        gets: list[tuple[Position, int]] = []
        for i, route in enumerate(routes):
            if here not in route.receivers:
                continue
            assert i not in rows or here not in route.senders, "a part of a stack stays on no rank"
            gets += [(sender, i) for sender in route.senders if sender != here]
            if i not in rows:
                parts = {sender: _Part(route.piece(sender, here), route.count) for sender in route.senders}
                if here in parts:
                    parts[here].cut = _cut_between(route.senders[here], parts[here].piece)
                piece = route.receivers[here]
                is_one = [part.piece for part in parts.values()] == [piece]
                wanted[i] = _Wanted((route.count, *piece.shape), parts, is_one, route.layout.split_dim)
        run: _Part | None = None  # neighbours of one stack, perhaps of several senders
        follows: tuple[int, int] | None = None  # of which stack, and where in it, the next one would join the run
        for sender, i in sorted(gets):
            piece, count = routes[i].piece(sender, here), routes[i].count
            self.incoming[sender] += count * piece.numel
            if run is not None and rows.get(i) == follows:
                self._sections[-1] += count * piece.numel
                run.count += count
            else:
                run = _Part(piece, count) if i in rows else None
                if run is not None:
                    wanted[i] = _Wanted(piece.shape, {sender: run}, True, None)
                wanted[i].parts[sender].section = len(self._sections)
                self._sections.append(count * piece.numel)
            follows = (rows[i][0], rows[i][1] + count) if i in rows else None
        self._wanted = list(wanted.items())

    def pack(self, tensors: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """What this rank sends, one after the other, of the tensors that it has by number."""
        sent = like.new_empty(sum(self.outgoing))
        slots, parts = [], []
        for send, slot in zip(self._sends, sent.split(self._lengths), strict=True):
            tensor = tensors[send.number]
            if len(tensor) != send.end - send.begin:
                tensor = tensor[send.begin : send.end]
            parts.append(_cut(tensor, send.cut))
            slots.append(slot.view(parts[-1].shape))
        if parts:
            torch._foreach_copy_(slots, parts)
        return sent

    def unpack(self, received: Tensor | None, tensors: Mapping[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """What this rank wanted, by number; perhaps views of what it got or had."""
        sections = () if received is None else received.split(self._sections)
        found: dict[int, Tensor] = {}
        for number, wanted in self._wanted:
            parts: list[Tensor] = []
            for part in wanted.parts.values():
                if part.section is None:
                    parts.append(_cut(tensors[number], part.cut))
                else:
                    parts.append(sections[part.section].view(part.count, *part.shape))
            if wanted.is_one:
                found[number] = parts[0]
            elif parts and wanted.split_dim is not None:  # one kernel instead of one a piece
                found[number] = torch.cat(parts, wanted.split_dim + 1)
            else:
                found[number] = whole = like.new_empty(wanted.shape)
                for part, tensor in zip(wanted.parts.values(), parts, strict=True):
                    for block, of_whole in part.blocks:
                        whole[of_whole] = tensor[block]
        return found


_Block = tuple[tuple[slice, ...], tuple[slice, ...]]  # in a piece, and in the whole


@dataclass(slots=True)
class _Cut:
    """Part of each of some matrices: its shape, and its blocks, in itself and in the matrix."""

    shape: tuple[int, ...]
    blocks: list[_Block]


@dataclass(slots=True)
class _Send:
    """Matrices that are sent one after the other: rows of what this rank has by number, ``numel`` elements of each."""

    number: int
    begin: int
    end: int
    numel: int
    cut: _Cut | None


class _Part:
    """What one rank has of what this rank wants: a section of what arrives, or else cut from what is here."""

    def __init__(self, piece: Piece, count: int) -> None:
        self.piece, self.count, self.shape, self.blocks = piece, count, piece.shape, _blocks(piece)
        self.section: int | None = None
        self.cut: _Cut | None = None


@dataclass(slots=True)
class _Wanted:
    """Matrices of which this rank wants something, of ``shape`` together: made of parts by sender, or one of them."""

    shape: tuple[int, ...]
    parts: dict[Position, _Part]
    is_one: bool
    split_dim: int | None


def _cut_between(source: Piece, piece: Piece) -> _Cut | None:
    """What ``source`` has is the same, for which nothing is to do, or the whole."""
    if piece == source:
        return None
    return _Cut(piece.shape, _blocks(piece))


def _blocks(piece: Piece) -> list[_Block]:
    """Of every matrix."""
    return [((slice(None), *block), (slice(None), *of_whole)) for block, of_whole in piece.blocks()]


def _cut(tensor: Tensor, cut: _Cut | None) -> Tensor:
    """``(count, …)``. A view where it is one block."""
    if cut is None:
        return tensor
    if len(cut.blocks) == 1:
        view: Tensor = tensor[cut.blocks[0][1]]
        return view
    part = tensor.new_empty((len(tensor), *cut.shape))
    for block, of_whole in cut.blocks:
        part[block] = tensor[of_whole]
    return part


class Redistribution:
    """Matrices on their way, in one direction or the other.

    Each rank sends what it has to those who want it. Collective over the domain, in one order on all ranks.

    Args:
        tensors: by number, ``(count, …)`` of what this rank has, in the dtype of ``like``.
        like: has the dtype and device of what travels, also where this rank has no part of anything.
        what: names the redistribution, the same on all ranks.
    """

    def __init__(self, plan: AllToAll, tensors: Mapping[int, Tensor], like: Tensor, what: str) -> None:
        self._plan = plan
        self._like = like
        self._kept: dict[int, Tensor] = {}
        for number in plan.kept:
            self._kept[number] = tensors[number]
        self._pending: Pending | None = None
        if not plan.travels:
            return
        self._sent = sent = plan.pack(tensors, like)
        self._received = received = like.new_empty(sum(plan.incoming))
        incoming, outgoing, group = plan.incoming, plan.outgoing, plan.domain.group

        def launch() -> list[dist.Work | None]:
            return [dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True)]

        self._pending = plan.domain.monitor.start(plan.domain.lane, what, launch)

    def wait(self) -> dict[int, Tensor]:
        """By number, ``(count, …)`` of what this rank wanted; perhaps views of what it had."""
        received = None
        if self._pending is not None:
            self._pending.wait()
            received = self._received
            del self._sent, self._received  # only now: the collective read and wrote them
        wanted = self._plan.unpack(received, self._kept, self._like)
        self._pending, self._kept = None, {}
        return wanted


def redistribute_all(
    routes: Sequence[Route], tensors: Mapping[int, Tensor], domain: Domain, like: Tensor, what: str
) -> dict[int, Tensor]:
    """A :class:`Redistribution` from its start to its end. Collective over the domain."""
    return Redistribution(AllToAll(routes, domain), tensors, like.new_empty(0), what).wait()
