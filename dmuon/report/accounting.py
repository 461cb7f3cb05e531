"""What a rank should hold and send, from the layout alone; docs/communication.md says the same in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon.dedicated.buffer import OwnedBuffer, fills_wait
from dmuon.dedicated.dedication import Dedicated
from dmuon.dedicated.runtime import Runtime
from dmuon.kernels import Storage
from dmuon.layout.parcels import travels
from dmuon.optimizer.muon import Muon
from dmuon.platform.streams import PhaseTimer
from dmuon.step.batches import Batch, make_batches
from dmuon.step.rounds import ExchangedRound, Round, Schedule, Step
from dmuon.step.update import numerics_of


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of owned matrices on this rank.

    Attributes:
        masters: fp32 weights of what it owns; momentum takes as much again, and so do gradients while there are any.
        standins: copies in communication dtype of what other replicas own and this rank serves to its row.
        outgoing: what publications along the columns are sent from, until the next forward fetches the block.
        kept: buffers of whole weights that stay.
        filled_ahead: buffers that ``step()`` fills for the next forward.
        largest: the largest buffer; while blocks compute, ``1 + prefetch`` of them exist.
    """

    masters: int
    standins: int
    outgoing: int
    kept: int
    filled_ahead: int
    largest: int

    @property
    def at_rest(self) -> int:
        """What there is between a step and the next forward, momentum included, without gradients."""
        return 2 * self.masters + self.standins + self.outgoing + self.kept + self.filled_ahead


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives that this rank starts for owned matrices in one step, and the bytes of their tensors, by purpose.

    ``fill`` and ``publish`` carry weights, ``reduce`` gradients, ``exchange`` what tensor parallelism splits, without
    the norms of matrices. The bytes are those of whole regions: of every part that is broadcast or reduced, of the
    output of an all-gather, of the input of a reduce-scatter, of the output of an all-to-all.
    """

    calls: dict[str, int]
    nbytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class ExchangeBudget:
    """What one step does on this rank for matrices that several ranks hold, if all of them have gradients.

    Attributes:
        calls: all-to-alls, at most two a round; those of which this rank sends and receives nothing count. Where
            there are copies, also broadcasts or all-gathers among the ranks that have the same parts. The all-reduce
            of norms, where pieces travel in half precision, does not.
        received_before: bytes from other ranks that Newton-Schulz here waits for.
        received_after: bytes of updates from other ranks.
        sent_before: bytes of momentum to other ranks.
        sent_after: bytes of updates to other ranks; what goes on to several copies counts once.
        copied: of that what goes on to other copies.
        in_flight: most bytes alive at once of what is packed, on its way or put together, without Newton-Schulz' own
            workspace. Of a round there are this rank's parts, what it sends and what it receives; once it has arrived,
            the whole matrices; then their updates, what is sent of them and what is received; then what goes on to
            other copies and comes from there. While one round computes, the ``prefetch`` next ones have started (of
            each domain too), and the one before is on its way, and the one before that on its way to other copies.
    """

    calls: int
    received_before: int
    received_after: int
    sent_before: int
    sent_after: int
    copied: int
    in_flight: int


def expected_memory(runtime: Runtime) -> Memory:
    """Bytes that dmuon holds on this rank for the matrices of ``runtime``."""
    comm = runtime.comm
    sizes = [buffer.whole_nbytes for buffer in runtime.buffers]
    kept = sum(size for buffer, size in zip(runtime.buffers, sizes, strict=True) if buffer.keep)
    ahead = [] if fills_wait(comm) else sizes[: comm.options.prefetch]
    standins = outgoing = 0
    for buffer in runtime.buffers:
        if comm.column is not None and not buffer.keep:
            parts = buffer.layout.parts(comm.at.s)
            sizes_here = [(end - start) * _itemsize(buffer) for start, end in parts]
            outgoing += sizes_here[comm.at.r]
            standins += sum(sizes_here) - sizes_here[comm.at.r]
    masters = sum(part.numel * e.master.element_size() for e in runtime.matrices() for part in e.mine)
    return Memory(masters, standins, outgoing, kept, 0 if kept else sum(ahead), max(sizes, default=0))


def expected_traffic(
    runtime: Runtime, micro_batches: int = 1, *, reductions: int = 1, ns_dtype: Storage | None = None, ns_steps: int = 5
) -> Traffic:
    """Collectives of one step: forward and backward of every micro-batch, and ``step()``.

    Args:
        reductions: backwards that reduce gradients; the others accumulate.
        ns_dtype, ns_steps: as given to ``dmuon.Muon``; tensor-parallel updates return as the last step leaves them.
    """
    comm = runtime.comm
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()

    def count(purpose: str, times: int, transport: str, sizes: Sequence[int], itemsize: int) -> None:
        calls[purpose] += times * (sum(size > 0 for size in sizes) if transport == "broadcast" else 1)
        nbytes[purpose] += times * sum(sizes) * itemsize

    for buffer in runtime.buffers:
        segments = [end - start for start, end in buffer.layout.segments]
        parts = [end - start for start, end in buffer.layout.parts(comm.at.s)]
        if comm.row is not None:
            fills = 1 if buffer.keep else 2 * micro_batches
            count("fill", fills, buffer.layout.row, segments, _itemsize(buffer))
            count("reduce", reductions, buffer.layout.row, segments, buffer.reduce_dtype.itemsize)
        if comm.column is not None:
            count("publish", 1, buffer.layout.column, parts, _itemsize(buffer))
            count("reduce", reductions, buffer.layout.column, parts, buffer.reduce_dtype.itemsize)
    if comm.tensor is not None:
        group = {"ns_coefficients": "classic", "ns_dtype": ns_dtype, "ns_steps": ns_steps}
        _count_exchanges(runtime, group, calls, nbytes)
    return Traffic(dict(calls), dict(nbytes))


def _count_exchanges(runtime: Runtime, group: Mapping[str, Any], calls: Counter[str], nbytes: Counter[str]) -> None:
    residency = Dedicated(runtime, [])
    batches = make_batches(residency.tasks(), torch.device("meta"))
    for round_ in residency.rounds([batches]):
        if not isinstance(round_, ExchangedRound):
            continue
        one = _RoundBytes.of(round_, group, torch.empty(0, dtype=round_.batches[0].dtype, device=runtime.comm.device))
        calls["exchange"] += one.calls
        nbytes["exchange"] += one.received + one.returned + one.copied


def expected_exchange(optimizer: Muon) -> ExchangeBudget:
    """Collectives, bytes and memory of the exchanges of one step.

    Raises:
        TypeError: a user's own functions exchange matrices; what they send is not known.
    """
    found: list[_RoundBytes] = []
    domains: list[int] = []
    for round_ in optimizer._rounds:
        if not round_.exchanged:
            continue
        if not isinstance(round_, ExchangedRound):
            raise TypeError("gather_fn and redistribute_fn of the distributed_config are a user's own: count them")
        batch = round_.batches[0]
        like = torch.empty(0, dtype=batch.dtype, device=batch.device)
        found.append(_RoundBytes.of(round_, optimizer.param_groups[round_.index], like))
        domains.append(id(round_.domain))
    return ExchangeBudget(
        calls=sum(one.calls for one in found),
        received_before=sum(one.received for one in found),
        received_after=sum(one.returned + one.copied - one.copied_out for one in found),
        sent_before=sum(one.sent for one in found),
        sent_after=sum(one.answered + one.copied_out for one in found),
        copied=sum(one.copied_out for one in found),
        in_flight=_most_in_flight(found, domains, optimizer._prefetch),
    )


class _Alive:
    """Bytes of the exchange that exist at once, and the most of them so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def change(self, by: int, meanwhile: int = 0) -> None:
        """``meanwhile`` more exist for a moment."""
        self.now += by
        self.most = max(self.most, self.now + meanwhile)


