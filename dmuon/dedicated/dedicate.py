"""``dedicate_params``: from a replicated model to one owner per matrix."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree, require_same
from dmuon.comm.context import Comm, make_comm
from dmuon.comm.options import CommOptions
from dmuon.comm.process_groups import make_group, this_rank
from dmuon.dedicated.buffer import OwnedBuffer, Weight
from dmuon.dedicated.matrix import TensorSharding
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.refusals import (
    check_mesh,
    check_model,
    check_parameters,
    checked_policy,
    tensor_group_of,
    tensor_mesh_of,
)
from dmuon.dedicated.runtime import Runtime
from dmuon.dedicated.state_dict import hook_state_dicts
from dmuon.layout.buffer import choose_transport
from dmuon.layout.ranks import GlobalRank, Position, position_in
from dmuon.model.blocks import BlockPredicate
from dmuon.model.names import canonical_fqn
from dmuon.model.routing import Route, Select, route_parameters
from dmuon.planning.agreed_plan import Costs, check_options, describe_source, make_plan
from dmuon.planning.owner_plan import OwnerPlan, PlanSource
from dmuon.platform.host import HostShare, warn_if_oversubscribed
from dmuon.platform.options import check_flag
from dmuon.platform.streams import mesh_device
from dmuon.platform.torch_private import backend_of, local_tensor, require_supported_torch
from dmuon.solver import Matrix, SolveOptions

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
    comm: CommOptions | None = None,
) -> OwnerPlan:
    """Give every matrix of every block to one owner rank; afterwards the others hold zero-size placeholders.

    Finds what orthogonalization costs on this device (a cached measurement, or a short one now), assigns owners so
    that the slowest rank is as fast as it can be, moves the owned matrices to the mesh's device, and makes rank 0's
    initial weights everyone's. Owners keep masters in fp32 (or wider). Gradients of parameters that nobody shards
    are averaged over the mesh. Call it after tensor parallelism, before ``dmuon.fully_shard`` and before building
    the optimizer. Collective over the mesh.

    Args:
        mesh: device mesh over which the model is data parallel. Dimensions whose name contains ``replicate`` (and
            ``cp``, context parallelism) hold copies, the others share one; without names a 1-D mesh is shared and a
            2-D one is ``(replicate, shard)``. One of copies only is DDP: every rank keeps full weights, in the
            communication dtype. Tensor parallelism is read off the parameters: DTensors over one dimension of another
            mesh, split by rows or columns, or copied.
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
        comm: transport, prefetching, merging of small blocks, timeout; never changes a result.

    Returns:
        The plan: owners, predicted loads, and a report.

    Raises:
        TypeError, ValueError: on every rank, naming the parameter, option or rank and the remedy.
    """
    require_supported_torch()
    topology = check_mesh(mesh)
    rank = this_rank()
    options = comm if isinstance(comm, CommOptions) else CommOptions()
    group = make_group(mesh.device_type, [topology.ranks], "group", options)
    routes: list[Route] = []
    policy = MixedPrecisionPolicy()
    description: list[tuple[str, str]] = []
    tensor_mesh: DeviceMesh | None = None
    here: tuple[HostShare, list[GlobalRank]] | None = None
    error: Exception | None = None
    try:
        check_options(costs, solve, plan)
        policy = checked_policy(mp_policy)
        check_flag("reshard_after_forward", reshard_after_forward)
        if not (comm is None or isinstance(comm, CommOptions)):
            raise TypeError(f"comm must be a dmuon.CommOptions, got {type(comm).__name__}")
        choose_transport(options.transport, [1], backend_of(group, mesh_device(mesh.device_type)))
        check_model(model, _ATTRIBUTE)
        routes = route_parameters(model, select, blocks)
        check_parameters(model, routes, topology.ranks)
        tensor_mesh = tensor_mesh_of(routes)
        common: dict[str, object] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": f"param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}",
            "costs": "flops" if costs == "flops" else type(costs).__name__,  # what decides who must take part
            "plan": describe_source(plan),
            "comm": options,
        }
        description = _describe(model, routes, common)
        here = HostShare.here(), [rank] if tensor_mesh is None else tensor_mesh.mesh.flatten().tolist()
    except Exception as fault:  # also what select or blocks raise: the other ranks must not wait
        error = fault
    try:
        everyone = require_same(group, topology.ranks, error, description, here)
    except Exception as fault:
        error = fault
    beside = tensor_group_of(model, topology.ranks)
    if beside is not None:
        agree(beside, error)  # a fault among the data-parallel ranks of one tensor-parallel rank ends all of them
    elif error is not None:
        raise error
    topology = topology.with_tensor_parallel([ranks for _, ranks in everyone])
    comms = make_comm(mesh, topology, group, options, tensor_mesh)
    if topology.tensor > 1:
        everyone = require_same(comms.control, topology.ranks, None, description, here)
    places = [place for place, _ in everyone]
    if mesh.device_type == "cpu":
        warn_if_oversubscribed(places, topology.ranks.index(rank))
    result = make_plan(
        [
            Matrix(
                r.fqn,
                r.param.shape[0],
                r.param.shape[1],
                r.block,
                r.param.numel() * (policy.param_dtype or r.param.dtype).itemsize,
            )
            for r in routes
            if r.block is not None
        ],
        comms.control,
        comms.device,
        costs=costs,
        solve=solve,
        plan=plan,
        hosts=[p.host for p in places],
    )
    _share_initial_values(model, routes, comms)
    groups = _make_groups(routes, result, comms, policy, keep=not reshard_after_forward)
    runtime = Runtime(model, groups, comms, result.chunks, result.variants)
    hook_state_dicts(model, runtime)
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


def _describe(model: nn.Module, routes: Sequence[Route], options: dict[str, object]) -> list[tuple[str, str]]:
    """What all ranks must have in common, by name, in the order of the collectives that depend on it."""
    items = [(f"option {name}", str(value)) for name, value in options.items()]
    for r in routes:
        route = f"Muon in block {r.block}" if r.muon else "AdamW"
        items.append((f"parameter {r.fqn!r}", f"{tuple(r.param.shape)}, {r.param.dtype}, {route}"))
    for name, buffer in model.named_buffers():
        items.append((f"buffer {canonical_fqn(name)!r}", f"{tuple(buffer.shape)}, {buffer.dtype}"))
    return items


def _share_initial_values(model: nn.Module, routes: Sequence[Route], comm: Comm) -> None:
    """The first rank's values of everything that dmuon does not own; owned matrices follow when they are placed."""
    if comm.world == 1:
        return
    tensors = [r.param for r in routes if not r.muon]
    with torch.no_grad(), comm.monitor.watch("broadcast of initial values"):
        for tensor in map(local_tensor, [*tensors, *model.buffers()]):
            value = tensor.detach().to(comm.device).contiguous()
            # As bytes: backends lack some dtypes that buffers have.
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=comm.ranks[0], group=comm.group)
            if value.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(value)


