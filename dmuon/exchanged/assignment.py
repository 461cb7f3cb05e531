"""Which rank owns each matrix that several ranks hold: planned, and cut into tasks of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.comm.agreement import agree
from dmuon.comm.domain import Domain
from dmuon.comm.monitor import CollectiveError
from dmuon.exchanged.layouts import LayoutOptions, Layouts
from dmuon.layout.matrices import Region, Share, numbered, stack_shape
from dmuon.layout.parameters import ParameterLayout
from dmuon.layout.parcels import Parcel, spread_over_all
from dmuon.layout.topology import GlobalRank, Position, Ranks, position_in
from dmuon.model.matrix_spec import is_one_matrix, spec_of
from dmuon.planning.agreed_plan import Speeds, link_ns_per_byte, make_plan
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.host import HostShare, warn_if_oversubscribed
from dmuon.platform.log import logger
from dmuon.platform.torch_private import local_tensor
from dmuon.solver import Matrix, unmeasured_batch
from dmuon.step.batches import Shared, Task

_log = logger(__name__)

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
    fault: Exception | None = None
    for ranks, domain in layouts.domains.items():
        matrices, pools = shared_matrices(layouts, ranks)
        if not matrices:
            continue
        old = last.plans.get(ranks) if last is not None and last.recipe.options == options else None
        if old is not None and old.matrices == tuple(matrices):
            _log.debug("ranks %s share the same matrices as before, and keep their plan", ranks)
            plans[ranks] = old
            continue
        try:
            plans[ranks] = _planned(domain, matrices, pools, options)
        except CollectiveError:
            raise
        except Exception as error:  # the ranks of the next domains wait for this one
            fault = fault or error
            continue
        if domain.position == 0:
            _tell(plans[ranks], ranks)
    if fault is not None:
        raise fault
    return replace(layouts, plans=plans)


def _tell(plan: OwnerPlan, ranks: Ranks) -> None:
    """One of the ranks tells the log."""
    _log.info("ranks %s exchange %s", " ".join(map(str, ranks)), plan.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("loads, batches and variants of what is exchanged:\n%s", plan.report())


def shared_matrices(layouts: Layouts, ranks: Ranks) -> tuple[list[Matrix], list[frozenset[str]] | None]:
    """What the ranks share, and what each of them may own; None: all of it."""
    matrices: list[Matrix] = []
    pools: list[set[str]] = [{""} for _ in ranks]
    for param, label, placed in zip(layouts.params, layouts.labels, layouts.placed, strict=True):
        if placed is None or placed.ranks != ranks:
            continue
        if is_one_matrix(param):
            m, n = placed.layout.shape
            matrices.append(Matrix(label, m, n, "", m * n * _WIRE_BYTES))
            continue
        for share, numbers in numbered(placed.layout, spec_of(param), placed.first):
            if len(share.holders) == 1:
                continue
            pool = "" if len(share.holders) == len(ranks) else f"ranks {share.holders}"
            for holder in share.holders:
                pools[holder].add(pool)
            m, n = share.layout.shape
            for number in numbers:
                matrices.append(Matrix(_of_several(label, number), m, n, "", m * n * _WIRE_BYTES, pool))
    alike = all(pool == {""} for pool in pools)
    return matrices, None if alike else [frozenset(pool) for pool in pools]


def _planned(
    domain: Domain, matrices: list[Matrix], pools: list[frozenset[str]] | None, options: LayoutOptions
) -> OwnerPlan:
    said: list[tuple[HostShare, Speeds]] = agree(domain.group, None, (HostShare.here(), options.ranks))
    shares = [share for share, _ in said]
    other = next((rank for rank, (_, ranks) in zip(domain.ranks, said, strict=True) if ranks != said[0][1]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} was given ranks={said[position_in(domain.ranks, other)][1]!r}, and rank {domain.ranks[0]} "
            f"ranks={said[0][1]!r}; give all of them the same"
        )
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
        ranks=options.ranks,
    )


def _of_several(label: str, number: int) -> str:
    """How plans call matrix ``number`` of a parameter."""
    return f"{label}[{number}]"


# -- owners ---------------------------------------------------------------------------------------------------------


def planned_owners(layouts: Layouts, rank: GlobalRank) -> dict[int, GlobalRank]:
    """Index to the owner; of a parameter that is several matrices, to that of the first of them.

    Args:
        rank: this one, which owns what it has alone.
    """
    owners: dict[int, GlobalRank] = {}
    columns = zip(layouts.params, layouts.labels, layouts.placed, strict=True)
    for index, (param, label, placed) in enumerate(columns):
        if placed is None:
            owners[index] = rank
        elif is_one_matrix(param):
            owners[index] = placed.ranks[layouts.plans[placed.ranks].owners[label]]
        else:
            owners[index] = next(iter(_owners_of_several(layouts, param, label, placed).values()), rank)
    return owners


def _owners_of_several(layouts: Layouts, param: Tensor, label: str, placed: ParameterLayout) -> dict[int, GlobalRank]:
    """By number, the planned owner of each matrix; its first holder where nothing is planned."""
    planned = layouts.plans[placed.ranks].owners if placed.ranks in layouts.plans else {}
    return {
        number: placed.ranks[planned.get(_of_several(label, number), share.holders[0])]
        for share, numbers in numbered(placed.layout, spec_of(param), placed.first)
        for number in numbers
    }


# -- tasks ----------------------------------------------------------------------------------------------------------


def owner_fault(layouts: Layouts, owners: Sequence[GlobalRank]) -> ValueError | None:
    """What is wrong where an owner does not hold its matrix."""
    for param, name, placed, owner in zip(layouts.params, layouts.names, layouts.placed, owners, strict=True):
        if placed is not None and is_one_matrix(param) and owner not in placed.ranks:
            return _not_held(placed, owner, name)
    return None


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
    for index, (name, placed, owner) in enumerate(zip(layouts.names, layouts.placed, owners, strict=True)):
        if placed is None:
            continue
        param, label = layouts.params[index], layouts.labels[index]
        if is_one_matrix(param):
            shared = Shared(layouts.domains[placed.ranks], whole_parcel(placed, owner, name))
            result.append(_task(layouts, index, shared, None, (0,)))
            continue
        planned = _owners_of_several(layouts, param, label, placed)
        if placed.ranks not in layouts.plans or owner not in [*planned.values()][:1]:
            planned = dict.fromkeys(planned, owner)
        result += _tasks_of_several(layouts, index, placed, planned, rank)
    return result


def _task(layouts: Layouts, index: int, shared: Shared, region: Region | None, numbers: tuple[int, ...]) -> Task:
    """Batched as planned, within the bytes that the options allow."""
    param, parcel = layouts.params[index], shared.parcel
    m, n = parcel.layout.shape
    sides = min(m, n), max(m, n)
    plan = layouts.plans.get(shared.domain.ranks)
    planned = None if plan is None else plan.chunks.get(sides)
    nbytes = m * n * torch.promote_types(param.dtype, torch.float32).itemsize
    size = min(planned or unmeasured_batch((m, n)), layouts.recipe.options.chunk_bytes // nbytes)
    variants = {} if plan is None else plan.variants.get(sides, {})
    transposed = spec_of(param).transposed
    return Task(param, index, (m, n), max(1, size), variants, region, transposed, numbers, shared)


def whole_parcel(placed: ParameterLayout, owner: GlobalRank, name: str) -> Parcel:
    """One matrix, or a stack as a whole, that ``owner`` gets.

    Raises:
        ValueError: ``owner`` does not hold the parameter.
    """
    if owner not in placed.ranks:
        raise _not_held(placed, owner, name)
    return Parcel(1, spread_over_all(placed.layout), position_in(placed.ranks, owner))


def _not_held(placed: ParameterLayout, owner: GlobalRank, name: str) -> ValueError:
    return ValueError(
        f"Invalid rank {owner} for parameter {name!r}: it lies on ranks {list(placed.ranks)}, one of which must own it"
    )


def _tasks_of_several(
    layouts: Layouts, index: int, placed: ParameterLayout, owners: Mapping[int, GlobalRank], rank: GlobalRank
) -> list[Task]:
    """Matrices of one parameter, in ranges that one rank orthogonalizes.

    Args:
        owners: by number.
    """
    result = []
    param = layouts.params[index]
    spec = spec_of(param)
    stack = stack_shape(local_tensor(param).shape, spec)
    domain, position = layouts.domains[placed.ranks], position_in(placed.ranks, rank)
    offset = 0  # in the local stack
    before: Share | None = None
    for share, numbers in numbered(placed.layout, spec, placed.first):
        if before is not None and before.start != share.start and position in before.holders:
            offset += before.stop - before.start
        before = share
        local = position in share.holders
        if local or len(share.holders) > 1:  # nobody else needs to know of what one rank has alone
            for start, stop, owner in _ranges(placed.ranks, share.holders, [owners[number] for number in numbers]):
                parcel = Parcel(stop - start, share.spread, owner)
                span = (offset + start, offset + stop) if local else (0, 0)
                region = Region(stack, span, spec.dim, share.runs.get(position, ()))
                shared = Shared(domain, parcel, (placed.layout, spec))
                result.append(_task(layouts, index, shared, region, tuple(numbers[start:stop])))
    return result


def _ranges(ranks: Ranks, holders: Sequence[Position], owners: Sequence[GlobalRank]) -> list[tuple[int, int, Position]]:
    """``(start, stop, position of the owner)``: as many matrices each as in ``owners``, but neighbours."""
    counts = dict.fromkeys(holders, 0)
    for owner in owners:
        position = position_in(ranks, owner) if owner in ranks else holders[0]
        counts[position if position in counts else holders[0]] += 1
    result = []
    start = 0
    for position, count in counts.items():
        if count:
            result.append((start, start + count, position))
            start += count
    return result