class _CountedRound(Round):
    """Counts the bytes that a round holds, where the round would send."""

    index = 0
    batches: Sequence[Batch] = ()
    exchanged = True

    def __init__(self, one: _RoundBytes, domain: int, alive: _Alive) -> None:
        self.queue = domain
        self._one = one
        self._alive = alive

    def run(self, step: Step) -> Iterator[bool]:
        one, alive = self._one, self._alive
        alive.change(one.gathering, one.parts - one.own_parts)
        yield False
        alive.change(-one.gathering, one.own_parts + one.received + one.whole)
        alive.change(one.scattering)
        held = one.scattering
        if one.goes_on:
            if not one.at_once:
                yield False
            alive.change(0, one.copied - one.answered)
            held = one.copied + one.uncopied
            alive.change(held - one.scattering)
        yield True
        alive.change(-held)


def _most_in_flight(rounds: Sequence[_RoundBytes], domains: Sequence[int], prefetch: int) -> int:
    alive = _Alive()
    counted = [_CountedRound(one, domain, alive) for one, domain in zip(rounds, domains, strict=True)]
    for _ in Schedule(counted, prefetch).drive(Step([{}], frozenset(), PhaseTimer(torch.device("cpu")))):
        pass
    return alive.most


@dataclass(frozen=True, slots=True)
class _RoundBytes:
    """Of one round on this rank.

    Attributes:
        parts: of momentum, of everything that it holds, until it is packed.
        own_parts: of what it owns.
        sent, received: before Newton-Schulz.
        whole: matrices that are put together here.
        updates: of what is owned here.
        answered, returned: sent and received after Newton-Schulz.
        copied: the region in which parts of all copies are gathered.
        copied_out: of that what this rank has first.
        uncopied: updates that stay beside that region.
        goes_on: some ranks send what has come on to copies.
        at_once: nothing has to come before.
    """

    calls: int
    parts: int = 0
    own_parts: int = 0
    sent: int = 0
    received: int = 0
    whole: int = 0
    updates: int = 0
    answered: int = 0
    returned: int = 0
    copied: int = 0
    copied_out: int = 0
    uncopied: int = 0
    goes_on: bool = False
    at_once: bool = False

    @property
    def gathering(self) -> int:
        return self.own_parts + self.sent + self.received

    @property
    def scattering(self) -> int:
        return self.updates + self.answered + self.returned

    @classmethod
    def of(cls, round_: ExchangedRound, group: Mapping[str, Any], like: Tensor) -> _RoundBytes:
        """``like``: of the dtype and on the device of its momentum."""
        position = round_.domain.position
        numerics = numerics_of(group, like.dtype, like.device)
        there = numerics.begins if numerics.sent_normalized else like.dtype
        itemsize, back = there.itemsize, numerics.ends.itemsize
        nbytes: Counter[str] = Counter()
        for parcel in round_.parcels:
            gather, scatter = parcel.to_owner, parcel.from_owner
            piece = parcel.pieces.get(position)
            part = 0 if piece is None else parcel.count * piece.numel * itemsize
            nbytes["parts"] += part
            nbytes["sent"] += sum(gather.numel_out(position).values()) * itemsize
            nbytes["received"] += sum(gather.numel_in(position).values()) * itemsize
            nbytes["answered"] += sum(scatter.numel_out(position).values()) * back
            nbytes["returned"] += sum(scatter.numel_in(position).values()) * back
            if parcel.owner == position:
                nbytes["own_parts"] += part
                nbytes["updates"] += parcel.numel * back
                if position not in gather.senders or not gather.senders[position].covers(parcel.layout.shape):
                    nbytes["whole"] += parcel.numel * itemsize
                if parcel.spread.copies == 1:
                    nbytes["uncopied"] += parcel.numel * back
        loads = round_.copies.loads
        nbytes["copied"] = sum(load.numel for load in loads) * back
        nbytes["copied_out"] = sum(load.numel_out for load in loads) * back
        if any(parcel.spread.copies == 1 for parcel in round_.parcels):
            nbytes["uncopied"] += nbytes["returned"]
        ways = [parcel.to_owner for parcel in round_.parcels], [parcel.from_owner for parcel in round_.parcels]
        calls = sum(map(travels, ways)) + sum(load.calls for load in loads)
        return cls(calls, **nbytes, goes_on=round_.copies.needed, at_once=not travels(ways[1]))


def _itemsize(buffer: OwnedBuffer) -> int:
    return buffer.matrices[0].full.element_size()
