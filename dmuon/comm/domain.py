"""Ranks that hold matrices together: pieces travel to the rank that orthogonalizes a matrix, and back, also to copies.

An all-to-all brings each owner the pieces of its matrices. Another one brings the updates back to the ranks of the copy
that the owner has part in: the owner sends each part once. From there it goes on to the ranks that hold the same part
in the other copies: they are a *line*.

[Note: an exchange and its memory]
Of two rounds, on a device; ``g`` gathers pieces, ``s`` scatters updates::

    computes         | pack g1 | pack g2 | NS 1, pack s1 | NS 2, pack s2 | apply 1 | apply 2
    of the back end  |         | g1      | g2            | s1            | s2      |

Whoever packs goes on at once: the back end's stream waits for the packing, not the reverse. What is sent and what is
received stays referenced by the ``Redistribution`` or ``Copying``, until ``wait`` has let the computing stream wait for
the collective; only what is queued behind that may get the memory. All collectives of a domain, votes and norms too, go
over one group and in one order, that of the rounds; those of lines and teams come in the same order, over groups of
their own. A rank that has nothing to send or to get takes part all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.monitor import Line, Monitor, Parts, Pending, Works, gather, scratch
from dmuon.comm.process_groups import connect, make_group, named, this_rank
from dmuon.layout.buffer import choose_transport, lay_spans
from dmuon.layout.matrices import Parcel, Route, Spread
from dmuon.layout.shards import Piece, split_dim
from dmuon.layout.topology import GlobalRank, Position, Ranks, position_in, positions
from dmuon.platform.streams import Stream
from dmuon.platform.torch_private import backend_of


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
        teams: by their size, the ranks that orthogonalize matrices together with this one.
        vote_stream: for votes, which nothing on the device has to come before.
    """

    ranks: Ranks
    position: Position
    device: torch.device
    group: dist.ProcessGroup
    monitor: Monitor
    lane: str | None = "exchange"
    lines: dict[Spread, Line | None] = field(default_factory=dict)
    teams: dict[int, Line] = field(default_factory=dict)
    vote_stream: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.vote_stream = Stream(self.device, priority=-1)

    @property
    def world(self) -> int:
        return len(self.ranks)


def make_domain(ranks: Sequence[GlobalRank], device: torch.device, timeout: timedelta | None = None) -> Domain:
    """Connect ``ranks``. Collective over them, and over no others."""
    members = Ranks(sorted(ranks))
    group = make_group(device, members, "exchange", timeout)
    with named(f"first use of the process group of ranks {list(members)}"):
        connect(group, device, exchanges=True, gathers=True)
    return Domain(members, position_in(members, this_rank()), device, group, Monitor(group, device))


