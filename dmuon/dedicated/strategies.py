"""Matrices that dedication gives no owner: by the user's word, or since another strategy is predicted to take less."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from dmuon.comm.context import Comm
from dmuon.comm.domain import Domain
from dmuon.dedicated.inspection import Inspected
from dmuon.layout.matrices import team_size, ways_of
from dmuon.model.routing import Route
from dmuon.planning.agreed_plan import Costs
from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.owner_plan import OwnerPlan, PlanSource
from dmuon.planning.strategies import SMALL_PARAM_NUMEL, Choice, choose, find_link, ns_per_byte, told
from dmuon.solver import Matrix


def checked_strategy(strategy: str | Mapping[str, str], plan: PlanSource) -> dict[str, str]:
    """Patterns of names and what they have, if dedication knows of all.

    Raises:
        TypeError, ValueError: it does not, or the choice of ``"auto"`` is to be one of an earlier plan.
    """
    given = ways_of(strategy)
    for name in given.values():
        if name not in ("owner", "sharded", "auto") and team_size(name) < 2:
            raise ValueError(
                f"strategy={name!r} of dedicate_params: a matrix has an owner ('owner'), or all ranks or a team "
                "orthogonalize it together ('sharded', 'sharded:2'), or 'auto' chooses; others are for "
                "dmuon.Muon(model, strategy=…) of a model that was not dedicated"
            )
        if name == "auto" and plan is not None:
            raise ValueError(
                "plan= says who owns what, and strategy='auto' chooses that anew; leave plan= out, or give the "
                "strategies that the log told as that plan was made"
            )
    return dict(given)


def with_strategies(routes: Sequence[Route], strategies: Mapping[str, str]) -> list[Route]:
    """``routes``, without owners of what a strategy leaves to several ranks; ``"auto"`` of what may be left.

    Raises:
        ValueError: by name, several matrices in one tensor, which a team cannot have.
    """
    result: list[Route] = []
    for route in routes:
        way = next((way for pattern, way in strategies.items() if fnmatchcase(route.fqn, pattern)), "owner")
        is_one = route.spec.is_whole and route.param.ndim == 2
        if route.block is not None and team_size(way) and not is_one:
            raise ValueError(f"strategy={way!r} for {route.fqn!r}, which is several matrices: use 'sharded' or 'owner'")
        if route.block is None or way == "owner" or (way == "auto" and not is_one):
            result.append(route)
        else:
            result.append(replace(route, strategy=way) if way == "auto" else _left(route, way))
    return result


def _left(route: Route, way: str, predicted: str = "") -> Route:
    """``route`` without an owner.

    Args:
        predicted: why, for people.
    """
    who = {"sharded": "all ranks orthogonalize it together", "replicated": "every rank orthogonalizes it"}
    does = who.get(way, f"a team of {team_size(way)} ranks orthogonalizes it together")
    reason = f"strategy={way!r}{predicted}: left to fully_shard, and {does}"
    return replace(route, block=None, block_module=None, reason=reason, strategy=way)


def chosen(
    inspected: Inspected,
    plan: OwnerPlan,
    planned: Callable[[Sequence[Matrix], Sequence[int] | None], OwnerPlan],
    comm: Comm,
    costs: Costs,
    ns: NsOptions,
    passes: int,
) -> tuple[Inspected, OwnerPlan]:
    """Routes of which none is ``"auto"`` any more, and the plan of those that have owners. Collective.

    FSDP2 gathers and reduces a block by one collective each; dedication by one for each rank that owns some of it,
    unless ``transport="single"``. So many more latencies are what a step waits for owners. ``"auto"`` counts as
    broadcasts, though NCCL sends some blocks at once: which ones follows from the owners that this looks for.

    Args:
        plan: of all matrices.
        planned: plans some of them, for ranks that have other work.
        passes: how often a step gathers or reduces a block.
    """
    matrices = inspected.matrices()
    auto = {route.fqn for route in inspected.routes if route.strategy == "auto"}
    choices: dict[str, Choice] = {}
    predicted, gains = "", False
    if comm.topology.tensor == 1 < comm.world:
        domain = Domain(comm.ranks, comm.position, comm.device, comm.group, comm.monitor, lane=None)
        link, gains = find_link(domain, ns_per_byte(domain, costs), costs)
    if gains:
        owners = {(matrix.block, plan.owners[matrix.name]) for matrix in matrices}
        more = 0 if comm.options.transport == "single" else len(owners) - len({block for block, _ in owners})
        choices, rest, ranking = choose(
            matrices,
            auto,
            {m.name for m in matrices if m.name in auto and m.rows * m.cols <= SMALL_PARAM_NUMEL},
            {},
            plan,
            planned,
            link,
            comm.device,
            ns,
            exchange_ns=passes * more * link.latency_ns,
            carried_ns_per_byte=0.0,
        )
        predicted = f", chosen since all matrices are predicted to take {', then '.join(told(ranking))}"
        if choices:
            plan = rest if rest is not None and len(choices) < len(matrices) else planned([], None)
    routes = []
    for route in inspected.routes:
        if (choice := choices.get(route.fqn)) is not None:
            routes.append(_left(route, f"sharded:{len(choice.team)}" if choice.team else choice.strategy, predicted))
        else:
            routes.append(replace(route, strategy="owner") if route.strategy == "auto" else route)
    return replace(inspected, routes=routes), plan
