"""Matrix by matrix: who orthogonalizes it, in which batch, how, and at what predicted cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.dedication import Dedication
from dmuon.dedicated.matrix import Part, resting
from dmuon.exchanged.user_round import UserRound
from dmuon.kernels import step_variant
from dmuon.layout.matrices import Parcel, numbered
from dmuon.layout.topology import GlobalRank, Position
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import flat_of, is_one_matrix, spec_of
from dmuon.optimizer.groups import inside_ddp
from dmuon.optimizer.muon import Muon
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch, SharedBatch
from dmuon.step.rounds import Round
from dmuon.step.sharded import ShardedRound, variant_of
from dmuon.step.update import Numerics, numerics_of


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One matrix.

    Attributes:
        tensor: name of the parameter.
        number: among the matrices of the parameter; None where it is one matrix.
        shape: ``(m, n)``, as it is stored; of a parameter that a user's own functions exchange, all of it.
        lies: the block, the placements, or something else to tell where it lies.
        owner: the rank that orthogonalizes it; None without an optimizer, or by another strategy than ``"owner"``.
        call: among the batched Newton-Schulz calls of the owner in a step, from 1; None where this rank cannot tell.
        batch: matrices that this call takes, at most so many where ``call`` is None; 0 where nothing is known.
        runs: how Newton-Schulz runs; empty where this rank cannot tell.
        predicted_ns: its share of what the plan predicts for its owner; None where nothing is planned.
    """

    tensor: str
    number: int | None
    shape: tuple[int, ...]
    lies: str
    owner: GlobalRank | None
    call: int | None
    batch: int
    runs: str
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


@dataclass(frozen=True, slots=True)
class _Call:
    """A batched Newton-Schulz call: its number on the owner, and how it runs."""

    number: int
    batch: Batch
    round_: Round
    owner: GlobalRank
    runs: str


def matrix_rows(model: nn.Module, optimizer: Muon | None, dedicated: Sequence[Dedication]) -> list[MatrixRow]:
    """What dmuon owns of ``model``, and what else is in ``optimizer``; in the order of the model.

    Communicates nothing: of other ranks' calls it knows those of matrices that they share with this one. Of an
    optimizer that is not laid out it knows no calls.
    """
    ready = optimizer is not None and is_laid_out(optimizer)
    calls = list(_calls(optimizer)) if optimizer is not None and ready else []
    names = {id(resting(param)): canonical_fqn(name) for name, param in inside_ddp(model).named_parameters()}
    order = {name: i for i, name in enumerate(names.values())}
    rows = list(chain.from_iterable(_owned(one, optimizer, calls, names) for one in dedicated))
    known = {id(matrix.rest) for one in dedicated for matrix in one.runtime.matrices()}
    if optimizer is not None and ready:
        names = {**optimizer._names, **names}
        rows += _others(optimizer, [call for call in calls if id(call.batch.params[0]) not in known], names)
        rows += _elsewhere(optimizer, names)
    return sorted(rows, key=lambda row: (order.get(row.tensor, len(order)), row.number or 0))


def is_laid_out(optimizer: Muon) -> bool:
    """Whether owners are known of what is in its groups: a copy, or one whose groups were edited, decides in a step."""
    return optimizer._is_as_laid_out()


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


def _calls(optimizer: Muon) -> Iterator[_Call]:
    """What this rank knows of the calls of a step, its own and those of ranks that share matrices with it."""
    numbers: Counter[GlobalRank] = Counter()
    for round_ in optimizer._rounds:
        group = optimizer.param_groups[round_.index]
        for batch in round_.batches:
            owner, runs = this_rank(), ""
            others: Sequence[GlobalRank] = ()
            if isinstance(round_, UserRound):
                owner = round_.owners[batch.position]
            else:
                numerics = numerics_of(group, batch.dtype, batch.device)
                if isinstance(batch, SharedBatch) and batch.parcel.has_owner:
                    owner = batch.domain.ranks[batch.parcel.owner]
                elif isinstance(batch, SharedBatch):
                    others = [rank for i, rank in enumerate(batch.domain.ranks) if batch.parcel.is_for(Position(i))]
                    owner = owner if owner in others else others[0]
                if isinstance(round_, ShardedRound):
                    runs = str(variant_of(numerics, batch, batch.device))
                else:
                    runs = _runs(numerics, batch.shape, batch.count, batch.device)
            numbers.update({owner, *others})
            yield _Call(numbers[owner], batch, round_, owner, runs)


def _runs(numerics: Numerics, shape: tuple[int, int], k: int, device: torch.device) -> str:
    return str(step_variant(shape, k, numerics.sequence, numerics.storage, device))


# -- dedicated ------------------------------------------------------------------------------------------------------