class AllToAll:
    """What this rank sends and gets on some routes, by one uneven all-to-all; worked out once for any number of times.

    Parts lie in what is sent and received by rank, and of one rank in the order of the routes.

    Args:
        stacks: routes whose parts here are given as one tensor, one after the other, by the number of the first; by
            numbers of them. Each part stays as it is, and goes to or comes from another rank. Of what comes, neighbours
            of one stack are one tensor likewise, by the number of the first of them.

    Attributes:
        travels: anything goes from one rank to another.
        outgoing, incoming: elements to and from each rank, by position.
        sends, lengths: what is packed, in the order in which it lies, and elements of each.
        sections: elements of what arrives, from one rank after the other.
        wanted: what this rank wants, by number.
        kept: of what this rank gives what it wants something of itself, the number and what is cut from it.
    """

    def __init__(self, routes: Sequence[Route], domain: Domain, stacks: Iterable[Sequence[int]] = ()) -> None:
        here = domain.position
        self.domain = domain
        self.travels = any(route.travels for route in routes)
        rows: dict[int, tuple[int, int]] = {}  # by number of the route: of which stack, and where in it
        for stack in stacks:
            begin = 0
            for i in stack:
                rows[i] = stack[0], begin
                begin += routes[i].count
        self.kept: list[tuple[int, _Cut | None]] = []
        for i, route in enumerate(routes):
            if here in route.senders and here in route.receivers and (piece := route.piece(here, here)).numel:
                self.kept.append((i, _cut_between(route.senders[here], piece, route)))
        self._plan_sends(routes, here, rows)
        self._plan_wants(routes, here, rows)

    def _plan_sends(self, routes: Sequence[Route], here: Position, rows: Mapping[int, tuple[int, int]]) -> None:
        self.outgoing = [0] * self.domain.world
        self.sends: list[_Send] = []
        sends = [(to, i) for i, r in enumerate(routes) if here in r.senders for to in r.receivers if to != here]
        for receiver, i in sorted(sends):
            own, piece, count = routes[i].senders[here], routes[i].piece(here, receiver), routes[i].count
            if not piece.numel:
                continue
            assert i not in rows or piece == own, "a stack travels as it is"
            self.outgoing[receiver] += count * piece.numel
            number, begin = rows.get(i, (i, 0))
            last = self.sends[-1] if self.sends else None
            if i in rows and last is not None and (last.number, last.end) == (number, begin):
                last.end += count
            else:
                cut = _cut_between(own, piece, routes[i])
                self.sends.append(_Send(number, begin, begin + count, piece.numel, cut))
        self.lengths = [(send.end - send.begin) * send.numel for send in self.sends]

    def _plan_wants(self, routes: Sequence[Route], here: Position, rows: Mapping[int, tuple[int, int]]) -> None:
        self.incoming = [0] * self.domain.world
        self.sections: list[int] = []  # lengths of what arrives
        wanted: dict[int, _Wanted] = {}
        gets: list[tuple[Position, int]] = []
        for i, route in enumerate(routes):
            if here not in route.receivers:
                continue
            assert i not in rows or here not in route.senders, "a part of a stack stays on no rank"
            pieces = {sender: piece for sender in route.senders if (piece := route.piece(sender, here)).numel}
            gets += [(sender, i) for sender in pieces if sender != here]
            if i not in rows:
                want = route.receivers[here]
                places = {sender: route.place(piece, want) for sender, piece in pieces.items()}
                places = dict(sorted(places.items(), key=lambda item: [runs[0][0] for runs in item[1].runs]))
                parts = {sender: _Part(pieces[sender], place, route.count) for sender, place in places.items()}
                is_one = list(pieces.values()) == [want]
                # A flat layout is concatenated as one row.
                along = 1 if route.layout.flat else split_dim(want.shape, tuple(places.values()))
                wanted[i] = _Wanted((route.count, *want.shape), parts, is_one, along)
        run: _Part | None = None  # neighbours of one stack, perhaps of several senders
        follows: tuple[int, int] | None = None  # of which stack, and where in it, the next one would join the run
        for sender, i in sorted(gets):
            piece, count = routes[i].piece(sender, here), routes[i].count
            self.incoming[sender] += count * piece.numel
            if run is not None and rows.get(i) == follows:
                self.sections[-1] += count * piece.numel
                run.count += count
            else:
                run = _Part(piece, piece, count) if i in rows else None
                if run is not None:
                    wanted[i] = _Wanted(piece.shape, {sender: run}, True, None)
                wanted[i].parts[sender].section = len(self.sections)
                self.sections.append(count * piece.numel)
            follows = (rows[i][0], rows[i][1] + count) if i in rows else None
        self.wanted = list(wanted.items())


_Block = tuple[tuple[slice, ...], tuple[slice, ...]]  # in a piece, and in the whole


class _Cut:
    """Part of what a rank has of each of some matrices, or of each as one row: where it is one block, a view of it."""

    def __init__(self, piece: Piece, *, flat: bool) -> None:
        self.shape, self.blocks, self._flat = piece.shape, _blocks(piece), flat
        self.index = self.blocks[0][1] if len(self.blocks) == 1 else None

    def taken(self, tensor: Tensor) -> Tensor:
        """``(count, …)``."""
        if self._flat:
            tensor = tensor.reshape(len(tensor), 1, -1)
        if self.index is not None:
            return tensor[self.index]
        part = tensor.new_empty((len(tensor), *self.shape))
        for block, of_whole in self.blocks:
            part[block] = tensor[of_whole]
        return part


@dataclass(slots=True)
class _Send:
    """Matrices that are sent one after the other: rows of what this rank has by number, ``numel`` elements of each."""

    number: int
    begin: int
    end: int
    numel: int
    cut: _Cut | None


class _Part:
    """What one rank has of what this rank wants: a section of what arrives, or else what is kept.

    Args:
        place: the same by index in what this rank wants.
    """

    def __init__(self, piece: Piece, place: Piece, count: int) -> None:
        self.count, self.shape, self.blocks = count, piece.shape, _blocks(place)
        self.section: int | None = None


@dataclass(slots=True)
class _Wanted:
    """Matrices of which this rank wants something, of ``shape`` together: made of parts by sender, or one of them."""

    shape: tuple[int, ...]
    parts: dict[Position, _Part]
    is_one: bool
    split_dim: int | None


def _cut_between(source: Piece, piece: Piece, route: Route) -> _Cut | None:
    """Of what ``source`` has; where that is the same, nothing is to do."""
    return None if piece == source else _Cut(route.place(piece, source), flat=route.layout.flat)


def _blocks(piece: Piece) -> list[_Block]:
    """Of every matrix."""
    return [((slice(None), *block), (slice(None), *of_whole)) for block, of_whole in piece.blocks()]


