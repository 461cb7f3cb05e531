"""What a rank should hold and send, from the layout alone; docs/communication.md says the same in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dmuon.batches import make_batches
from dmuon.exchange import gathers, received_numel, scatters
from dmuon.group import OwnerGroup
from dmuon.kernels import storage_dtype
from dmuon.kernels.products import carrier_dtype
from dmuon.rounds import exchanged_rounds
from dmuon.runtime import Runtime

__all__ = ["Memory", "Traffic", "expected_memory", "expected_traffic"]


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

    ``fill`` and ``publish`` carry weights, ``reduce`` gradients, ``exchange`` what tensor parallelism splits. The bytes
    are those of whole regions: of every part that is broadcast or reduced, of the output of an all-gather, of the input
    of a reduce-scatter, of the output of an all-to-all.
    """

    calls: dict[str, int]
    nbytes: dict[str, int]


def expected_memory(runtime: Runtime) -> Memory:
    """Bytes that dmuon holds on this rank for the matrices of ``runtime``."""
    comm = runtime.comm
    sizes = [_buffer_nbytes(group) for group in runtime.groups]
    kept = sum(size for group, size in zip(runtime.groups, sizes, strict=True) if group.keep)
    ahead = [] if runtime.fills_wait else sizes[: comm.options.prefetch]
    standins = outgoing = 0
    for group in runtime.groups:
        if comm.column is not None and not group.keep:
            parts = group.layout.parts[comm.at.s]
            sizes_here = [(end - start) * _itemsize(group) for start, end in parts]
            outgoing += sizes_here[comm.at.r]
            standins += sum(sizes_here) - sizes_here[comm.at.r]
    masters = sum(e.local_shape.numel() * e.master.element_size() for e in runtime.entries() if e.owner == comm.rank)
    return Memory(masters, standins, outgoing, kept, 0 if kept else sum(ahead), max(sizes, default=0))


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

    def count(purpose: str, times: int, transport: str, sizes: Sequence[int], itemsize: int) -> None:
        calls[purpose] += times * (sum(size > 0 for size in sizes) if transport == "broadcast" else 1)
        nbytes[purpose] += times * sum(sizes) * itemsize

    for group in runtime.groups:
        segments = [end - start for start, end in group.layout.segments]
        parts = [end - start for start, end in group.layout.parts[comm.at.s]]
        if comm.row is not None:
            fills = 1 if group.keep else 2 * micro_batches
            count("fill", fills, group.layout.row, segments, _itemsize(group))
            count("reduce", reductions, group.layout.row, segments, group.reduce_dtype.itemsize)
        if comm.column is not None:
            count("publish", 1, group.layout.column, parts, _itemsize(group))
            count("reduce", reductions, group.layout.column, parts, group.reduce_dtype.itemsize)
    if comm.tensor is not None:
        _count_exchanges(runtime, ns_dtype, calls, nbytes)
    return Traffic(dict(calls), dict(nbytes))


def _count_exchanges(runtime: Runtime, ns_dtype: torch.dtype | None, calls: Counter[str], nbytes: Counter[str]) -> None:
    me = runtime.comm.at.t
    batches = make_batches([entry.rest for entry in runtime.entries()], planned_only=True)
    for round_ in exchanged_rounds(0, batches, small_numel=0, nbytes=0, together=True):
        momentum = round_.batches[0].momentum
        back = carrier_dtype(runtime.comm.device, storage_dtype(momentum.dtype, runtime.comm.device, ns_dtype))
        before, after = received_numel(round_.parcels, me)
        calls["exchange"] += int(gathers(round_.parcels)) + int(scatters(round_.parcels))
        nbytes["exchange"] += before * momentum.element_size() + after * back.itemsize


def _itemsize(group: OwnerGroup) -> int:
    return group.entries[0].full.element_size()


def _buffer_nbytes(group: OwnerGroup) -> int:
    return group.layout.size * _itemsize(group)
