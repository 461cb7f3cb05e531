"""Where the parameters of one optimizer lie by a recipe, which rank owns each matrix, and what a step is to do.

Three chapters: ranks find where their parameters lie and agree on it (:func:`lay_out`), plan who owns what
(:func:`plan`), and cut that into the tasks of a step (:func:`tasks`). A tensor that is one matrix is a stack of one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from socket import gethostname
from types import MappingProxyType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree, require_same_in_turn
from dmuon.comm.domain import Domain, make_domain
from dmuon.comm.monitor import CollectiveError, FirstError
from dmuon.comm.process_groups import this_rank
from dmuon.exchanged.config import LayoutOptions, LayoutRecipe
from dmuon.layout.matrices import Parcel, Region, Share, Strategy, numbered, spread_over_all, stack_shape, team_size
from dmuon.layout.parameters import (
    Cuts,
    ParameterLayout,
    part_among_holders,
    place,
    place_by_itself,
    place_replicated,
    place_shards,
)
from dmuon.layout.shards import ShardLayout
from dmuon.layout.topology import GlobalRank, Position, RankGrid, Ranks, listed, position_in
from dmuon.model.matrix_spec import flat_of, is_one_matrix, spec_of
from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.owner_plan import OwnerPlan, Speeds, make_plan
from dmuon.planning.strategies import Choice, Ranking, choose, find_link, ns_per_byte
from dmuon.platform.host import logger
from dmuon.platform.torch_private import local_tensor
from dmuon.solver import Matrix, unmeasured_batch
from dmuon.step.batches import Task

_log = logger(__name__)

_SHOWN_PIECES = 16
_WIRE_BYTES = 8  # of an element, to the owner and back in fp32


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Layouts:
    """What one rank knows of its parameters once all ranks that share one of them agree on it.

    Attributes:
        names: of the parameters, on this rank.
        labels: the same on all ranks that share a parameter, where ``names`` may differ.
        placed: where each parameter lies; None for one that this rank has alone.
        domains: by their ranks, those that share parameters with this one; in one order on all ranks.
        among_holders: ranks that hold the same matrices of a stack exchange these among themselves.
        plans: who is to own what, by the ranks that share it; empty before they have planned.
        strategies: how the matrices of each parameter are orthogonalized that several ranks hold; none is ``"auto"``,
            and none says how large a team is, once they have planned.
        choices: by its name in plans, what was chosen for a matrix of strategy ``"auto"``, if that is not its owner, or
            for one that was to have a team.
        rankings: by the ranks that share them, what was compared for matrices of strategy ``"auto"``.
    """

    recipe: LayoutRecipe
    params: tuple[Tensor, ...]
    names: tuple[str, ...]
    labels: tuple[str, ...]
    placed: tuple[ParameterLayout | None, ...]
    domains: Mapping[Ranks, Domain]
    among_holders: bool = False
    plans: Mapping[Ranks, OwnerPlan] = field(default_factory=dict)
    strategies: tuple[str, ...] = ()
    choices: Mapping[str, Choice] = field(default_factory=dict)
    rankings: Mapping[Ranks, Ranking] = field(default_factory=dict)

    @property
    def shared(self) -> list[tuple[Tensor, ParameterLayout]]:
        """The parameters that several ranks hold, and where they lie."""
        return [(param, one) for param, one in zip(self.params, self.placed, strict=True) if one is not None]

    def members(self, domain: Domain) -> list[Tensor]:
        """The parameters that the ranks of ``domain`` share, also those of which some of them exchange a part."""
        return [param for param, one in self.shared if domain.ranks in (one.ranks, one.whole.ranks)]

    def exchanged(self, domain: Domain) -> list[Tensor]:
        """The parameters of which the ranks of ``domain`` exchange matrices."""
        own = [(param, one) for param, one in self.shared if domain.ranks == one.ranks]
        return [param for param, one in own if one.is_part or one.stack is None]


def lay_out(
    recipe: LayoutRecipe,
    params: Sequence[Tensor],
    names: Sequence[str],
    *,
    device: torch.device | None = None,
    among_holders: bool = False,
    strategies: Mapping[int, str] = MappingProxyType({}),
) -> Layouts:
    """Find where ``params`` lie, connect the ranks that share them, and agree with them on all of it.

    Collective over the ranks that share parameters; with a grid over all of its ranks.

    Args:
        device: of the ranks' communication if there are no parameters.
        among_holders: the matrices of a stack are exchanged by the ranks that hold them, where these are some of those
            that share the stack.
        strategies: by ``id``, of those parameters that have not just owners.

    Raises:
        ValueError: on all ranks that share parameters, by the name of the one that cannot be placed or that lies
            otherwise on another rank.
    """
    if params:
        device = local_tensor(params[0]).device
    fault: ValueError | None = None
    whole: Domain | None = None
    if recipe.grid is None:
        placed, fault = _placed_alone(recipe, params, names)
    elif len(recipe.grid.ranks) == 1:
        placed, _ = place(params, names, recipe.grid, this_rank(), recipe.shard_dims)  # of one rank nothing is cut
    else:
        # Before any rank can find a fault, which it then tells the others.
        whole = make_domain(recipe.grid.ranks, device or torch.device("cpu"))
        placed = _placed_on_grid(recipe, recipe.grid, whole, params, names)
    placed = [None if one is None or len(one.ranks) == 1 else one for one in placed]
    if among_holders:
        placed = [
            one if one is None or spec_of(param).flattened or one.layout.flat else part_among_holders(one, this_rank())
            for param, one in zip(params, placed, strict=True)
        ]

    domains: dict[Ranks, Domain] = {}
    labels = list(names)
    asked: list[tuple[dist.ProcessGroup, list[tuple[str, str]]]] = []
    for ranks in sorted({one.whole.ranks for one in placed if one is not None}):
        members = [(i, one.whole) for i, one in enumerate(placed) if one is not None and one.whole.ranks == ranks]
        if whole is not None and whole.ranks == ranks:
            domains[ranks] = whole
        else:
            domains[ranks] = make_domain(ranks, local_tensor(params[members[0][0]]).device)
        for number, (i, _) in enumerate(members):
            if " " in names[i]:  # of no module: groups differ between ranks, its number among the shared does not
                labels[i] = f"{number} of those that ranks {listed(ranks, ' ')} hold together"
        described = [_described(labels[i], params[i], one, strategies.get(id(params[i]))) for i, one in members]
        asked.append((domains[ranks].group, described))
    require_same_in_turn(asked, fault)
    # Only now: a rank that has another layout would not come. What is alike as a whole is alike in its parts.
    for ranks in sorted({one.ranks for one in placed if one is not None and one.is_part} - domains.keys()):
        member = next(i for i, one in enumerate(placed) if one is not None and one.ranks == ranks)
        domains[ranks] = make_domain(ranks, local_tensor(params[member]).device)
    domains = dict(sorted(domains.items()))
    return Layouts(
        recipe,
        tuple(params),
        tuple(names),
        tuple(labels),
        tuple(placed),
        domains,
        among_holders,
        strategies=tuple(strategies.get(id(param), "owner") for param in params),
    )


def _placed_alone(
    recipe: LayoutRecipe, params: Sequence[Tensor], names: Sequence[str]
) -> tuple[list[ParameterLayout | None], ValueError | None]:
    """Where parameters lie by what they say of themselves, and the first fault, of which others must hear."""
    placed: list[ParameterLayout | None] = []
    first: ValueError | None = None
    for param, name in zip(params, names, strict=True):
        copies = recipe.copies.get(id(param))
        try:
            own = place_by_itself(param, name, this_rank())
            placed.append(own if own is not None or copies is None else place_replicated(param, copies))
        except ValueError as error:
            first = first or error
            placed.append(_suspected(param))
    return placed, first


def _suspected(param: Tensor) -> ParameterLayout | None:
    """Where a parameter that cannot be placed seems to lie, for its ranks to hear of it; None if that is unknown."""
    flat = flat_of(param)
    if flat is not None:
        return place_replicated(param, sorted(GlobalRank(rank) for row in flat.ranks for rank in row))
    if not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is None:
        return None
    return place_replicated(param, sorted(set(param.device_mesh.mesh.flatten().tolist())))


def _placed_on_grid(
    recipe: LayoutRecipe, grid: RankGrid, whole: Domain, params: Sequence[Tensor], names: Sequence[str]
) -> list[ParameterLayout | None]:
    """Where the parameters lie in ``grid``. All ranks of it go on from here, or raise.

    Each tells the others once, whatever it finds, what of its plain parameters is cut, and with whom it shares any. In
    that all of them find the same faults.
    """
    placed: list[ParameterLayout | None] = []
    cut: dict[int, Cuts] = {}
    fault: Exception | None = None
    try:
        placed, cut = place(params, names, grid, this_rank(), recipe.shard_dims)
    except Exception as error:  # whatever a user's shard_dims raises
        fault = error
    said = [(names[i], dims, tuple(params[i].shape)) for i, dims in cut.items()], {one.ranks for one in placed if one}
    told = dict(zip(whole.ranks, agree(whole.group, fault, said), strict=True))
    for i, layout in place_shards(cut, [told[rank][0] for rank in grid.ranks], grid, this_rank()).items():
        placed[i] = layout
    for rank, (_, lines) in told.items():  # does one of them wait for another that does not know of it?
        for line in sorted(lines):
            other = next((other for other in line if line not in (told[other][1] if other in told else ())), None)
            if other is not None:
                raise ValueError(
                    f"rank {rank} holds parameters together with ranks {list(line)}, and rank {other} holds none with "
                    "exactly these; give all of them the same parameters, laid out alike, and the same shard_dims"
                )
    return placed


def _described(label: str, param: Tensor, placed: ParameterLayout, strategy: str | None) -> tuple[str, str]:
    """What all ranks that share a parameter must say of it."""
    layout = placed.layout
    told = f"{layout.shape}, {param.dtype}, {spec_of(param)}, {_described_pieces(layout)}"
    return f"parameter {label!r}", told if strategy is None else f"{told}, strategy={strategy!r}"


@lru_cache(maxsize=256)
def _described_pieces(layout: ShardLayout) -> str:
    """For people what fits a line, and of the rest what tells it from others."""
    shapes = [piece.shape for piece in layout.pieces]
    if len(shapes) <= _SHOWN_PIECES:
        return f"in pieces {shapes}"
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    return f"in {len(shapes)} pieces {str(shapes[:_SHOWN_PIECES])[:-1]}, …] of digest {digest}"


# -- who owns what --------------------------------------------------------------------------------------------------


def plan(layouts: Layouts, ns: NsOptions | None = None, start_ns: int = 0) -> Layouts:
    """``layouts`` with plans of who owns what. Collective over the ranks that share parameters.

    Domains of few ranks are planned first: those of many level what these leave uneven.

    Args:
        ns: the Newton–Schulz run that costs are of; None: the default one.
        start_ns: what this rank is predicted to take for what is not exchanged.
    """
    options, ns = layouts.recipe.options, ns or NsOptions()
    plans: dict[Ranks, OwnerPlan] = {}
    choices: dict[str, Choice] = {}
    rankings: dict[Ranks, Ranking] = {}
    first = FirstError(through=(CollectiveError,))
    for ranks, domain in sorted(layouts.domains.items(), key=lambda item: (len(item[0]), item[0])):
        matrices, pools = shared_matrices(layouts, ranks)
        if not matrices:
            continue
        with first:  # the ranks of the next domains wait for this one
            per_byte = ns_per_byte(domain, options.costs)
            plans[ranks] = _planned(domain, matrices, pools, options, per_byte, ns, start_ns)
            if any(way == "auto" or team_size(way) for way in layouts.strategies):
                chosen, rest, rankings[ranks] = _chosen(
                    layouts, domain, matrices, pools, plans.pop(ranks), per_byte, ns, start_ns
                )
                choices |= chosen
                plans |= {} if rest is None else {ranks: rest}
            start_ns += _predicted_ns(matrices, choices, plans.get(ranks), domain.position)
            if domain.position == 0 and ranks in plans:
                _log.info("ranks %s exchange %s", " ".join(map(str, ranks)), plans[ranks].summary())
                if _log.isEnabledFor(logging.DEBUG):
                    _log.debug("loads and batches of what is exchanged:\n%s", plans[ranks].report())
    first.throw()
    by_label = {_label_in_plan(name, layouts.labels): choice.strategy for name, choice in choices.items()}
    pairs = zip(layouts.labels, layouts.strategies, strict=True)
    strategies = [by_label.get(label, "owner") if way == "auto" or team_size(way) else way for label, way in pairs]
    return replace(layouts, plans=plans, strategies=tuple(strategies), choices=choices, rankings=rankings)


def _predicted_ns(
    matrices: Sequence[Matrix], choices: Mapping[str, Choice], plan: OwnerPlan | None, position: Position
) -> int:
    """What one rank takes for its share of ``matrices``, of which ``plan`` has those that are left to owners."""
    chosen = [choices[matrix.name] for matrix in matrices if matrix.name in choices]
    owned = 0 if plan is None or len(chosen) == len(matrices) else plan.solution.loads_ns[position]
    return owned + round(sum(one.predicted_ns for one in chosen if not one.team or position in one.team))


def _chosen(
    layouts: Layouts,
    domain: Domain,
    matrices: Sequence[Matrix],
    pools: Sequence[frozenset[str]] | None,
    plan: OwnerPlan,
    per_byte: float,
    ns: NsOptions,
    start_ns: int,
) -> tuple[dict[str, Choice], OwnerPlan | None, Ranking]:
    """What is not left to owners, of parameters of ``"auto"`` or with teams; the plan of the rest; the comparison."""
    options = layouts.recipe.options
    ways = dict(zip(layouts.labels, layouts.strategies, strict=True))
    auto = {label for label, way in ways.items() if way == "auto"}
    of_auto = [matrix for matrix in matrices if _label_in_plan(matrix.name, auto) in auto and pools is None]
    given = {m.name: min(size, domain.world) for m in matrices if (size := team_size(ways.get(m.name, "")))}
    if given and pools is not None:
        name = next(iter(given))
        raise ValueError(
            f"strategy={ways[name]!r} for {name!r}, and of ranks {listed(domain.ranks)}, which hold it, only some hold "
            "matrices of a stack together: use 'sharded', by all of them, or 'owner'"
        )
    small = {m.name for m in of_auto if m.rows * m.cols <= options.small_param_numel_threshold}
    if not of_auto and not given:
        return {}, plan, ()
    link, gains = find_link(domain, per_byte, options.costs)
    if not gains:
        of_auto = []
    if not of_auto and not given:
        return {}, plan, ()
    whole = {matrix.name for matrix in of_auto if matrix.name in auto}

    def replan(some: Sequence[Matrix], before: Sequence[int]) -> OwnerPlan:
        return _planned(domain, some, None, options, per_byte, ns, start_ns + before[domain.position])

    chosen, rest, ranking = choose(
        matrices,
        whole,
        small if of_auto else (),
        given,
        plan,
        replan,
        link,
        domain.device,
        ns,
        exchange_ns=2 * link.latency_ns,
        carried_ns_per_byte=link.ns_per_byte,
    )
    return chosen, rest, ranking if of_auto else ()


def _label_in_plan(name: str, labels: Collection[str]) -> str:
    """That of the parameter of a matrix."""
    return name if name in labels else name.rpartition("[")[0]


def shared_matrices(layouts: Layouts, ranks: Ranks) -> tuple[list[Matrix], list[frozenset[str]] | None]:
    """What the ranks share and one of them is to own, and what each of them may own; None: all of it."""
    matrices: list[Matrix] = []
    pools: list[set[str]] = [{""} for _ in ranks]
    columns = zip(layouts.params, layouts.labels, layouts.placed, layouts.strategies, strict=True)
    for param, label, placed, strategy in columns:
        if placed is None or placed.ranks != ranks:
            continue
        if strategy not in ("owner", "auto", "fused") and not team_size(strategy):
            continue
        for share, numbers in numbered(placed.layout, spec_of(param), placed.first):
            if len(share.spread.holders) == 1:
                continue
            pool = "" if len(share.spread.holders) == len(ranks) else f"ranks {share.spread.holders}"
            for holder in share.spread.holders if pool else ():
                pools[holder].add(pool)
            m, n = share.spread.layout.shape
            for number in numbers:
                matrices.append(Matrix(_name_in_plan(param, label, number), m, n, "", m * n * _WIRE_BYTES, pool))
    alike = all(pool == {""} for pool in pools)
    return matrices, None if alike else [frozenset(pool) for pool in pools]


def _planned(
    domain: Domain,
    matrices: Sequence[Matrix],
    pools: list[frozenset[str]] | None,
    options: LayoutOptions,
    per_byte: float,
    ns: NsOptions,
    start_ns: int,
) -> OwnerPlan:
    said: list[tuple[str, Speeds, int]] = agree(domain.group, None, (gethostname(), options.ranks, start_ns))
    other = next((rank for rank, (_, ranks, _) in zip(domain.ranks, said, strict=True) if ranks != said[0][1]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} was given ranks={said[position_in(domain.ranks, other)][1]!r}, and rank {domain.ranks[0]} "
            f"ranks={said[0][1]!r}; give all of them the same"
        )
    return make_plan(
        matrices,
        domain.group,
        domain.device,
        costs=options.costs,
        solve=options.solve,
        hosts=[host for host, _, _ in said],
        starts=[start for _, _, start in said],
        pools=pools,
        ns_per_byte=per_byte,
        ranks=options.ranks,
        ns=ns,
    )


def _name_in_plan(param: Tensor, label: str, number: int) -> str:
    """How plans call matrix ``number`` of a parameter."""
    return label if is_one_matrix(param) else f"{label}[{number}]"


def planned_owners(layouts: Layouts) -> dict[int, GlobalRank]:
    """Index to the owner: of what this rank has alone it is that, and of several matrices the owner of the first."""
    owners: dict[int, GlobalRank] = {}
    for index, placed in enumerate(layouts.placed):
        planned = {} if placed is None else _owners_in_plan(layouts, index, placed)
        owners[index] = next(iter(planned.values()), this_rank())
    return owners


def _owners_in_plan(layouts: Layouts, index: int, placed: ParameterLayout) -> dict[int, GlobalRank]:
    """By number, the planned owner of each matrix of a parameter; its first holder where nothing is planned."""
    param, label = layouts.params[index], layouts.labels[index]
    planned = layouts.plans[placed.ranks].owners if placed.ranks in layouts.plans else {}
    return {
        number: placed.ranks[planned.get(_name_in_plan(param, label, number), share.spread.holders[0])]
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
        owners: by index, without :func:`owner_fault`; a stack keeps the owners that were planned for its matrices if
            the plan says the same of its first one, and goes to its owner as a whole otherwise.
    """
    result: list[Task] = []
    for index, (placed, owner) in enumerate(zip(layouts.placed, owners, strict=True)):
        if placed is None:
            continue
        planned = _owners_in_plan(layouts, index, placed)
        if placed.ranks not in layouts.plans or owner not in [*planned.values()][:1]:
            planned = dict.fromkeys(planned, owner)
        result += _tasks_of(layouts, index, placed, planned, rank)
    return result


