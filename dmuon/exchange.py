"""Matrices that lie on several ranks: their pieces travel to the rank that orthogonalizes them, and back."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon._torch import default_group_is_bound, default_store
from dmuon.comm import Comm, make_group
from dmuon.comm_options import CommOptions
from dmuon.device import Aside
from dmuon.monitor import Monitor, Pending
from dmuon.shard_layout import Piece, ShardLayout

__all__ = [
    "Domain",
    "Gathering",
    "Parcel",
    "Scattering",
    "gathers",
    "link_ns_per_byte",
    "make_domain",
    "received_numel",
    "scatters",
    "start_gather",
    "start_scatter",
    "tensor_domain",
]

_PROBE_BYTES = 2**20
_PROBE_BYTES_PER_RANK = 2**16  # with less, latency would count as cost of bytes
_PROBES = 3


@dataclass(slots=True, eq=False)
class Domain:
    """Ranks that hold matrices together.

    Attributes:
        ranks: global, ascending.
        rank: position of this process.
        group: of dmuon's own.
        chunks: ``(small side, large side)`` to matrices per batch, as planned.
        lane: of the monitor's journal; None where it is that of more ranks than these.
        variants: ``(small side, large side)`` to batch size to how Newton–Schulz runs, as planned.
    """

    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    group: dist.ProcessGroup
    monitor: Monitor
    chunks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    variants: Mapping[tuple[int, int], Mapping[int, str]] = field(default_factory=dict)
    lane: str | None = "exchange"
    _aside: Aside | None = None

    @property
    def world(self) -> int:
        return len(self.ranks)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum over the ranks, of numbers that no rank's device has to compute first. Collective."""
        if self._aside is None:
            self._aside = Aside(self.device)
        with self._aside.beside_nothing(), self.monitor.watch("vote before step()"):
            votes = torch.tensor(values, dtype=torch.int64, device=self.device)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
            found: list[int] = votes.tolist()
        return found


def make_domain(ranks: Sequence[int], device: torch.device, options: CommOptions | None = None) -> Domain:
    """Connect ``ranks``. Collective over them, and over no others.

    Raises:
        ValueError: some of all ranks, and the default process group is bound to a device.
    """
    options = options or CommOptions()
    members = tuple(sorted(ranks))
    if default_group_is_bound() and len(members) < dist.get_world_size():
        raise ValueError(
            f"ranks {list(members)} hold matrices together, and the default process group was bound to a device, which "
            "makes creating groups collective over all ranks; leave device_id out of init_process_group"
        )
    group = make_group(device.type, [members], "exchange", options)
    rank = dist.get_rank()
    monitor = Monitor(
        members, rank, default_store(), group.group_name, device=device, asynchronous=options.asynchronous
    )
    return Domain(members, members.index(rank), device, group, monitor)


def tensor_domain(comm: Comm) -> Domain | None:
    """The tensor-parallel ranks at this rank's data-parallel coordinate; None without tensor parallelism."""
    if comm.tensor is None:
        return None
    ranks = tuple(comm.topology.rank_at(comm.at.r, comm.at.s, t) for t in range(comm.topology.tensor))
    return Domain(ranks, comm.at.t, comm.device, comm.tensor, comm.monitor, lane=None)


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
    holders: tuple[int, ...]
    owner: int

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.layout.shape)

    @cached_property
    def pieces(self) -> dict[int, Piece]:
        """What each holder has of each matrix, by position in the domain."""
        return dict(zip(self.holders, self.layout.pieces, strict=True))

    @cached_property
    def senders(self) -> dict[int, Piece]:
        """Positions from which the owner gets its copy, itself included, and what each has, by first index."""
        ordered = self.layout.order(self.holders.index(self.owner))
        return {self.holders[i]: self.layout.pieces[i] for i in ordered}

    @cached_property
    def receivers(self) -> dict[int, Piece]:
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


