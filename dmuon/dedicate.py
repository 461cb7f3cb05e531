"""``dedicate_params``: from a replicated model to one owner per matrix."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from dmuon._torch import default_group_is_bound, require_supported_torch
from dmuon.comm import Comm, agree, make_comm
from dmuon.device import mesh_device
from dmuon.group import OwnerGroup
from dmuon.owned_tensor import OwnedTensor
from dmuon.place import Place, warn_if_oversubscribed
from dmuon.plan import Costs, OwnerPlan, PlanSource, check_options, describe_source, make_plan
from dmuon.policy import BlockPredicate, Route, Select, canonical_fqn, route_parameters
from dmuon.runtime import Runtime
from dmuon.solver import SolveOptions
from dmuon.state_dict import hook_state_dicts

__all__ = ["Dedication", "dedicate_params", "dedications", "fully_shard", "owned_parameters"]

_ATTRIBUTE = "_dmuon_dedication"


class Dedication:
    """What ``dedicate_params`` leaves on a model: the plan, the routes, and the runtime that moves the weights."""

    def __init__(self, plan: OwnerPlan, routes: list[Route], runtime: Runtime) -> None:
        self.plan = plan
        self.reasons = {r.fqn: (r.muon, r.reason) for r in routes}  # routes themselves would keep the parameters alive
        self.adamw_elements = sum(r.param.numel() for r in routes if not r.muon)
        self.runtime = runtime


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    select: Select | None = None,
    blocks: Sequence[nn.Module] | BlockPredicate | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    plan: PlanSource = None,
) -> OwnerPlan:
    """Give every matrix of every block to one owner rank; afterwards the others hold zero-size placeholders.

    Finds what orthogonalization costs on this device (a cached measurement, or a short one now), assigns owners so
    that the slowest rank is as fast as it can be, moves the owned matrices to the mesh's device, and makes rank 0's
    initial weights everyone's. Owners keep masters in fp32 (or wider). Gradients of parameters that nobody shards
    are averaged over the mesh. Call it after tensor parallelism, before ``dmuon.fully_shard`` and before building
    the optimizer. Collective over the mesh.

    Args:
        mesh: 1-D device mesh over which the model is data parallel.
        select: ``select(fqn, module, param) -> bool`` decides which matrices Muon takes. Default: every trainable
            matrix inside a block.
        blocks: the units of communication, as modules or as ``blocks(fqn, module) -> bool``. Default: the elements
            of the outermost ``ModuleList``s and ``Sequential``s.
        reshard_after_forward: free whole weights after forward and fetch them again for backward. False keeps them.
            Governs the owned matrices only.
        mp_policy: ``param_dtype`` is the dtype of owned weights in forward, backward and communication (default:
            the model's own), ``reduce_dtype`` that of their gradient reductions (default: fp32, or the model's own
            when wider). Governs the owned matrices only; inputs of blocks are not cast, which FSDP2 does when it is
            given the same policy, and ``torch.autocast`` where nothing is sharded.
        costs: ``None`` finds or measures; ``"flops"`` measures nothing; a path reads a cost cache; a ``CostTable``
            is used as it is.
        solve: options of the solver.
        plan: the plan of an earlier run, or the path of one that ``OwnerPlan.save`` or ``dmuon-plan --json`` wrote
            (rank 0 reads it), instead of measuring and solving. It must hold this model's names, shapes and blocks for
            this number of ranks, and excludes ``costs`` and ``solve``. A resumed run that reuses its plan computes the
            same batches, and so the same bits.

    Returns:
        The plan: owners, predicted loads, and a report.

    Raises:
        TypeError, ValueError: on every rank, naming the parameter, option or rank and the remedy.
    """
    require_supported_torch()
    group = _mesh_group(mesh)
    routes: list[Route] = []
    policy = MixedPrecisionPolicy()
    description: list[tuple[str, str]] = []
    place: Place | None = None
    error: Exception | None = None
    try:
        check_options(costs, solve, plan)
        policy = _checked_policy(mp_policy)
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward must be True or False, got {reshard_after_forward!r}")
        _check_model(model)
        routes = route_parameters(model, select, blocks)
        _check_parameters(model, routes)
        options = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": f"param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}",
            "costs": "flops" if costs == "flops" else type(costs).__name__,  # what decides who must take part
            "plan": describe_source(plan),
        }
        description = _describe(model, routes, options)
        place = Place.here()
    except Exception as fault:  # also what select or blocks raise: the other ranks must not wait
        error = fault
    places = _require_same(group, error, description, place)
    if mesh.device_type == "cpu":
        warn_if_oversubscribed(places, dist.get_rank(group))
    result = make_plan(
        routes,
        group,
        mesh_device(mesh.device_type),
        costs=costs,
        solve=solve,
        plan=plan,
        hosts=[p.host for p in places],
        comm_itemsize=lambda r: (policy.param_dtype or r.param.dtype).itemsize,
    )
    comm = make_comm(mesh)
    _share_initial_values(model, routes, comm)
    groups = _make_groups(routes, result, comm, policy, keep=not reshard_after_forward)
    runtime = Runtime(model, groups, comm, result.chunks, result.variants)
    hook_state_dicts(runtime)
    setattr(model, _ATTRIBUTE, Dedication(result, routes, runtime))
    return result


_Modules = TypeVar("_Modules", nn.Module, list[nn.Module])


def fully_shard(module: _Modules, *, ignored_params: Collection[nn.Parameter] = (), **kwargs: Any) -> _Modules:
    """Torch's ``fully_shard`` for everything in ``module`` that dmuon does not own.

    Args:
        module: a module, or a list of modules that communicate together.
        ignored_params: further parameters that FSDP2 shall not manage.
        kwargs: the other arguments of ``torch.distributed.fsdp.fully_shard``.
    """
    owned: set[nn.Parameter] = set()
    for part in module if isinstance(module, list) else [module]:
        owned |= owned_parameters(part)
    torch_fully_shard(module, ignored_params=owned | set(ignored_params), **kwargs)
    return module  # torch shards in place


def owned_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of ``module`` that dmuon owns, in their resting form, also while whole weights stand in."""
    resting: list[nn.Parameter] = [getattr(p, "_dmuon_rest", p) for p in module.parameters()]
    return {p for p in resting if issubclass(type(p), OwnedTensor)}


