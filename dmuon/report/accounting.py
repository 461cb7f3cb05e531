"""What ranks should own, hold, and send in a step: a row for each matrix, a row for each message, and their sums.

Predictions for machines that are not there (``dmuon.tools.simulation``) have sums of their own. docs/communication.md
says the same in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.buffer import OwnedBuffer, fills_wait
from dmuon.dedicated.dedication import Dedicated, Dedication
from dmuon.dedicated.matrix import resting
from dmuon.dedicated.runtime import Runtime
from dmuon.exchanged.user_round import UserRound
from dmuon.layout.buffer import Spans, Transport
from dmuon.layout.matrices import Parcel, numbered
from dmuon.layout.topology import GlobalRank
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import flat_of, is_one_matrix, spec_of
from dmuon.optimizer.groups import inside_ddp
from dmuon.optimizer.muon import Muon
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch, SharedBatch, make_batches
from dmuon.step.rounds import ExchangedRound
from dmuon.step.sharded import ShardedRound, variant_of
from dmuon.step.update import numerics_of

# -- messages, and memory -------------------------------------------------------------------------------------------

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


def expected_memory(runtime: Runtime) -> dict[str, int]:
    """Bytes that dmuon holds on this rank for the matrices of ``runtime`` from a step to the next forward.

    Gradients take as much as the masters while there are any, and while blocks compute, ``1 + prefetch`` of them are
    unsharded.
    """
    comm = runtime.comm
    sizes = [buffer.whole_nbytes for buffer in runtime.buffers]
    kept = sum(size for buffer, size in zip(runtime.buffers, sizes, strict=True) if buffer.keep)
    ahead = [] if kept or fills_wait(comm) else sizes[: comm.options.prefetch]
    standins = outgoing = 0
    for buffer in runtime.buffers:
        if comm.column is not None and not buffer.keep:
            parts = buffer.layout.parts(comm.at.s)
            sizes_here = [(end - start) * _itemsize(buffer) for start, end in parts]
            outgoing += sizes_here[comm.at.r]
            standins += sum(sizes_here) - sizes_here[comm.at.r]
    masters = sum(part.numel * e.master.element_size() for e in runtime.matrices() for part in e.mine)
    return {
        "fp32 masters": masters,
        "momentum": masters,
        "copies for its replica": standins,  # in communication dtype, of what others own and it serves to its row
        "what is being published": outgoing,  # until the next forward fetches the block
        "weights kept unsharded": kept,
        "weights unsharded ahead": sum(ahead),
    }


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


# -- matrices: where each lies, who orthogonalizes it, and at what predicted cost -----------------------------------


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One matrix.

    Attributes:
        tensor: name of the parameter.
        number: among the matrices of the parameter; None where it is one matrix.
        shape: ``(m, n)``, as it is stored; of a parameter that a user's own functions exchange, all of it.
        lies: the block, the placements, or something else to tell where it lies.
        owner: the rank that orthogonalizes it; None without an optimizer, or by another strategy than ``"owner"``.
        predicted_ns: its share of what the plan predicts for its owner; None where nothing is planned.
    """

    tensor: str
    number: int | None
    shape: tuple[int, ...]
    lies: str
    owner: GlobalRank | None
    predicted_ns: float | None
    strategy: str = "owner"

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class RankSums:
    """The matrices that one rank owns."""

    matrices: int = 0
    elements: int = 0
    predicted_ns: float | None = 0.0


def matrix_rows(model: nn.Module, optimizer: Muon | None, dedicated: Sequence[Dedication]) -> list[MatrixRow]:
    """What dmuon owns of ``model``, and what else is in ``optimizer``; in the order of the model.

    Communicates nothing. Of an optimizer that is not laid out it knows only what dmuon owns.
    """
    ready = optimizer is not None and optimizer._is_as_laid_out()
    names = {id(resting(param)): canonical_fqn(name) for name, param in inside_ddp(model).named_parameters()}
    order = {name: i for i, name in enumerate(names.values())}
    rows = list(chain.from_iterable(_owned(one, names) for one in dedicated))
    known = {id(matrix.rest) for one in dedicated for matrix in one.runtime.matrices()}
    if optimizer is not None and ready:
        names = {**optimizer._names, **names}
        rows += _others(optimizer, known, names)
        rows += _elsewhere(optimizer, names)
    return sorted(rows, key=lambda row: (order.get(row.tensor, len(order)), row.number or 0))


def rank_sums(rows: Sequence[MatrixRow]) -> dict[GlobalRank, RankSums]:
    """By rank, of all that this rank knows; what is not predicted of a matrix is not of its owner."""
    sums: dict[GlobalRank, RankSums] = {}
    for row in rows:
        if row.owner is not None:
            one = sums.get(row.owner, RankSums())
            unknown = one.predicted_ns is None or row.predicted_ns is None
            predicted = None if unknown else one.predicted_ns + row.predicted_ns  # type: ignore[operator]
            sums[row.owner] = RankSums(one.matrices + 1, one.elements + row.numel, predicted)
    return dict(sorted(sums.items()))


# -- dedicated ------------------------------------------------------------------------------------------------------


