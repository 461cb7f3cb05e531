"""What a rank knows of its model before it talks to any other, and what of it ``dedicate_params`` cannot take.

Everything here but :func:`chosen` is local: what is wrong is refused by name before anything communicates, and what all
ranks must have in common is described, for them to compare.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from dmuon.comm.context import Comm
from dmuon.comm.domain import Domain
from dmuon.dedicated.dedication import dedication_of
from dmuon.dedicated.matrix import holders_of
from dmuon.dedicated.replicated import dedicated_roots, excluded_modules, held_by, holder_of, shared_with
from dmuon.layout.matrices import team_size, ways_of
from dmuon.layout.topology import GlobalRank, Topology, topology_of
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.routing import Route
from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.owner_plan import Costs, OwnerPlan, PlanSource
from dmuon.planning.strategies import SMALL_PARAM_NUMEL, Choice, choose, find_link, ns_per_byte, told
from dmuon.platform.host import all_living
from dmuon.platform.torch_private import replicate_group
from dmuon.solver import Matrix

_WRAPPERS: dict[type, str] = {
    nn.DataParallel: "one process per device, over a mesh, takes its place",
    nn.parallel.DistributedDataParallel: "a mesh dimension named 'replicate' is data parallelism with full copies",
    FullyShardedDataParallel: "use dmuon.fully_shard (FSDP2) after dedicate_params instead of FSDP1",
}

# The host of a process, the ranks that tensor parallelism splits it over, and what it is to do by earlier plans.
Seat = tuple[str, list[GlobalRank], int]


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a rank knows of its model before it talks to any other.

    Attributes:
        roots: the model; or the modules that are dedicated together, by the prefix of their names.
        whole: the model, or a list of them.
        tensor_mesh: over which tensor parallelism has split matrices, 1-D; None without.
        description: what all ranks must have in common, by name.
        seat: the host of this process, and the global ranks over which tensor parallelism splits its model.
    """

    roots: dict[str, nn.Module]
    whole: nn.Module
    routes: list[Route]
    policy: MixedPrecisionPolicy
    tensor_mesh: DeviceMesh | None
    description: list[tuple[str, str]]
    seat: Seat

    def dtype_of(self, route: Route) -> torch.dtype:
        """The dtype in which the matrix of ``route`` travels and is computed with."""
        return self.policy.param_dtype or route.param.dtype

    def matrices(self) -> list[Matrix]:
        """The matrices that need owners, as the solver takes them."""
        return [
            Matrix(name, m, n, r.block, m * n * self.dtype_of(r).itemsize, _pool(holders))
            for r in self.routes
            if r.block is not None
            for (name, m, n), holders in zip(r.spec.named(r.fqn, r.param.shape), holders_of(r.param), strict=True)
        ]

    def pools(self, topology: Topology) -> list[frozenset[str]] | None:
        """What each rank may own: of a stack that tensor parallelism has cut by its matrices, those that it has.

        None: everything.
        """
        cut = {holders for r in self.routes if r.block is not None for holders in holders_of(r.param)}
        if cut == {()}:
            return None
        return [frozenset(_pool(held) for held in cut if not held or at.t in held) for at in topology.coordinates]


def _pool(holders: Sequence[int]) -> str:
    return f"tensor-parallel ranks {' '.join(map(str, holders))}" if holders else ""


def describe(
    model: nn.Module, theirs: Collection[int], routes: Sequence[Route], options: dict[str, object]
) -> list[tuple[str, str]]:
    """By name, what must be the same on all ranks; parameters come in the order of their collectives.

    Args:
        theirs: by ``id``, what belongs to models that were dedicated in this one before.
    """
    items = [(f"option {name}", str(value)) for name, value in options.items()]
    for r in routes:
        by = "" if r.spec == MatrixSpec() else f" by {r.spec}"
        route = f"Muon{'' if r.block is None else f' in block {r.block}'}{by}" if r.muon else "AdamW"
        frozen = "" if r.param.requires_grad else ", frozen"
        items.append(
            (f"parameter {r.fqn!r}", f"{tuple(r.param.shape)}, {r.param.dtype}, {route}{frozen}{_where(r.param)}")
        )
    for name, buffer in model.named_buffers():
        if id(buffer) not in theirs:
            items.append((f"buffer {canonical_fqn(name)!r}", f"{tuple(buffer.shape)}, {buffer.dtype}{_where(buffer)}"))
    return items


def _where(tensor: Tensor) -> str:
    return ", on the meta device" if tensor.is_meta else ""


