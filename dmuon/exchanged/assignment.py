"""Which rank owns each matrix that several ranks hold: planned, and cut into tasks of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dmuon.comm.agreement import agree
from dmuon.comm.domain import Domain
from dmuon.exchanged.layouts import LayoutOptions, Layouts, Ranks
from dmuon.layout.parameters import ParameterLayout
from dmuon.layout.parcels import Parcel
from dmuon.layout.shards import Cell, cells
from dmuon.layout.topology import GlobalRank, Position, position_in, positions
from dmuon.planning.agreed_plan import make_plan
from dmuon.planning.cost_lookup import link_ns_per_byte
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.host import HostShare, warn_if_oversubscribed
from dmuon.solver import Matrix
from dmuon.step.batches import Shared, Task, unplanned_batch_size

_NOMINAL_NS_PER_BYTE = 1 / 50  # 50 GB/s, beside costs that are estimated from FLOPs
_WIRE_BYTES = 8  # of an element, to the owner and back in fp32


# -- plans ----------------------------------------------------------------------------------------------------------


def plan(layouts: Layouts, last: Layouts | None = None) -> Layouts:
    """``layouts`` with plans of who owns what. Collective over the ranks that share parameters.

    Args:
        last: of the same optimizer before. Ranks that share the same matrices as then keep their plan: they agree on
            the matrices, and so on this as well.
    """
    options = layouts.recipe.options
    plans: dict[Ranks, OwnerPlan] = {}
    for ranks, domain in layouts.domains.items():
        matrices, pools = _matrices(layouts, ranks)
        if not matrices:
            continue
        old = last.plans.get(ranks) if last is not None and last.recipe.options == options else None
        if old is None or old.matrices != tuple(matrices):
            old = _planned(domain, matrices, pools, options)
        plans[ranks] = old
    return replace(layouts, plans=plans)


def _matrices(layouts: Layouts, ranks: Ranks) -> tuple[list[Matrix], list[frozenset[str]] | None]:
    """What the ranks share, and what each of them may own; None: all of it."""
    matrices: list[Matrix] = []
    pools: list[set[str]] = [{""} for _ in ranks]
    for label, placed in zip(layouts.labels, layouts.placed, strict=True):
        if placed is None or placed.ranks != ranks:
            continue
        shape = placed.layout.shape
        if len(shape) == 2:
            matrices.append(Matrix(label, *shape, "", shape[0] * shape[1] * _WIRE_BYTES))
            continue
        for cell in cells(placed.layout):
            if len(cell.holders) == 1:
                continue
            pool = f"ranks {cell.holders}"
            for holder in cell.holders:
                pools[holder].add(pool)
            m, n = cell.layout.shape
            for number in range(cell.start, cell.stop):
                matrices.append(Matrix(_of_stack(label, number), m, n, "", m * n * _WIRE_BYTES, pool))
    alike = all(pool == {""} for pool in pools)
    return matrices, None if alike else [frozenset(pool) for pool in pools]


def _planned(
    domain: Domain, matrices: list[Matrix], pools: list[frozenset[str]] | None, options: LayoutOptions
) -> OwnerPlan:
    shares: list[HostShare] = agree(domain.group, None, HostShare.here())
    if domain.device.type == "cpu":
        warn_if_oversubscribed(shares, domain.position)
    per_byte = _NOMINAL_NS_PER_BYTE if options.costs == "flops" else link_ns_per_byte(domain)
    return make_plan(
        matrices,
        domain.group,
        domain.device,
        costs=options.costs,
        solve=options.solve,
        hosts=[share.host for share in shares],
        pools=pools,
        ns_per_byte=per_byte,
    )


def _of_stack(label: str, number: int) -> str:
    """How plans call matrix ``number`` of a stack."""
    return f"{label}[{number}]"


# -- owners ---------------------------------------------------------------------------------------------------------


def planned_owners(layouts: Layouts, rank: GlobalRank) -> dict[int, GlobalRank]:
    """Index to the owner; of a stack of matrices, to that of its first matrix.

    Args:
        rank: this one, which owns what it has alone.
    """
    owners: dict[int, GlobalRank] = {}
    for index, (label, placed) in enumerate(zip(layouts.labels, layouts.placed, strict=True)):
        if placed is None:
            owners[index] = rank
        elif len(placed.layout.shape) == 3:
            owners[index] = _stack_owners(layouts, label, placed)[0]
        else:
            owners[index] = placed.ranks[layouts.plans[placed.ranks].owners[label]]
    return owners


def _stack_owners(layouts: Layouts, label: str, placed: ParameterLayout) -> list[GlobalRank]:
    """The planned owner of each matrix of a stack; its first holder where nothing is planned."""
    planned = layouts.plans[placed.ranks].owners if placed.ranks in layouts.plans else {}
    return [
        placed.ranks[planned.get(_of_stack(label, number), cell.holders[0])]
        for cell in cells(placed.layout)
        for number in range(cell.start, cell.stop)
    ]


# -- tasks ----------------------------------------------------------------------------------------------------------


def tasks(layouts: Layouts, owners: Sequence[GlobalRank], rank: GlobalRank) -> list[Task]:
    """Who orthogonalizes each parameter that several ranks hold, and where its pieces lie.

    Args:
        owners: by index; a stack keeps the owners that were planned for its matrices if the plan says the
            same of its first one, and goes to its owner as a whole otherwise.
        rank: this one.

    Raises:
        ValueError: an owner that does not hold its parameter.
    """
    result: list[Task] = []
    columns = zip(layouts.names, layouts.labels, layouts.placed, owners, strict=True)
    for index, (name, label, placed, owner) in enumerate(columns):
        if placed is None:
            continue
        if len(placed.layout.shape) == 3:
            planned = _stack_owners(layouts, label, placed) if placed.ranks in layouts.plans else []
            as_planned = planned if planned[:1] == [owner] else [owner] * placed.layout.shape[0]
            result += _stack_tasks(layouts, index, placed, as_planned, rank)
        else:
            shared = Shared(layouts.domains[placed.ranks], whole_parcel(placed, owner, name))
            result.append(_task(layouts, index, shared, slice(0, 1)))
    return result


def _task(layouts: Layouts, index: int, shared: Shared, span: slice, first: int = 0) -> Task:
    """Batched as planned, within the bytes that the options allow."""
    param, parcel = layouts.params[index], shared.parcel
    m, n = parcel.layout.shape
    sides = min(m, n), max(m, n)
    plan = layouts.plans.get(shared.domain.ranks)
    planned = None if plan is None else plan.chunks.get(sides)
    packed = sum(parcel.from_owner.numel_out(parcel.owner).values())  # as many copies as there are elsewhere
    numel = max(m * n, packed // parcel.count)  # of one matrix, on the owner at once
    nbytes = numel * torch.promote_types(param.dtype, torch.float32).itemsize
    size = min(planned or unplanned_batch_size((m, n)), layouts.recipe.options.chunk_bytes // nbytes)
    variants = {} if plan is None else plan.variants.get(sides, {})
    return Task(param, index, (m, n), max(1, size), variants, span, first, shared)


def whole_parcel(placed: ParameterLayout, owner: GlobalRank, name: str) -> Parcel:
    """One matrix, or a stack as a whole, that ``owner`` gets.

    Raises:
        ValueError: ``owner`` does not hold the parameter.
    """
    if owner not in placed.ranks:
        raise ValueError(
            f"Invalid rank {owner} for parameter {name!r}: it lies on ranks {list(placed.ranks)}, one of which must "
            "own it"
        )
    return Parcel(1, placed.layout, positions(len(placed.ranks)), position_in(placed.ranks, owner))


def _stack_tasks(
    layouts: Layouts, index: int, placed: ParameterLayout, owners: Sequence[GlobalRank], rank: GlobalRank
) -> list[Task]:
    """Matrices of a stack, in ranges that one rank orthogonalizes."""
    result = []
    offset = 0  # in the local stack
    domain, position = layouts.domains[placed.ranks], position_in(placed.ranks, rank)
    for cell in cells(placed.layout):
        local = position in cell.holders
        if local or len(cell.holders) > 1:  # nobody else needs to know of what one rank has alone
            for start, stop, owner in _ranges(placed.ranks, cell, owners):
                parcel = Parcel(stop - start, cell.layout, cell.holders, owner)
                begin = offset + start - cell.start
                span = slice(begin, begin + parcel.count) if local else slice(0, 0)
                result.append(_task(layouts, index, Shared(domain, parcel), span, start))
        offset += cell.stop - cell.start if local else 0
    return result


def _ranges(ranks: Ranks, cell: Cell, owners: Sequence[GlobalRank]) -> list[tuple[int, int, Position]]:
    """``(start, stop, position of the owner)``: as many matrices each as in ``owners``, but neighbours."""
    counts = dict.fromkeys(cell.holders, 0)
    for owner in owners[cell.start : cell.stop]:
        position = position_in(ranks, owner) if owner in ranks else cell.holders[0]
        counts[position if position in counts else cell.holders[0]] += 1
    result = []
    start = cell.start
    for position, count in counts.items():
        if count:
            result.append((start, start + count, position))
            start += count
    return result