def _make_groups(
    routes: Sequence[Route], plan: OwnerPlan, comm: Comm, policy: MixedPrecisionPolicy, *, keep: bool
) -> list[OwnedBuffer]:
    """One group per block and communication dtype; small neighbours together, up to ``merge_bytes``."""
    owners = plan.owners
    groups: list[OwnedBuffer] = []
    weights: dict[torch.dtype, list[Weight]] = {}

    def close(dtype: torch.dtype) -> None:
        reduce_dtype = policy.reduce_dtype or torch.promote_types(dtype, torch.float32)
        members = weights.pop(dtype)
        groups.append(OwnedBuffer(members, comm, comm_dtype=dtype, reduce_dtype=reduce_dtype, keep=keep))

    blocks = {r.block: r.block_module for r in routes if r.block is not None}
    for name in blocks:
        of_block: dict[torch.dtype, list[Weight]] = {}
        for route in routes:
            if route.block == name:
                dtype = policy.param_dtype or route.param.dtype
                of_block.setdefault(dtype, []).append(_weight(route, owners[route.fqn], comm))
        for dtype in sorted(weights.keys() - of_block.keys(), key=str):
            close(dtype)
        for dtype, added in of_block.items():
            if dtype in weights and _nbytes(weights[dtype] + added, dtype) > comm.options.merge_bytes:
                close(dtype)
            weights.setdefault(dtype, []).extend(added)
    for dtype in list(weights):
        close(dtype)
    return groups


def _nbytes(weights: Sequence[Weight], dtype: torch.dtype) -> int:
    return sum(local_tensor(w.param).numel() for w in weights) * dtype.itemsize


def _weight(route: Route, planned: Position, comm: Comm) -> Weight:
    """``planned`` is a position among all ranks of the topology; the owner keeps this rank's part of the matrix."""
    assert route.block is not None and route.block_module is not None
    at = comm.topology.coordinates[planned]
    owner = position_in(comm.ranks, comm.topology.rank_at(at.r, at.s, comm.at.t))
    sharding = None
    if isinstance(route.param, DTensor):
        sharding = TensorSharding(route.param.device_mesh, route.param.placements[0], Position(at.t))
    return Weight(route.fqn, route.param, route.sites, owner, (route.block, route.block_module), sharding)