def _tasks_of(
    layouts: Layouts, index: int, placed: ParameterLayout, owners: Mapping[int, GlobalRank], rank: GlobalRank
) -> list[Task]:
    """Matrices of one parameter, in ranges that one rank orthogonalizes, by the owner of each number."""
    result = []
    param = layouts.params[index]
    spec = spec_of(param)
    local_shape, flat = local_tensor(param).shape, placed.layout.flat
    stack = (1, 1, local_shape.numel()) if flat else stack_shape(local_shape, spec)
    is_one = is_one_matrix(param)
    domain, position = layouts.domains[placed.ranks], position_in(placed.ranks, rank)
    offset = 0  # in the local stack
    before: Share | None = None
    for share, numbers in numbered(placed.layout, spec, placed.first):
        if before is not None and before.start != share.start and position in before.spread.holders:
            offset += before.stop - before.start
        before = share
        local = position in share.spread.holders
        if not local and len(share.spread.holders) == 1:  # nobody else needs to know of what one rank has alone
            continue
        m, n = share.spread.layout.shape
        plan = layouts.plans.get(placed.ranks)
        planned = None if plan is None else plan.chunks.get((min(m, n), max(m, n)))
        nbytes = m * n * torch.promote_types(param.dtype, torch.float32).itemsize
        size = max(1, min(planned or unmeasured_batch((m, n)), layouts.recipe.options.chunk_bytes // nbytes))
        strategy = cast(Strategy, layouts.strategies[index]) if len(share.spread.holders) > 1 else "owner"
        choice = layouts.choices.get(layouts.labels[index])
        team = () if choice is None or len(share.spread.holders) == 1 else choice.team
        for start, stop, owner in _ranges(placed.ranks, share.spread.holders, [owners[number] for number in numbers]):
            span = (offset + start, offset + stop) if local else (0, 0)
            if flat:
                region = Region(stack, (0, 1), 2, share.runs[position], is_all=is_one)
            else:
                region = Region(stack, span, spec.dim, share.runs.get(position, ()))
            task = Task(
                param,
                index,
                (m, n),
                size,
                region if flat or not is_one else None,
                spec.transposed,
                tuple(numbers[start:stop]),
                domain,
                Parcel(stop - start, share.spread, team[0] if team else owner, strategy, team),
                (placed.layout, spec),
            )
            result.append(task)
    return result


def whole_parcel(placed: ParameterLayout, owner: GlobalRank) -> Parcel:
    """One matrix, or a stack as a whole, that ``owner`` gets."""
    if owner not in placed.ranks:
        raise _not_held(placed, owner, "update")
    return Parcel(1, spread_over_all(placed.layout), position_in(placed.ranks, owner))


def _not_held(placed: ParameterLayout, owner: GlobalRank, name: str) -> ValueError:
    return ValueError(
        f"Invalid rank {owner} for parameter {name!r}: it lies on ranks {list(placed.ranks)}, one of which must own it"
    )


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