def _owned(dedication: Dedication, names: Mapping[int, str]) -> Iterator[MatrixRow]:
    runtime, plan = dedication.runtime, dedication.plan
    comm = runtime.comm
    planned = {m.name: m for m in plan.matrices}
    kinds = {m.name: (plan.owners[m.name], (m.rows, m.cols), m.pool) for m in plan.matrices}
    counts = Counter(kinds.values())
    for matrix in runtime.matrices():
        for part in matrix.parts:
            name = f"{matrix.fqn}[{part.number}]" if matrix.is_split else matrix.fqn
            owner = comm.ranks[part.owner]
            if part.parcel is not None:
                owner = comm.topology.rank_at(part.at.r, part.at.s, part.parcel.owner)
            yield MatrixRow(
                tensor=names.get(id(matrix.rest), matrix.fqn),
                number=part.number if matrix.is_split else None,
                shape=part.shape,
                lies=planned[name].block,
                owner=owner,
                predicted_ns=_predicted_ns(plan, kinds[name][1], counts[kinds[name]]),
            )


def _predicted_ns(plan: OwnerPlan, shape: tuple[int, int], count: int) -> float | None:
    """Of one of ``count`` matrices that the planner counts together."""
    return None if plan.costs is None else plan.costs.cost((min(shape), max(shape)), count) / count


# -- everything else ------------------------------------------------------------------------------------------------


def _others(optimizer: Muon, known: Set[int], names: Mapping[int, str]) -> list[MatrixRow]:
    batches = [(round_, batch) for round_ in optimizer._rounds for batch in round_.batches]
    batches = [(round_, batch) for round_, batch in batches if id(batch.params[0]) not in known]
    layouts = None if optimizer._exchange is None else optimizer._exchange.layouts
    plans = {} if layouts is None else layouts.plans
    counts: Counter[object] = Counter()
    for _, batch in batches:
        if isinstance(batch, SharedBatch) and _is_planned(batch.parcel):
            counts[_kind(batch)] += batch.count
    rows = []
    for round_, batch in batches:
        whole = isinstance(round_, UserRound)
        predicted = None
        strategy = "owner"
        owner: GlobalRank | None = round_.owners[batch.position] if isinstance(round_, UserRound) else this_rank()
        if isinstance(batch, SharedBatch):
            strategy = batch.parcel.way
            owner = batch.domain.ranks[batch.parcel.owner] if batch.parcel.has_owner else None
        if isinstance(batch, SharedBatch) and _is_planned(batch.parcel) and batch.domain.ranks in plans:
            predicted = _predicted_ns(plans[batch.domain.ranks], batch.shape, counts[_kind(batch)])
        row = MatrixRow(
            tensor="",
            number=None,
            shape=tuple(batch.params[0].shape) if whole else batch.shape,
            lies=_lies(batch, whole=whole),
            owner=owner,
            predicted_ns=predicted,
            strategy=strategy,
        )
        labels = [(param, None) for param in batch.params] if whole else batch.labels
        of_call = [replace(row, tensor=names[id(param)], number=number) for param, number in labels]
        for one in of_call:  # what was predicted as its strategy was chosen; nothing where that was given
            name = one.tensor if one.number is None else f"{one.tensor}[{one.number}]"
            choice = None if strategy == "owner" or layouts is None else layouts.choices.get(name)
            rows.append(one if choice is None else replace(one, predicted_ns=choice.predicted_ns))
    return rows


def _elsewhere(optimizer: Muon, names: Mapping[int, str]) -> Iterator[MatrixRow]:
    """Matrices of stacks, such as experts, that one other rank has whole."""
    layouts = None if optimizer._exchange is None else optimizer._exchange.layouts
    if layouts is None:
        return
    for param, placed in zip(layouts.params, layouts.placed, strict=True):
        if placed is None or is_one_matrix(param):
            continue
        for share, numbers in numbered(placed.layout, spec_of(param), placed.first):
            owner = placed.ranks[share.spread.holders[0]]
            if len(share.spread.holders) > 1 or owner == this_rank():
                continue
            row = MatrixRow(
                tensor=names[id(param)],
                number=None,
                shape=share.spread.layout.shape,
                lies=f"{_placed(param)}, whole there",
                owner=owner,
                predicted_ns=None,
            )
            yield from (replace(row, number=number) for number in numbers)


def _lies(batch: Batch, *, whole: bool) -> str:
    placed = _placed(batch.params[0])
    if whole:
        return f"{placed}, moved by a user's functions"
    if isinstance(batch, SharedBatch) and len(batch.parcel.spread.holders) > 1:
        holders = batch.parcel.spread.holders
        if not isinstance(batch.params[0], DTensor):
            placed = "replicated" if batch.parcel.spread.copies == len(holders) else f"sharded {placed}"
        return f"{placed} on ranks {_ranks([batch.domain.ranks[holder] for holder in holders])}"
    return "not sharded" if placed == "plain" else f"{placed}, no matrix is split"


def _placed(param: Tensor) -> str:
    if isinstance(param, DTensor):
        return ", ".join(map(str, param.placements))
    return "plain" if flat_of(param) is None else "as one row (FSDP1)"


def _ranks(ranks: Sequence[GlobalRank]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} … {ranks[-1]} ({len(ranks)})"


def _kind(batch: SharedBatch) -> object:
    """The same for matrices that the planner counts together: domain, owner, stored shape, and who has parts."""
    return id(batch.domain), batch.parcel.owner, batch.shape, batch.parcel.spread.holders


def _is_planned(parcel: Parcel) -> bool:
    return len(parcel.spread.holders) > 1 and parcel.has_owner