class Redistribution:
    """Matrices on their way, in one direction or the other.

    Each rank sends what it has to those who want it. Collective over the domain, in one order on all ranks: [Note: an
    exchange and its memory]. What this rank keeps of its own travels nowhere, and is used as it is.

    Args:
        tensors: by number, ``(count, …)`` of what this rank has, in the dtype of ``like``.
        like: has the dtype and device of what travels, also where this rank has no part of anything.
        what: names the redistribution, the same on all ranks.
    """

    def __init__(self, plan: AllToAll, tensors: Mapping[int, Tensor], like: Tensor, what: str) -> None:
        self._plan = plan
        self._like = like
        self._kept: dict[int, Tensor] = {}
        for number, cut in plan.kept:
            self._kept[number] = tensors[number] if cut is None else cut.taken(tensors[number])
        self._pending: Pending | None = None
        if not plan.travels:
            return
        self._sent = like.new_empty(sum(plan.outgoing))
        slots, parts = [], []
        for send, slot in zip(plan.sends, self._sent.split(plan.lengths), strict=True):
            part, cut = tensors[send.number], send.cut
            if len(part) != send.end - send.begin:
                part = part[send.begin : send.end]
            if cut is not None:
                part = cut.taken(part)
            parts.append(part)
            slots.append(slot.view(part.shape))
        if parts:
            torch._foreach_copy_(slots, parts)
        self._received = like.new_empty(sum(plan.incoming))
        domain, sizes = plan.domain, (plan.incoming, plan.outgoing)
        exchange = dist.all_to_all_single
        launch = partial(exchange, self._received, self._sent, *sizes, group=domain.group, async_op=True)
        self._pending = domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> dict[int, Tensor]:
        """By number, ``(count, …)`` of what this rank wanted; perhaps views of what it had or got."""
        plan, kept = self._plan, self._kept
        sections: Sequence[Tensor] = ()
        if self._pending is not None:
            self._pending.wait()
            sections = self._received.split(plan.sections)
            del self._sent, self._received  # only now: the collective read and wrote them
        found: dict[int, Tensor] = {}
        for number, wanted in plan.wanted:
            parts: list[Tensor] = []
            for part in wanted.parts.values():
                if part.section is None:
                    parts.append(kept[number])
                else:
                    parts.append(sections[part.section].view(part.count, *part.shape))
            if wanted.is_one:
                found[number] = parts[0]
            elif parts and wanted.split_dim is not None:  # one kernel instead of one a piece
                found[number] = torch.cat(parts, wanted.split_dim + 1).view(wanted.shape)  # of flat parts, one row
            else:
                found[number] = whole = self._like.new_empty(wanted.shape)
                for part, tensor in zip(wanted.parts.values(), parts, strict=True):
                    for block, of_whole in part.blocks:
                        whole[of_whole] = tensor[block]
        self._pending, self._kept = None, {}
        return found


def redistribute_all(
    routes: Sequence[Route], tensors: Mapping[int, Tensor], domain: Domain, like: Tensor, what: str
) -> dict[int, Tensor]:
    """A :class:`Redistribution` from its start to its end. Collective over the domain."""
    return Redistribution(AllToAll(routes, domain), tensors, like.new_empty(0), what).wait()


# -- to other copies -------------------------------------------------------------------------------------------------


def connect_copies(domain: Domain, spreads: Iterable[Spread]) -> None:
    """Connect the lines of matrices that lie so. Collective over the domain, all ranks of which name the same ones.

    It need not be called for matrices without copies, or with full ones on all ranks, and does nothing for those that
    it was called for before.
    """
    by_lines: dict[tuple[tuple[Position, ...], ...], list[Spread]] = {}
    for spread in spreads:
        if 1 < spread.copies < domain.world and spread not in domain.lines:
            by_lines.setdefault(spread.lines, []).append(spread)
    known = {spread.lines: line for spread, line in domain.lines.items()}
    for lines, alike in sorted(by_lines.items()):
        line = known[lines] if lines in known else _connected(domain, lines)
        domain.lines |= dict.fromkeys(alike, line)


def connect_teams(domain: Domain, sizes: Iterable[int]) -> None:
    """Connect neighbours, so many in each team. Collective over the domain, all ranks of which name the same sizes.

    Sizes for which it was called before are connected. All teams of a size are, also of those that have nothing to do:
    so a rank has one group for each size, and makes it when the others of the team do.
    """
    everyone = positions(domain.world)
    for size in sorted({*sizes} - domain.teams.keys()):
        line = _connected(domain, [everyone[first : first + size] for first in range(0, domain.world, size)])
        assert line is not None, "each rank is in one team of a size"
        domain.teams[size] = line


