"""What a rank should hold and send, from layouts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from operator import add
from typing import Any

import torch

from dmuon.comm.domain import AllToAll
from dmuon.dedicated.buffer import OwnedBuffer, fills_wait
from dmuon.dedicated.dedication import Dedicated
from dmuon.dedicated.runtime import Runtime
from dmuon.layout.buffer import Spans, Transport
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
    summed: int


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


def expected_traffic(runtime: Runtime, micro_batches: int = 1, *, ns_dtype: torch.dtype | None = None) -> Traffic:
    """Collectives of one step: forward and backward of every micro-batch, of which the last reduces, and ``step()``.

    Args:
        ns_dtype: as given to ``dmuon.Muon``; tensor-parallel updates return in it.
    """
    comm = runtime.comm
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()

    def count(purpose: str, transport: Transport, spans: Spans, itemsize: int, times: int = 1) -> None:
        """What owners send of a flat region, or get of its gradients, so many times."""
        calls[purpose] += times * _calls(transport, spans)
        nbytes[purpose] += times * spans.size * itemsize

    for buffer in runtime.buffers:
        layout, weight, gradient = buffer.layout, _itemsize(buffer), buffer.reduce_dtype.itemsize
        if comm.row is not None:
            count("fill", layout.row, layout.segments, weight, 1 if buffer.keep else 2 * micro_batches)
            count("reduce", layout.row, layout.segments, gradient)
        if comm.column is not None:
            parts = layout.parts(comm.at.s)
            count("publish", layout.column, parts, weight)
            count("reduce", layout.column, parts, gradient)
    if comm.tensor is not None:
        group = {"ns_coefficients": "classic", "ns_dtype": ns_dtype, "ns_steps": 5, "orthogonalize": None}
        residency = Dedicated(runtime, [])
        for round_ in residency.rounds([make_batches(residency.tasks(), torch.device("meta"))]):
            if isinstance(round_, ExchangedRound):
                found = _exchange_of(round_, group, comm.device)
                calls["exchange"] += found.calls
                nbytes["exchange"] += found.received_before + found.received_after + found.copied
    return Traffic(dict(calls), dict(nbytes))


def expected_exchange(optimizer: Muon) -> ExchangeBudget:
    """Collectives and bytes of the exchanges of one step.

    Raises:
        TypeError: a user's own functions exchange matrices; what they send is not known.
    """
    total = ExchangeBudget(*[0] * len(fields(ExchangeBudget)))
    for round_ in optimizer._rounds:
        if not round_.exchanged:
            continue
        if not isinstance(round_, ExchangedRound):
            raise TypeError("gather_fn and redistribute_fn of the distributed_config are a user's own: count them")
        found = _exchange_of(round_, optimizer.param_groups[round_.index], round_.batches[0].device)
        total = ExchangeBudget(*map(add, astuple(total), astuple(found)))
    return total


def _exchange_of(round_: ExchangedRound, group: Mapping[str, Any], device: torch.device) -> ExchangeBudget:
    """What this rank sends and gets in one round, and the collectives that it starts.

    Args:
        group: of the optimizer, which says in which dtypes momentum and updates travel.
        device: of the momentum.
    """
    here, dtype, strategy = round_.domain.position, round_.batches[0].dtype, round_.parcels[0].strategy
    numerics = numerics_of(group, dtype, device)
    normalized = strategy == "sharded" or (numerics.sent_normalized and strategy != "full_replication")
    before, after = (numerics.storage if normalized else dtype).itemsize, numerics.storage.itemsize
    gather, scatter = (AllToAll(routes, round_.domain) for routes in zip(*round_.routes, strict=True))
    loads = round_.copies.loads  # what goes on to copies is padded where it travels together
    copied = after * sum(end - start for start, end in (load.spans[load.line.position] for load in loads))
    calls = gather.travels + scatter.travels + sum(_calls(load.transport, load.spans) for load in loads)
    summed = 0
    if isinstance(round_, ShardedRound):
        for batch in round_.batches:
            if batch.parcel.is_for(here):
                blocks, wide = 1 + len(variant_of(numerics, batch, device).restarts), max(4, after)
                calls += blocks
                summed += blocks * batch.count * min(batch.shape) ** 2 * wide
    return ExchangeBudget(
        calls=calls,
        received_before=before * sum(gather.incoming),
        received_after=after * (sum(scatter.incoming) + sum(load.spans.size for load in loads)) - copied,
        sent_before=before * sum(gather.outgoing),
        sent_after=after * sum(scatter.outgoing) + copied,
        copied=copied,
        summed=summed,
    )


def _calls(transport: Transport, spans: Spans) -> int:
    """Collectives that carry a flat region."""
    return 1 if transport == "single" else len(spans.filled)


def _itemsize(buffer: OwnedBuffer) -> int:
    return buffer.matrices[0].full.element_size()
