"""What a rank should hold, and send in a step: a row for each message, and their sums.

Predictions for machines that are not there (``dmuon.tools.simulation``) have sums of their own. docs/communication.md
says the same in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

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

Purpose = Literal["fill", "publish", "reduce", "gather", "scatter", "copy", "sum"]


class Message(NamedTuple):
    """What this rank sends or gets, or takes part in.

    Attributes:
        purpose: owners' weights to their shard group ("fill") and to replicas ("publish"), gradients to owners
            ("reduce"); momentum to whom orthogonalizes ("gather"), parts of the update back ("scatter"), and these on
            from an owner to replicas ("copy"); Gram matrices of slices ("sum").
        nbytes: of the tensor that travels; where all ranks of a group send, of all of them.
        calls: collectives that carry this alone. What many messages share is a row without bytes.
        is_sent: by this rank, to others.
    """

    purpose: Purpose
    nbytes: int
    calls: int = 0
    is_sent: bool = False


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


def dedicated_messages(
    runtime: Runtime, micro_batches: int = 1, *, ns_dtype: torch.dtype | None = None
) -> Iterator[Message]:
    """What one step sends for owned matrices: forward and backward of every micro-batch, and ``step()``.

    Gradients are reduced once. Not the norms of matrices that tensor parallelism splits.

    Args:
        ns_dtype: as given to ``dmuon.Muon``; tensor-parallel updates return in it.
    """
    comm = runtime.comm
    for buffer in runtime.buffers:
        yield from _buffer_messages(buffer, micro_batches)
    if comm.tensor is not None:
        group = {"ns_coefficients": "classic", "ns_dtype": ns_dtype, "ns_steps": 5, "orthogonalize": None}
        residency = Dedicated(runtime, [])
        for round_ in residency.rounds([make_batches(residency.tasks(), torch.device("meta"))]):
            if isinstance(round_, ExchangedRound):
                yield from _round_messages(round_, group, comm.device)


def exchanged_messages(optimizer: Muon) -> Iterator[Message]:
    """What one step sends for matrices that several ranks hold, if all of them have gradients.

    All-to-alls, at most two a round; where there are copies, also broadcasts or all-gathers among the ranks that have
    the same parts, and all-reduces of Gram matrices. Not the all-reduce of norms, where pieces travel in half precision
    or are of slices.

    Raises:
        TypeError: a user's own functions exchange matrices; what they send is not known.
    """
    for round_ in (one for one in optimizer._rounds if one.exchanged):
        if not isinstance(round_, ExchangedRound):
            raise TypeError("gather_fn and redistribute_fn of the distributed_config are a user's own: count them")
        yield from _round_messages(round_, optimizer.param_groups[round_.index], round_.batches[0].device)


def totals(messages: Iterable[Message]) -> dict[Purpose, tuple[int, int]]:
    """By purpose, the collectives that this rank starts, and the bytes of their tensors.

    These are of whole regions: of every part that is broadcast or reduced, of the output of an all-gather, of the input
    of a reduce-scatter, of the output of an all-to-all.
    """
    found: dict[Purpose, tuple[int, int]] = {}
    for one in messages:
        calls, nbytes = found.get(one.purpose, (0, 0))
        counts = one.purpose == "copy" or not one.is_sent
        found[one.purpose] = calls + one.calls, nbytes + one.nbytes * counts
    return {purpose: total for purpose, total in found.items() if any(total)}


def _buffer_messages(buffer: OwnedBuffer, micro_batches: int) -> Iterator[Message]:
    """What this rank takes part in for what a buffer holds."""
    comm, layout = buffer.comm, buffer.layout
    weight, gradient = _itemsize(buffer), buffer.reduce_dtype.itemsize
    if comm.row is not None:
        fills = 1 if buffer.keep else 2 * micro_batches
        yield _region("fill", layout.row, layout.segments, weight, fills)
        yield _region("reduce", layout.row, layout.segments, gradient, 1)
    if comm.column is not None:
        parts = layout.parts(comm.at.s)
        yield _region("publish", layout.column, parts, weight, 1)
        yield _region("reduce", layout.column, parts, gradient, 1)


def _region(purpose: Purpose, transport: Transport, spans: Spans, itemsize: int, times: int) -> Message:
    """What owners send of a flat region, or get of its gradients, so many ``times`` in a step."""
    return Message(purpose, times * spans.size * itemsize, times * _calls(transport, spans))


def _calls(transport: Transport, spans: Spans) -> int:
    """Collectives that carry a flat region."""
    return 1 if transport == "single" else len(spans.filled)


def _round_messages(round_: ExchangedRound, group: Mapping[str, Any], device: torch.device) -> Iterator[Message]:
    """What this rank sends and gets in a round, and the collectives that it starts.

    Args:
        group: of the optimizer, which says in which dtypes momentum and updates travel.
        device: of the momentum.
    """
    position, dtype, strategy = round_.domain.position, round_.batches[0].dtype, round_.parcels[0].strategy
    numerics = numerics_of(group, dtype, device)
    normalized = strategy == "sharded" or (numerics.sent_normalized and strategy != "full_replication")
    before, after = (numerics.storage if normalized else dtype).itemsize, numerics.storage.itemsize
    ways: tuple[tuple[Purpose, int], ...] = (("gather", before), ("scatter", after))
    for (purpose, itemsize), routes in zip(ways, zip(*round_.routes, strict=True), strict=True):
        yield Message(purpose, itemsize * sum(route.numel_out(position) for route in routes), is_sent=True)
        yield Message(purpose, itemsize * sum(route.numel_in(position) for route in routes))
        yield Message(purpose, 0, int(any(route.travels for route in routes)))
    for load in round_.copies.loads:  # what goes on to copies is padded where it travels together
        start, end = load.spans[load.line.position]
        yield Message("copy", (end - start) * after, _calls(load.transport, load.spans), is_sent=True)
        yield Message("copy", (load.spans.size - (end - start)) * after)
    here = [one for one in round_.batches if one.parcel.is_for(position)] if isinstance(round_, ShardedRound) else ()
    for batch in here:
        blocks, wide = 1 + len(variant_of(numerics, batch, device).restarts), max(4, numerics.storage.itemsize)
        yield Message("sum", blocks * batch.count * min(batch.shape) ** 2 * wide, blocks)


def _itemsize(buffer: OwnedBuffer) -> int:
    return buffer.matrices[0].full.element_size()