def _connected(domain: Domain, lines: Sequence[tuple[Position, ...]]) -> Line | None:
    """The one of ``lines`` that this rank is on, if it is."""
    positions_here = next((line for line in lines if domain.position in line), None)
    if positions_here is None:
        return None
    own = Ranks(domain.ranks[position] for position in positions_here)
    known = next((line for line in domain.lines.values() if line is not None and line.ranks == own), None)
    if known is not None:
        return known
    group = make_group(domain.device, own, "copies", None)
    with named(f"first use of the process group of ranks {list(own)}"):
        connect(group, domain.device, gathers=True)
    return Line(own, Position(positions_here.index(domain.position)), group)


class Copies:
    """What goes on to other copies of batches that travel together; for any number of times.

    Args:
        parcels: of the batches, whose spreads :func:`connect_copies` was told of.

    Attributes:
        needed: some rank of the domain has something to send or to get.
        loads: of this rank, one for each line.
    """

    def __init__(self, parcels: Sequence[Parcel], domain: Domain) -> None:
        self.domain = domain
        self.needed = any(parcel.spread.copies > 1 for parcel in parcels)
        whole = Line(domain.ranks, domain.position, domain.group)
        found: dict[Line, dict[Position, dict[int, torch.Size]]] = {}
        for number, parcel in enumerate(parcels):
            spread, position = parcel.spread, domain.position
            if spread.copies == 1 or position not in spread.parts:
                continue
            line = domain.lines[spread] if spread.copies < domain.world else whole
            assert line is not None, "a rank with a part is on a line"
            source = position_in(line.ranks, domain.ranks[spread.source(position, parcel.owner)])
            shape = torch.Size((parcel.count, *spread.parts[position].shape))
            found.setdefault(line, {}).setdefault(source, {})[number] = shape
        lines = sorted(found, key=lambda line: line.ranks)
        self.loads = [_LineLoad(line, found[line], domain.device) for line in lines]


class _LineLoad:
    """What goes over one line, and from which of its ranks.

    Args:
        shapes: by position on the line of the rank that has them, and by number of the batch.

    Attributes:
        transport, spans: of the parts of all batches.
    """

    def __init__(self, line: Line, shapes: Mapping[Position, Mapping[int, torch.Size]], device: torch.device) -> None:
        self.line = line
        self.shapes = shapes
        sizes = {int(source): sum(shape.numel() for shape in some.values()) for source, some in shapes.items()}
        self.transport = choose_transport("auto", sizes, len(line.ranks), backend_of(line.group, device))
        self.spans = lay_spans(self.transport, sizes, len(line.ranks))

    def region(self, updates: dict[int, Tensor], like: Tensor) -> tuple[Tensor, Parts]:
        """Memory for all parts, of which this rank's own have their content; they are taken out of ``updates``."""
        region, parts = scratch(self.transport, self.spans, like.dtype, like.device)
        slots = self._slots(parts, self.line.position)
        if slots:
            torch._foreach_copy_([*slots.values()], [updates.pop(number) for number in slots])
        if self.transport == "single":  # checks of what is sent would take its padding for weights
            parts[self.line.position][sum(map(torch.numel, slots.values())) :].zero_()
        return region, parts

    def unpacked(self, parts: Parts) -> dict[int, Tensor]:
        """By number of the batch, what all of them have."""
        return {number: slot for source in self.shapes for number, slot in self._slots(parts, source).items()}

    def _slots(self, parts: Parts, source: Position) -> dict[int, Tensor]:
        slots: dict[int, Tensor] = {}
        begin = 0
        for number, shape in self.shapes.get(source, {}).items():
            slots[number] = parts[source][begin : begin + shape.numel()].view(shape)
            begin += shape.numel()
        return slots


class Copying:
    """Updates on their way to other copies. Collective over the domain, in one order on all ranks.

    Args:
        updates: by number of the batch, what this rank has got of its own copy; they are taken out.
        like: has the dtype and device of what travels.
        what: names it, the same on all ranks.
    """

    def __init__(self, copies: Copies, updates: dict[int, Tensor], like: Tensor, what: str) -> None:
        self._loads = copies.loads
        self._rest = updates  # of batches without copies
        self._packed = [load.region(updates, like) for load in self._loads]

        def launch() -> Works:
            pairs = zip(self._loads, self._packed, strict=True)
            return [
                work for load, (region, parts) in pairs for work in gather(load.transport, region, parts, load.line)
            ]

        domain = copies.domain
        self._pending = domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> dict[int, Tensor]:
        """By number of the batch, ``(count, …)`` of this rank's parts of all copies."""
        self._pending.wait()
        updates, self._rest = self._rest, {}
        for load, (_, parts) in zip(self._loads, self._packed, strict=True):
            updates |= load.unpacked(parts)
        self._packed = []
        return dict(sorted(updates.items()))