def dedications(module: nn.Module) -> list[Dedication]:
    """What ``dedicate_params`` left in ``module`` or below it, outermost first."""
    found = (m.__dict__.get(_ATTRIBUTE) for m in module.modules())
    return [d for d in found if d is not None]


def _mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    if not dist.is_initialized():
        raise ValueError(
            "mesh: torch.distributed is not initialized (or was torn down after the mesh was made); call "
            "init_process_group and init_device_mesh first. In one process, dmuon.Muon(model) alone is enough"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}; dedicate_params takes a 1-D mesh: pass the "
            "data-parallel one, for example mesh['shard']"
        )
    if any("replicate" in name for name in mesh.mesh_dim_names or ()):
        raise ValueError("mesh is a replicate dimension; dedicate_params takes a sharding mesh: rename the dimension")
    ranks = mesh.mesh.flatten().tolist()
    world = dist.get_world_size()
    if mesh.get_coordinate() is None or any(not 0 <= r < world for r in ranks):
        raise ValueError(
            f"mesh holds ranks {ranks}, which does not match the process group: this is rank {dist.get_rank()} of "
            f"{world}; build the mesh with init_device_mesh over the current process group"
        )
    try:
        group = mesh.get_group()
    except RuntimeError as fault:
        raise ValueError(f"mesh: its process group is gone ({fault}); build it anew over the current one") from None
    if len(ranks) < world and default_group_is_bound():
        raise ValueError(
            f"mesh holds {len(ranks)} of {world} ranks, and the default process group was bound to a device, which "
            "makes creating groups collective over all ranks; leave device_id out of init_process_group"
        )
    if dist.get_process_group_ranks(group) != ranks:
        raise ValueError(
            f"mesh holds ranks {ranks}, but its process group now holds {dist.get_process_group_ranks(group)}; build "
            "the mesh anew over the current process group"
        )
    return group


def _checked_policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
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


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if _ATTRIBUTE in module.__dict__:
            raise ValueError(f"dedicate_params was called on {name or 'this model'!r} already; call it once per model")
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"module {name or 'model'!r} is sharded by fully_shard already; call dedicate_params before fully_shard"
            )


