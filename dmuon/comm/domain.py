"""Ranks that hold matrices together: pieces travel to the rank that orthogonalizes a matrix, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    group = groups.keep(make_group(device.type, [members], "exchange", timeout))
    with named(f"first use of the process group of ranks {list(members)}"):
        connect(group, device, exchanges=True, gathers=True)
    destroy_released(group)
    rank = this_rank()
    monitor = Monitor(members, rank, default_store(), group.group_name, device=device, groups=groups)
    return Domain(members, position_in(members, rank), device, group, monitor, groups=groups)


class Redistribution:
    """Matrices on their way, in one direction or the other, by one uneven all-to-all.

    Each rank sends what it has to those who want it. Collective over the domain, in one order on all ranks.

    Args:
        tensors: by number of the route, ``(count, …)`` of what this rank has, in the dtype of ``like``.
        like: has the dtype and device of what travels, also where this rank has no part of anything.
        what: names the redistribution, the same on all ranks.

    Attributes:
        travels: anything goes from one rank to another.
    """

    def __init__(
        self, routes: Sequence[Route], tensors: Mapping[int, Tensor], domain: Domain, like: Tensor, what: str
    ) -> None:
        self._routes = routes
        self._position = domain.position
        self.like = like
        held = {i: tensors[i] for i, route in enumerate(routes) if domain.position in route.senders}
        self._kept = {i: tensor for i, tensor in held.items() if domain.position in routes[i].receivers}
        self._incoming = [0] * domain.world
        for route in routes:
            for sender, numel in route.numel_in(domain.position).items():
                self._incoming[sender] += numel
        self.travels = travels(routes)
        self._pending = self._start(held, domain, what) if self.travels else None

    def _start(self, tensors: Mapping[int, Tensor], domain: Domain, what: str) -> Pending:
        parts: list[list[Tensor]] = [[] for _ in domain.ranks]
        for i, tensor in tensors.items():
            route = self._routes[i]
            for receiver in route.receivers:
                if receiver != self._position:
                    piece = route.piece(self._position, receiver)
                    parts[receiver].append(_cut(tensor, route.senders[self._position], piece))
        packed = [part for of_rank in parts for part in of_rank]
        self._sent = self.like.new_empty(sum(part.numel() for part in packed))
        if packed:
            slots = self._sent.split([part.numel() for part in packed])
            torch._foreach_copy_([slot.view(part.shape) for slot, part in zip(slots, packed, strict=True)], packed)
        self._received = self.like.new_empty(sum(self._incoming))
        outgoing = [sum(part.numel() for part in of_rank) for of_rank in parts]
        received, sent, incoming = self._received, self._sent, self._incoming

        def launch() -> list[dist.Work | None]:
            return [dist.all_to_all_single(received, sent, incoming, outgoing, group=domain.group, async_op=True)]

        return domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> dict[int, Tensor]:
        """By number of the route, ``(count, …)`` of what this rank wanted; perhaps views of what it had."""
        arrived: Iterator[Tensor] = iter(())
        wanted_here = [i for i, route in enumerate(self._routes) if self._position in route.receivers]
        if self._pending is not None:
            self._pending.wait()
            arrived = iter(self._in_order_of_routes(wanted_here))
            del self._sent, self._received  # only now: the collective read and wrote them
        wanted: dict[int, Tensor] = {}
        for i in wanted_here:
            route = self._routes[i]
            parts: list[tuple[Piece, Tensor]] = []
            for sender in route.senders:
                piece = route.piece(sender, self._position)
                if sender == self._position:
                    part = _cut(self._kept[i], route.senders[sender], piece)
                else:
                    part = next(arrived).view((route.count, *piece.shape))
                parts.append((piece, part))
            wanted[i] = _assembled(route, route.receivers[self._position], parts, self.like)
        self._pending, self._kept = None, {}
        return wanted

    def _in_order_of_routes(self, wanted: Sequence[int]) -> list[Tensor]:
        """Of what was received, each part; they lie by sender, and of one sender in the order of the routes."""
        parts = [part for i in wanted for part in self._routes[i].numel_in(self._position).items()]
        by_sender = sorted(range(len(parts)), key=lambda number: parts[number][0])
        taken = self._received.split([parts[number][1] for number in by_sender])
        in_order: list[Tensor] = [self._received] * len(parts)
        for number, part in zip(by_sender, taken, strict=True):
            in_order[number] = part
        return in_order


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


def _assembled(route: Route, wanted: Piece, parts: Sequence[tuple[Piece, Tensor]], like: Tensor) -> Tensor:
    """``(count, …)`` of what is wanted, from parts of it."""
    if len(parts) == 1 and parts[0][0] == wanted:
        return parts[0][1]
    if not parts:
        return like.new_empty((route.count, *wanted.shape))
    dim = route.layout.split_dim
    if dim is not None:  # one kernel instead of one a piece
        return torch.cat([part for _, part in parts], dim + 1)
    whole = like.new_empty((route.count, *wanted.shape))
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