def received_numel(parcels: Sequence[Parcel], position: int) -> tuple[int, int]:
    """Elements that the rank at ``position`` gets from others before, and after Newton-Schulz."""
    before = after = 0
    for parcel in parcels:
        if position == parcel.owner:
            before += parcel.count * sum(p.numel for sender, p in parcel.senders.items() if sender != position)
        elif position in parcel.receivers:
            after += parcel.count * parcel.receivers[position].numel
    return before, after


class Gathering:
    """Whole matrices on their way to their owners."""

    def __init__(
        self, parts: Sequence[Tensor | None], parcels: Sequence[Parcel], domain: Domain, flight: _Flight | None
    ) -> None:
        self._parts = list(parts)
        self._parcels = parcels
        self._domain = domain
        self._flight = flight

    def wait(self) -> dict[int, Tensor]:
        """By position among the parcels, ``(count, m, n)`` of those that this rank owns."""
        here = self._domain.rank
        arrived = None if self._flight is None else self._flight.wait()
        whole: dict[int, Tensor] = {}
        for i, parcel in enumerate(self._parcels):
            if parcel.owner != here:
                continue
            pieces: list[tuple[Piece, Tensor]] = []
            for sender, piece in parcel.senders.items():
                part = self._parts[i] if sender == here else None
                if part is None:
                    assert arrived is not None
                    part = arrived.take(sender, (parcel.count, *piece.shape))
                pieces.append((piece, part))
            whole[i] = _assembled(parcel, pieces)
        self._flight, self._parts = None, []
        return whole


class Scattering:
    """Updates on their way from their owners."""

    def __init__(
        self, whole: Mapping[int, Tensor], parcels: Sequence[Parcel], domain: Domain, flight: _Flight | None
    ) -> None:
        self._whole = dict(whole)
        self._parcels = parcels
        self._domain = domain
        self._flight = flight

    def wait(self) -> list[Tensor | None]:
        """This rank's part ``(count, …)`` of each parcel, None where it holds nothing."""
        here = self._domain.rank
        arrived = None if self._flight is None else self._flight.wait()
        parts: list[Tensor | None] = []
        for i, parcel in enumerate(self._parcels):
            piece = parcel.receivers.get(here)
            if piece is None:
                parts.append(None)
            elif parcel.owner == here:
                parts.append(_cut(self._whole[i], piece))
            else:
                assert arrived is not None
                parts.append(arrived.take(parcel.owner, (parcel.count, *piece.shape)))
        self._flight, self._whole = None, {}
        return parts


def start_gather(
    parts: Sequence[Tensor | None], parcels: Sequence[Parcel], domain: Domain, like: Tensor, what: str
) -> Gathering:
    """Send this rank's part of every parcel to its owner. Collective over the domain, in one order on all ranks.

    Args:
        parts: ``(count, …)`` of each parcel, in the dtype of ``like``; None where this rank holds nothing.
        like: has the dtype and device of what travels, also where this rank has no part of anything.
    """
    if not gathers(parcels):
        return Gathering(parts, parcels, domain, None)
    here = domain.rank
    outgoing: list[list[Tensor]] = [[] for _ in domain.ranks]
    incoming = [0] * domain.world
    for part, parcel in zip(parts, parcels, strict=True):
        if parcel.owner == here:
            for sender, piece in parcel.senders.items():
                if sender != here:
                    incoming[sender] += parcel.count * piece.numel
        elif part is not None and here in parcel.senders:
            outgoing[parcel.owner].append(part)
    flight = _Flight(outgoing, incoming, like, domain, f"gather of {what}")
    mine = [part if parcel.owner == here else None for part, parcel in zip(parts, parcels, strict=True)]
    return Gathering(mine, parcels, domain, flight)


def start_scatter(
    whole: Mapping[int, Tensor], parcels: Sequence[Parcel], domain: Domain, like: Tensor, what: str
) -> Scattering:
    """Send every holder its part of what this rank owns: the reverse of :func:`start_gather`. Collective.

    Args:
        whole: by position among ``parcels``, ``(count, m, n)``.
        like: has the dtype and device of what travels.
    """
    if not scatters(parcels):
        return Scattering(whole, parcels, domain, None)
    here = domain.rank
    outgoing: list[list[Tensor]] = [[] for _ in domain.ranks]
    incoming = [0] * domain.world
    for i, parcel in enumerate(parcels):
        if parcel.owner == here:
            for position, piece in parcel.receivers.items():
                if position != here:
                    outgoing[position].append(_cut(whole[i], piece))
        elif here in parcel.receivers:
            incoming[parcel.owner] += parcel.count * parcel.receivers[here].numel
    flight = _Flight(outgoing, incoming, like, domain, f"scatter of {what}")
    return Scattering(whole, parcels, domain, flight)