def _check_parameters(model: nn.Module, routes: Sequence[Route]) -> None:
    owned = [r for r in routes if r.muon]
    tensors: list[tuple[str, torch.Tensor]] = [(f"parameter {r.fqn!r}", r.param) for r in routes]
    tensors += [(f"buffer {canonical_fqn(name)!r}", buffer) for name, buffer in model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device; materialize the model (to_empty and its initialization) before "
                "dedicate_params"
            )
    for route in owned:
        if isinstance(route.param, DTensor):
            raise ValueError(
                f"parameter {route.fqn!r} is a DTensor with placements {route.param.placements}; dedicate_params takes "
                "whole matrices: call it before anything shards the model, or exclude it with select=…"
            )
    _check_optimizers({id(r.param): r.fqn for r in owned})


def _describe(model: nn.Module, routes: Sequence[Route], options: dict[str, object]) -> list[tuple[str, str]]:
    """What all ranks must have in common, by name, in the order of the collectives that depend on it."""
    items = [(f"option {name}", str(value)) for name, value in options.items()]
    for r in routes:
        route = f"Muon in block {r.block}" if r.muon else "AdamW"
        items.append((f"parameter {r.fqn!r}", f"{tuple(r.param.shape)}, {r.param.dtype}, {route}"))
    for name, buffer in model.named_buffers():
        items.append((f"buffer {canonical_fqn(name)!r}", f"{tuple(buffer.shape)}, {buffer.dtype}"))
    return items


def _require_same(
    group: dist.ProcessGroup, error: Exception | None, description: list[tuple[str, str]], place: Place | None
) -> list[Place]:
    """Raise on every rank unless all have the same description and no error; where every rank runs."""
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    found = agree(group, error, (digest, place))
    if len({theirs for theirs, _ in found}) == 1:
        return [there for _, there in found]
    descriptions = agree(group, None, description)
    first = dict(descriptions[0])
    for rank, items in enumerate(descriptions):
        theirs = dict(items)
        name = next((n for n in [*first, *theirs] if first.get(n) != theirs.get(n)), None)
        if name is not None:
            raise ValueError(
                f"{name} is {theirs.get(name, 'absent')} on rank {rank} and {first.get(name, 'absent')} on rank 0; "
                "build the same model with the same options on every rank"
            )
    raise ValueError("the parameters come in another order on some ranks; build the same model on every rank")


def _check_optimizers(owned: dict[int, str]) -> None:
    """An optimizer built earlier would go on updating tensors that the model no longer uses."""

    def holder() -> tuple[str, str] | None:
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.optim.Optimizer):
                for group in getattr(candidate, "param_groups", ()):
                    for param in group["params"]:
                        if id(param) in owned:
                            return type(candidate).__name__, owned[id(param)]
        return None

    found = holder()
    if found is not None:
        gc.collect()  # it may be one that nobody can reach any more
        found = holder()
    if found is not None:
        raise ValueError(
            f"optimizer {found[0]} already holds parameter {found[1]!r}; build the optimizer after dedicate_params"
        )


def _share_initial_values(model: nn.Module, routes: Sequence[Route], comm: Comm) -> None:
    """Rank 0's values of everything that dmuon does not own; owned matrices follow when they are placed."""
    if comm.world == 1:
        return
    tensors = [r.param for r in routes if not r.muon and not isinstance(r.param, DTensor)]
    with torch.no_grad():
        for tensor in [*tensors, *model.buffers()]:
            value = tensor.detach().to(comm.device).contiguous()
            # As bytes: backends lack some dtypes that buffers have.
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=comm.ranks[0], group=comm.fill_group)
            if value.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(value)


def _make_groups(
    routes: Sequence[Route], plan: OwnerPlan, comm: Comm, policy: MixedPrecisionPolicy, *, keep: bool
) -> list[OwnerGroup]:
    owners = plan.owners
    members: dict[str, list[Route]] = {}
    for route in routes:
        if route.block is not None:
            members.setdefault(route.block, []).append(route)
    groups = []
    for name, block_routes in members.items():
        module = block_routes[0].block_module
        assert module is not None
        for dtype in dict.fromkeys(policy.param_dtype or r.param.dtype for r in block_routes):
            same = [r for r in block_routes if (policy.param_dtype or r.param.dtype) == dtype]
            groups.append(
                OwnerGroup(
                    name,
                    module,
                    [(r.fqn, r.param, r.sites, owners[r.fqn]) for r in same],
                    comm,
                    comm_dtype=dtype,
                    reduce_dtype=policy.reduce_dtype or torch.promote_types(dtype, torch.float32),
                    keep=keep,
                )
            )
    return groups