def _owned(
    dedication: Dedication, optimizer: Muon | None, calls: Sequence[_Call], names: Mapping[int, str]
) -> list[MatrixRow]:
    runtime, plan = dedication.runtime, dedication.plan
    planned = {m.name: m for m in plan.matrices}
    shares = _shares(plan, Counter(_Kind(plan.owners[m.name], (m.rows, m.cols), m.pool) for m in plan.matrices))
    own = {(id(param), number or 0): call for call in calls for param, number in call.batch.labels}
    groups = {} if optimizer is None else {id(p): g for g in optimizer.param_groups for p in g["params"]}
    rows = []
    for buffer in runtime.buffers:
        for matrix in buffer.matrices:
            group = groups.get(id(matrix.rest))
            for part in matrix.parts:
                name = f"{matrix.fqn}[{part.number}]" if matrix.is_split else matrix.fqn
                one = planned[name]
                of_owner = shares[_Kind(plan.owners[name], (one.rows, one.cols), one.pool)]
                call = own.get((id(matrix.rest), part.number))
                runs, batch = ("", of_owner.batch) if call is None else (call.runs, call.batch.count)
                if call is None and group is not None:
                    numerics = numerics_of(group, matrix.master.dtype, runtime.comm.device)
                    runs = _runs(numerics, part.shape, batch, runtime.comm.device)
                row = MatrixRow(
                    tensor=names.get(id(matrix.rest), matrix.fqn),
                    number=part.number if matrix.is_split else None,
                    shape=part.shape,
                    lies=planned[name].block,
                    owner=_owner(part, dedication),
                    call=None if call is None else call.number,
                    batch=batch,
                    runs=runs,
                    predicted_ns=of_owner.ns,
                )
                rows.append(row)
    return rows


def _owner(part: Part, dedication: Dedication) -> GlobalRank:
    comm = dedication.runtime.comm
    if part.parcel is None:
        return comm.ranks[part.owner]
    return comm.topology.rank_at(part.at.r, part.at.s, part.parcel.owner)


# -- everything else ------------------------------------------------------------------------------------------------


def _others(optimizer: Muon, calls: Sequence[_Call], names: Mapping[int, str]) -> list[MatrixRow]:
    layouts = None if optimizer._exchange is None else optimizer._exchange.layouts
    plans = {} if layouts is None else layouts.plans
    owned: dict[int, Counter[_Kind]] = {}  # by domain
    for call in calls:
        if isinstance(call.batch, SharedBatch) and _is_planned(call.batch.parcel):
            owned.setdefault(id(call.batch.domain), Counter())[_kind(call.batch)] += call.batch.count
    shares: dict[int, Mapping[_Kind, _Share]] = {}
    rows = []
    for call in calls:
        batch = call.batch
        whole = isinstance(call.round_, UserRound)
        predicted = None
        strategy = batch.parcel.way if isinstance(batch, SharedBatch) else "owner"
        if isinstance(batch, SharedBatch) and _is_planned(batch.parcel) and batch.domain.ranks in plans:
            domain = id(batch.domain)
            if domain not in shares:
                shares[domain] = _shares(plans[batch.domain.ranks], owned[domain])
            predicted = shares[domain][_kind(batch)].ns
        row = MatrixRow(
            tensor="",
            number=None,
            shape=tuple(batch.params[0].shape) if whole else batch.shape,
            lies=_lies(batch, whole=whole),
            owner=call.owner if strategy in ("owner", "fused") else None,
            call=call.number,
            batch=0 if whole else batch.count,
            runs=call.runs,
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
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    for param, placed in zip(layouts.params, layouts.placed, strict=True):
        if placed is None or is_one_matrix(param):
            continue
        local = local_tensor(param)
        momentum = torch.promote_types(local.dtype, torch.float32)
        for share, numbers in numbered(placed.layout, spec_of(param), placed.first):
            owner = placed.ranks[share.spread.holders[0]]
            if len(share.spread.holders) > 1 or owner == this_rank():
                continue
            m, n = share.spread.layout.shape
            numerics = numerics_of(groups[id(param)], momentum, local.device)
            row = MatrixRow(
                tensor=names[id(param)],
                number=None,
                shape=(m, n),
                lies=f"{_placed(param)}, whole there",
                owner=owner,
                call=None,
                batch=len(numbers),
                runs=_runs(numerics, (m, n), len(numbers), local.device),
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


def _is_planned(parcel: Parcel) -> bool:
    return len(parcel.spread.holders) > 1 and parcel.has_owner


# -- predictions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Share:
    """Of one matrix among those of its kind: predicted time, and the planned size of its batch."""

    ns: float | None
    batch: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What matrices have in common that may be in one batch, as the planner counts: owner, stored shape, pool."""

    owner: Position
    shape: tuple[int, int]
    pool: object


def _kind(batch: SharedBatch) -> _Kind:
    return _Kind(batch.parcel.owner, batch.shape, batch.parcel.spread.holders)


def _shares(plan: OwnerPlan, owned: Mapping[_Kind, int]) -> dict[_Kind, _Share]:
    """``owned``: how many matrices there are."""
    shares = {}
    for kind, count in owned.items():
        sides = min(kind.shape), max(kind.shape)
        ns = None if plan.costs is None else plan.costs.cost(sides, count) / count
        shares[kind] = _Share(ns, min(count, plan.chunks[sides]))
    return shares
