"""What a rank should hold and send: sums over the rows of ``dmuon.layout.messages``, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dmuon.dedicated.buffer import OwnedBuffer, fills_wait
from dmuon.dedicated.dedication import Dedicated
from dmuon.dedicated.runtime import Runtime
from dmuon.layout.buffer import Spans
from dmuon.layout.messages import Message, parcel_messages, region_messages
from dmuon.optimizer.muon import Muon
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import make_batches
from dmuon.step.rounds import ExchangedRound
from dmuon.step.sharded import ShardedRound, variant_of
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
            there are copies, also broadcasts or all-gathers among the ranks that have the same parts, and all-reduces
            of Gram matrices. The all-reduce of norms, where pieces travel in half precision or are of slices, does not.
        received_before: bytes from other ranks that Newton-Schulz here waits for.
        received_after: bytes of updates from other ranks.
        sent_before: bytes of momentum to other ranks.
        sent_after: bytes of updates to other ranks; what goes on to several copies counts once.
        copied: of that what goes on to other copies.
        summed: bytes of Gram matrices, each of which is the sum over all ranks, or those of a team.
    """

    calls: int
    received_before: int
    received_after: int
    sent_before: int
    sent_after: int
    copied: int
    summed: int = 0


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


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of an optimizer's state on this rank, by key, such as ``momentum_buffer``; without counts of steps."""
    found: Counter[str] = Counter()
    for values in optimizer.state.values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                found[key] += local_tensor(value).nbytes
    return dict(found)


def expected_traffic(
    runtime: Runtime, micro_batches: int = 1, *, reductions: int = 1, ns_dtype: torch.dtype | None = None
) -> Traffic:
    """Collectives of one step: forward and backward of every micro-batch, and ``step()``.

    Args:
        reductions: backwards that reduce gradients; the others accumulate.
        ns_dtype: as given to ``dmuon.Muon``; tensor-parallel updates return in it.
    """
    comm = runtime.comm
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for buffer in runtime.buffers:
        segments, parts = _sizes(buffer.layout.segments), _sizes(buffer.layout.parts(comm.at.s))
        for message in buffer_messages(buffer, segments, parts, micro_batches, reductions):
            calls[message.purpose] += message.calls
            nbytes[message.purpose] += message.nbytes
    if comm.tensor is not None:
        group = {"ns_coefficients": "classic", "ns_dtype": ns_dtype, "ns_steps": 5, "orthogonalize": None}
        residency = Dedicated(runtime, [])
        for round_ in residency.rounds([make_batches(residency.tasks(), torch.device("meta"))]):
            if not isinstance(round_, ExchangedRound):
                continue
            for message in round_messages(round_, group, comm.device):
                calls["exchange"] += message.calls
                if message.source != round_.domain.position or message.purpose == "copy":
                    nbytes["exchange"] += message.nbytes
    return Traffic(dict(calls), dict(nbytes))


def expected_exchange(optimizer: Muon) -> ExchangeBudget:
    """Collectives and bytes of the exchanges of one step.

    Raises:
        TypeError: a user's own functions exchange matrices; what they send is not known.
    """
    calls = 0
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for round_ in optimizer._rounds:
        if not round_.exchanged:
            continue
        if not isinstance(round_, ExchangedRound):
            raise TypeError("gather_fn and redistribute_fn of the distributed_config are a user's own: count them")
        for message in round_messages(round_, optimizer.param_groups[round_.index], round_.batches[0].device):
            calls += message.calls
            way = sent if message.source == round_.domain.position else received
            way[message.purpose] += message.nbytes
    return ExchangeBudget(
        calls=calls,
        received_before=received["gather"],
        received_after=received["scatter"] + received["copy"],
        sent_before=sent["gather"],
        sent_after=sent["scatter"] + sent["copy"],
        copied=sent["copy"],
        summed=received["sum"],
    )


def buffer_messages(
    buffer: OwnedBuffer,
    segments: Mapping[int, int],
    parts: Mapping[int, int],
    micro_batches: int = 1,
    reductions: int = 1,
) -> Iterator[Message]:
    """What this rank takes part in for what a buffer holds, or for some of it.

    Args:
        segments: elements by shard.
        parts: elements by replica, of this rank's shard.
    """
    comm, layout = buffer.comm, buffer.layout
    weight, gradient = _itemsize(buffer), buffer.reduce_dtype.itemsize
    if comm.row is not None:
        fills = 1 if buffer.keep else 2 * micro_batches
        yield from region_messages("fill", "shard group", layout.row, segments, weight, fills)
        yield from region_messages("reduce", "shard group", layout.row, segments, gradient, reductions)
    if comm.column is not None:
        yield from region_messages("publish", "replicate group", layout.column, parts, weight, 1)
        yield from region_messages("reduce", "replicate group", layout.column, parts, gradient, reductions)


def round_messages(round_: ExchangedRound, group: Mapping[str, Any], device: torch.device) -> Iterator[Message]:
    """What this rank sends and gets in a round, and the collectives that it starts.

    Args:
        group: of the optimizer, which says in which dtypes momentum and updates travel.
        device: of the momentum.
    """
    position, dtype, strategy = round_.domain.position, round_.batches[0].dtype, round_.parcels[0].strategy
    numerics = numerics_of(group, dtype, device)
    normalized = strategy == "sharded" or (numerics.sent_normalized and strategy != "full_replication")
    before, after = (numerics.storage if normalized else dtype).itemsize, numerics.storage.itemsize
    for parcel in round_.parcels:
        yield from (m for m in parcel_messages(parcel, position, before, after) if m.purpose != "copy")
    for load in round_.copies.loads:  # what goes on to copies is padded where it travels together
        yield Message("copy", "domain", position, None, load.numel_out * after, load.calls)
        yield Message("copy", "domain", None, position, (load.numel - load.numel_out) * after)
    yield Message("gather", "domain", None, None, 0, int(any(before.travels for before, _ in round_.routes)))
    yield Message("scatter", "domain", None, None, 0, int(any(after.travels for _, after in round_.routes)))
    here = [one for one in round_.batches if one.parcel.is_for(position)] if isinstance(round_, ShardedRound) else ()
    for batch in here:
        blocks, wide = 1 + len(variant_of(numerics, batch, device).restarts), max(4, numerics.storage.itemsize)
        yield Message("sum", "team", None, None, blocks * batch.count * min(batch.shape) ** 2 * wide, blocks)


def _sizes(spans: Spans) -> dict[int, int]:
    return {position: end - start for position, (start, end) in spans.filled.items()}


def _itemsize(buffer: OwnedBuffer) -> int:
    return buffer.matrices[0].full.element_size()