class _Flight:
    """One uneven all-to-all: tensors per destination out, so many elements per source in."""

    def __init__(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int], like: Tensor, domain: Domain, what: str
    ) -> None:
        parts = [tensor for tensors in outgoing for tensor in tensors]
        self._sent = like.new_empty(sum(part.numel() for part in parts))
        if parts:
            places = self._sent.split([part.numel() for part in parts])
            torch._foreach_copy_([place.view(part.shape) for place, part in zip(places, parts, strict=True)], parts)
        self._received = like.new_empty(sum(incoming))
        self._incoming = list(incoming)
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]

        def launch() -> list[dist.Work]:
            work = dist.all_to_all_single(
                self._received, self._sent, self._incoming, sizes, group=domain.group, async_op=True
            )
            assert work is not None
            return [work]

        self._pending: Pending = domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> _Arrived:
        self._pending.wait()
        arrived = _Arrived(self._received, self._incoming)
        del self._sent, self._received  # only now: the collective read and wrote them
        return arrived


class _Arrived:
    """What each rank sent, taken off piece by piece."""

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self._left: list[Tensor] = list(flat.split(list(sizes)))

    def take(self, source: int, shape: Sequence[int]) -> Tensor:
        numel = math.prod(shape)
        flat = self._left[source]
        self._left[source] = flat[numel:]
        taken: Tensor = flat[:numel].view(list(shape))
        return taken


def _assembled(parcel: Parcel, pieces: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """``(count, m, n)`` from the pieces of one copy."""
    if len(pieces) == 1 and pieces[0][0].covers(parcel.layout.shape):
        return pieces[0][1]
    dim = parcel.layout.split_dim
    if dim is not None:  # one kernel instead of one a piece
        return torch.cat([part for _, part in pieces], dim + 1)
    first = pieces[0][1]
    whole = first.new_empty((parcel.count, *parcel.layout.shape))
    for piece, part in pieces:
        for local, there in piece.blocks():
            whole[_each(there)].copy_(part[_each(local)])
    return whole


def _each(block: tuple[slice, ...]) -> tuple[slice, ...]:
    """Of every matrix of a stack."""
    return slice(None), *block


def _cut(whole: Tensor, piece: Piece) -> Tensor:
    """``(count, …)`` of what ``piece`` holds, a view where it is one block."""
    blocks = piece.blocks()
    if len(blocks) == 1:
        view: Tensor = whole[_each(blocks[0][1])]
        return view
    part = whole.new_empty((whole.shape[0], *piece.shape))
    for local, there in blocks:
        part[_each(local)].copy_(whole[_each(there)])
    return part


def link_ns_per_byte(domain: Domain) -> float:
    """Measured cost of a byte that an all-to-all brings, as a power of two. Collective; rank 0's is what counts."""
    part = max(_PROBE_BYTES // domain.world, _PROBE_BYTES_PER_RANK) // 4
    sent = torch.zeros(part * domain.world, dtype=torch.float32, device=domain.device)
    received = torch.empty_like(sent)
    best = math.inf
    for probe in range(_PROBES + 1):
        domain.monitor.synchronize()
        start = time.perf_counter()
        with domain.monitor.watch("measurement of an all-to-all"):
            dist.all_to_all_single(received, sent, group=domain.group)
            domain.monitor.synchronize()
        if probe:  # the first one sets up connections
            best = min(best, time.perf_counter() - start)
    per_byte = 1e9 * best / max(1, sent.numel() * 4)
    # Rounded, so that plans do not differ from run to run by noise.
    return float(2.0 ** round(math.log2(max(per_byte, 2**-20))))