# -- refusals ---------------------------------------------------------------------------------------------------------


def check_mesh(mesh: DeviceMesh) -> Topology:
    """The topology of a mesh that lives in the current process group.

    Raises:
        TypeError, ValueError: with the remedy.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "mesh must be a torch.distributed DeviceMesh, such as init_device_mesh('cuda', (8,)), "
            f"got {type(mesh).__name__}"
        )
    if not dist.is_initialized():
        raise ValueError(
            "mesh: torch.distributed is not initialized (or was torn down after the mesh was made); call "
            "init_process_group and init_device_mesh first. In one process, dmuon.Muon(model) alone is enough"
        )
    ranks = mesh.mesh.flatten().tolist()
    world = dist.get_world_size()
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(not 0 <= r < world for r in ranks):
        raise ValueError(
            f"mesh holds ranks {ranks}, which does not match the process group: this is rank {dist.get_rank()} of "
            f"{world}; build the mesh with init_device_mesh over the current process group"
        )
    for dim in range(mesh.ndim):
        try:
            members = dist.get_process_group_ranks(mesh.get_group(dim))
        except RuntimeError as fault:
            raise ValueError(f"mesh: its process group is gone ({fault}); build it anew over the current one") from None
        line = mesh.mesh.movedim(dim, -1)[tuple(at for i, at in enumerate(coordinate) if i != dim)].tolist()
        if members != sorted(line):
            raise ValueError(
                f"mesh holds ranks {line}, but its process group now holds {members}; build the mesh anew over the "
                "current process group"
            )
    return topology_of(mesh)


def checked_policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """``policy``, or one that changes nothing."""
    if policy is None:
        return MixedPrecisionPolicy()
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {type(policy).__name__}")
    if policy.output_dtype is not None:
        raise ValueError(
            "mp_policy.output_dtype governs modules, not weights: pass it to dmuon.fully_shard instead of "
            "dedicate_params"
        )
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"mp_policy.{name} must be a floating-point dtype, got {dtype}")
    return policy


def checked_roots(model: nn.Module | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """What is dedicated together, by the prefix of its names: a module, or several in a list.

    Raises:
        TypeError, ValueError: something else, no module, or one that lies in another one or is managed already.
    """
    if not isinstance(model, (list, tuple)):
        return {"": _checked(model)}
    if not model:
        raise ValueError("model is an empty list; give a module, or several")
    roots = [_checked(root) for root in model]
    held = Counter(id(module) for root in roots for module in root.modules())
    for i, root in enumerate(roots):
        if held[id(root)] > 1:
            raise ValueError(f"model[{i}], a {type(root).__name__}, lies in another module of the list; give each once")
    return {f"{i}.": root for i, root in enumerate(roots)}


def _checked(model: object) -> nn.Module:
    """Raise for a model that something else manages already, apart from modules in it that were dedicated before."""
    if any(base.__module__.startswith("deepspeed") for base in type(model).__mro__):
        raise TypeError(
            f"model is a DeepSpeed {type(model).__name__}, which shards and steps on its own; pass the plain model to "
            "dedicate_params and train without the engine"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if dedication_of(model) is not None:
        raise ValueError("dedicate_params was called on 'this model' already; call it once per model")
    holder = holder_of(model)
    if holder is not None:
        raise ValueError(
            f"model, a {type(model).__name__}, lies in a {type(holder).__name__} that was dedicated before, which has "
            "made its values alike on all ranks: call dedicate_params on what is inside first, such as experts"
        )
    shared = shared_with(model)
    if shared is not None:
        raise ValueError(
            f"a {type(shared).__name__} lies in a module that was dedicated before, and outside of it as well, where "
            "other ranks share it; give each its own"
        )
    theirs = held_by(excluded_modules(model))
    own = {name: param for name, param in model.named_parameters() if id(param) not in theirs}
    for other in dedicated_roots.values():  # inside of the model, or beside it
        tied = other.tied_outside(own)
        if tied is not None:
            raise ValueError(
                f"parameter {tied!r} is one of a module that was dedicated before, and that is tied to one outside of "
                "it, which no longer is the same: untie them, or dedicate the whole at once, by a list of modules"
            )
    for name, module in model.named_modules(memo=excluded_modules(model)):
        kind = next((kind for kind in _WRAPPERS if isinstance(module, kind)), None)
        if kind is not None or replicate_group(module) is not None:
            wrapper = "torch's replicate" if kind is None else type(module).__name__
            raise ValueError(
                f"module {name or 'model'!r} is wrapped in {wrapper}; dedicate_params takes the plain model: "
                f"{_WRAPPERS[kind or nn.parallel.DistributedDataParallel]}"
            )
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"module {name or 'model'!r} is sharded by fully_shard already; call dedicate_params before "
                "fully_shard, or leave it out: dmuon.Muon(model) takes what FSDP2 has sharded"
            )
    return model


def check_parameters(
    model: nn.Module, theirs: Collection[int], routes: Sequence[Route], data_parallel: Sequence[int]
) -> None:
    """Raise for parameters and buffers that cannot be moved, or that an optimizer holds already.

    Args:
        theirs: as of :func:`describe`.
        data_parallel: global ranks of the mesh that ``dedicate_params`` got.
    """
    owned = [r for r in routes if r.block is not None]
    tensors: list[tuple[str, torch.Tensor]] = [(f"parameter {r.fqn!r}", r.param) for r in routes]
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in theirs)
    tensors += [(f"buffer {canonical_fqn(name)!r}", buffer) for name, buffer in buffers]
    for name, tensor in tensors:
        if hasattr(tensor, "ds_id"):
            raise ValueError(
                f"{name} is managed by DeepSpeed ZeRO; pass a plain model to dedicate_params and train without it"
            )
        if isinstance(tensor, DTensor) and _crosses(tensor.device_mesh, data_parallel):
            raise ValueError(
                f"{name} is a DTensor with placements {tensor.placements} over mesh {tensor.device_mesh}, whose ranks "
                "are those of the data-parallel mesh; dedicate_params takes a model that is whole there: call it "
                "before anything shards the model"
            )
    _check_optimizers({id(r.param): r.fqn for r in owned})


def tensor_group_of(model: nn.Module | Sequence[nn.Module], data_parallel: Sequence[int]) -> dist.ProcessGroup | None:
    """The group over which tensor parallelism has split anything in ``model``, which need not be a module."""
    roots = model if isinstance(model, (list, tuple)) else [model]
    modules = [root for root in roots if isinstance(root, nn.Module)]
    theirs = held_by(module for root in modules for module in excluded_modules(root))
    params = [param for root in modules for param in root.parameters() if id(param) not in theirs]
    meshes = [p.device_mesh for p in params if isinstance(p, DTensor)]
    return next((m.get_group() for m in meshes if m.ndim == 1 and not _crosses(m, data_parallel)), None)


def _crosses(mesh: DeviceMesh, data_parallel: Sequence[int]) -> bool:
    """Whether several data-parallel ranks lie in ``mesh``."""
    return len(set(mesh.mesh.flatten().tolist()) & set(data_parallel)) > 1


def tensor_mesh_of(routes: Sequence[Route]) -> DeviceMesh | None:
    """The mesh over which tensor parallelism has split the matrices of ``routes``; None if it has not.

    Raises:
        ValueError: a matrix laid out over several dimensions, otherwise than by rows, columns or copies, or over other
            ranks than another matrix.
    """
    common: DeviceMesh | None = None
    for route in routes:
        if route.block is None or not isinstance(route.param, DTensor):
            continue
        mesh, placements = route.param.device_mesh, route.param.placements
        about = f"parameter {route.fqn!r} is a DTensor with placements {placements} over mesh {mesh}"
        ranks = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1:
            raise ValueError(
                f"{about}; dedicate_params takes matrices that are whole or split over one dimension of tensor "
                "parallelism: call it before anything else shards them, or exclude this one with select=…"
            )
        if type(placements[0]) not in (Shard, Replicate):
            raise ValueError(
                f"{about}; only Shard(0), Shard(1) and Replicate can be dedicated: exclude it with select=…"
            )
        if common is not None and common.mesh.flatten().tolist() != ranks:
            raise ValueError(f"{about}, another one than that of earlier parameters; split all of them over one mesh")
        common = mesh
    return common


def _check_optimizers(owned: dict[int, str]) -> None:
    """Raise for an optimizer that was built earlier: it would update tensors that the model no longer uses."""

    gc.collect()  # it may be one that nobody can reach any more
    for candidate in all_living(torch.optim.Optimizer):
        for group in getattr(candidate, "param_groups", ()):
            for param in group["params"]:
                if id(param) in owned:
                    raise ValueError(
                        f"optimizer {type(candidate).__name__} already holds parameter {owned[id(param)]!r}; build "
                        "the optimizer after dedicate_params"
                    )


# -- matrices without an owner: by the user's word, or since another strategy is predicted to take less ----------------


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
