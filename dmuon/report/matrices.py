"""Matrix by matrix: where it lies, who orthogonalizes it, and at what predicted cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.dedication import Dedication
from dmuon.dedicated.matrix import resting
from dmuon.exchanged.user_round import UserRound
from dmuon.layout.matrices import Parcel, numbered
from dmuon.layout.topology import GlobalRank
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import flat_of, is_one_matrix, spec_of
from dmuon.optimizer.groups import inside_ddp
from dmuon.optimizer.muon import Muon
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.step.batches import Batch, SharedBatch


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
