"""``dedicate_params``: from a replicated model to one owner per matrix.

Five phases: every rank *inspects* its model; all *agree* that none has a fault and that the models are alike; they
*connect* by process groups; one *plans* owners for all; and each *places* its masters and hooks. Until ranks have
agreed, a fault is carried to the others instead of being raised, since they would wait for a rank that has left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from socket import gethostname
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dmuon.comm.agreement import agree, require_same
from dmuon.comm.context import Comm, CommOptions
from dmuon.comm.monitor import FirstError, forget_groups
from dmuon.comm.process_groups import make_group, this_rank
from dmuon.dedicated.block import Block
from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.dedication import Dedication, dedication_of, dedications, places_in, planned_ns
from dmuon.dedicated.initial_values import Initialize, check_initialize, share_initial_values
from dmuon.dedicated.inspection import (
    Inspected,
    Seat,
    check_mesh,
    check_parameters,
    checked_policy,
    checked_roots,
    checked_strategy,
    chosen,
    describe,
    tensor_group_of,
    tensor_mesh_of,
    with_strategies,
)
from dmuon.dedicated.matrix import OwnedMatrix, Weight, parts_of, resting
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.replicated import excluded_modules, held_by
from dmuon.dedicated.runtime import Runtime
from dmuon.dedicated.state_dict import hook_state_dicts
from dmuon.layout.topology import Topology
from dmuon.model.blocks import BlockPredicate, canonical_fqn
from dmuon.model.matrix_spec import remember_spec
from dmuon.model.routing import Exclude, Route, Select, notice, require_fitting, route_to_blocks
from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.owner_plan import Costs, OwnerPlan, PlanSource, Speeds, check_options, describe_source, make_plan
from dmuon.platform.host import logger
from dmuon.platform.options import check_flag, refuse_unknown, told_apart
from dmuon.platform.streams import mesh_device
from dmuon.platform.torch_private import outside_compile, require_supported_torch
from dmuon.solver import Matrix, SolveOptions

_KEYWORDS_ELSEWHERE = told_apart(  # of X-Square's dedicate_params
    ("predicate", "select=…, a function of the name, the module and the parameter"),
    ("compute_dtype", "mp_policy=MixedPrecisionPolicy(param_dtype=…)"),
    ("replicate_mesh", "mesh=…, with two dimensions named 'replicate' and 'shard'"),
    ("hook_boundary_predicate hook_boundary_resolver hook_boundary_strict", "blocks=…"),
    ("assignment_group_key_fn max_owners_per_group", "nothing: costs decide who owns what"),
)

_watched: set[str] = set()  # "step", until an optimizer that has owned matrices steps
_log = logger(__name__)


@refuse_unknown("dmuon.dedicate_params", _KEYWORDS_ELSEWHERE)
def dedicate_params(
    model: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    select: Select | None = None,
    exclude: Exclude | None = None,
    blocks: Sequence[nn.Module] | BlockPredicate | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    plan: PlanSource = None,
    ranks: Speeds = None,
    comm: CommOptions | None = None,
    initialize: Initialize | None = None,
    ns_coefficients: str | tuple[Any, ...] | None = None,
    ns_steps: int | None = None,
    ns_dtype: torch.dtype | None = None,
    strategy: str | Mapping[str, str] = "owner",
) -> OwnerPlan:
    """Give every matrix of every block to one owner rank; afterwards the others hold zero-size placeholders.

    Finds what orthogonalization costs on this device (a cached measurement, or a short one now), assigns owners so
    that the slowest rank is as fast as it can be, moves the owned matrices to the mesh's device, and makes rank 0's
    initial weights everyone's. Owners keep masters in fp32 (or wider). Gradients of parameters that nobody shards
    are averaged over the mesh. Call it after tensor parallelism, before ``dmuon.fully_shard`` and before building
    the optimizer. Collective over the mesh.

    What is frozen has no owner and stays as it is on every rank. If it is unfrozen later, its gradient is averaged, and
    ``Muon`` takes it all the same: on every rank, or where FSDP2 shards it. Unfreeze before this what is to be owned.
    A model without a matrix to own gets an empty plan, and its gradients are averaged.

    Args:
        model: a module; or several, such as the experts of all layers, that are planned together and share process
            groups: names then begin with their numbers, ``"0.up"``. What lies in it and was dedicated before, over the
            ranks that hold the same experts, stays as it is.
        mesh: device mesh over which the model is data parallel. Dimensions whose name contains ``replicate`` (and
            ``cp``, context parallelism) hold copies, the others share one; without names a 1-D mesh is shared and a
            2-D one is ``(replicate, shard)``. One of copies only is DDP: every rank keeps full weights, in the
            communication dtype. Tensor parallelism is read off the parameters: DTensors over one dimension of another
            mesh, split by rows or columns, or copied.
        select: ``select(fqn, module, param)`` decides which matrices Muon takes: ``True``, ``False``, or the
            ``MatrixSpec`` that says of which matrices a stored tensor is made, each of which has an owner; ``...``
            leaves it to the default: every hidden matrix, as ``dmuon.Muon(model)`` does.
        exclude: ``exclude(fqn, module, param) -> bool``, or patterns of names of parameters and modules, in which ``*``
            stands for anything: what stays on AdamW, whatever ``select`` says.
        blocks: the units of communication, as modules or as ``blocks(fqn, module) -> bool``; what lies inside is
            hidden. Default: the elements of the outermost ``ModuleList``s and ``Sequential``s, or the single layers of
            a model in which nothing repeats. ``[model]`` makes it one block.
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
        ranks: how fast each rank of the job computes, relative to the others, such as ``[1.0, 1.0, 0.5]``, so that a
            slower one owns less; None: all alike.
        comm: transport, prefetching, merging of small blocks, timeout; changes no result.
        initialize: ``initialize(module)`` gives values to the tensors that a module itself holds, for a model on the
            meta device, such as a transformers model's ``_init_weights``; default: ``module.reset_parameters()``.
            Rank 0 calls it for one module after the other, in the order of ``model.modules()``, and every rank keeps
            what it owns and what nobody owns: none ever holds the whole model. What it leaves alone is NaN, until a
            checkpoint is loaded. What writes to other modules' tensors is refused.
        ns_coefficients, ns_steps, ns_dtype: as of ``dmuon.Muon``, which takes them from here and refuses others. Costs
            are those of this run. None leaves them to the optimizer, and plans by its defaults.
        strategy: who orthogonalizes a matrix: ``"owner"``; ``"sharded"``: all ranks together; ``"sharded:4"``: a team
            of so many; ``"auto"``: an owner, unless one of these or every rank by itself (``"replicated"``) is
            predicted to take less time. Or a mapping of patterns of names to these, of which the first that fits
            counts; the rest have owners. What has no owner is left to ``dmuon.fully_shard``, and lies whole on every
            rank without that; the log says so, and ``Muon`` knows of it. Matrices of a stack or a fused tensor, and
            those of a model that tensor parallelism cuts, keep their owners under ``"auto"``.

    Returns:
        The plan: owners, predicted loads, and a report.

    Raises:
        TypeError, ValueError: on every rank, naming the parameter, option or rank and the remedy.
    """
    require_supported_torch()
    topology = check_mesh(mesh)
    options = comm if isinstance(comm, CommOptions) else CommOptions()
    group = make_group(mesh_device(mesh.device_type), topology.ranks, "group", options.timeout)
    told = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
    ns_options = {name: value for name, value in told.items() if value is not None}

    def inspect() -> Inspected:
        check_options(costs, solve, plan, ranks)
        ways = checked_strategy(strategy, plan)
        policy = checked_policy(mp_policy)
        check_flag("reshard_after_forward", reshard_after_forward)
        try:
            NsOptions.named(ns_options).check(mesh_device(mesh.device_type))
        except (TypeError, ValueError) as fault:
            raise type(fault)(f"ns_coefficients, ns_steps or ns_dtype: {fault}") from None
        if not (comm is None or isinstance(comm, CommOptions)):
            raise TypeError(f"comm must be a dmuon.CommOptions, got {type(comm).__name__}")
        common: dict[str, object] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": f"param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}",
            "costs": "flops" if costs == "flops" else type(costs).__name__,  # what decides who must take part
            "plan": describe_source(plan),
            "ranks": ranks,
            "comm": options,
            "initialize": "a function" if initialize is not None else None,
            "strategy": ways,
            **told,
        }
        roots = checked_roots(model)
        whole = roots[""] if "" in roots else nn.ModuleList(roots.values())
        check_initialize(whole, initialize)
        require_fitting("strategy", ways, [canonical_fqn(name) for name, _ in whole.named_parameters()])
        theirs = held_by(excluded_modules(whole))
        routes = with_strategies(route_to_blocks(whole, select, blocks, exclude, theirs), ways)
        for route in routes:
            if route.muon:
                remember_spec(route.param, route.spec, route.fault)
        check_parameters(whole, theirs, routes, topology.ranks)
        tensor_mesh = tensor_mesh_of(routes)
        split_over = [this_rank()] if tensor_mesh is None else tensor_mesh.mesh.flatten().tolist()
        seat = (gethostname(), split_over, planned_ns(inner.runtime for inner in dedications(whole)))
        description = describe(whole, theirs, routes, common | places_in(whole))
        return Inspected(roots, whole, routes, policy, tensor_mesh, description, seat)

    routes: Sequence[Route] = ()
    try:
        inspected, seats = _agree(model, topology, group, inspect)
        topology = topology.with_tensor_parallel([split_over for _, split_over, _ in seats])
        control = group
        if topology.tensor > 1:
            control = make_group(mesh_device(mesh.device_type), topology.ranks, "control", options.timeout)
            # Before the other groups: which are made goes by the options.
            seats = require_same(control, None, inspected.description, inspected.seat)
        context = Comm(mesh, topology, group, options, inspected.tensor_mesh, control)
        ns = NsOptions.named(ns_options)

        def planned(matrices: Sequence[Matrix], before: Sequence[int] | None = None) -> OwnerPlan:
            starts = [start for _, _, start in seats]
            return make_plan(
                matrices,
                context.control,
                context.device,
                costs=costs,
                solve=solve,
                plan=plan,
                hosts=[host for host, _, _ in seats],
                starts=starts if before is None else [sum(pair) for pair in zip(starts, before, strict=True)],
                pools=inspected.pools(context.topology),
                ranks=ranks,
                ns=ns,
            )

        result = planned(inspected.matrices())
        if any(route.strategy == "auto" for route in inspected.routes):
            inspected, result = chosen(inspected, result, planned, context, costs, ns, 2 + reshard_after_forward)
        routes = inspected.routes
        _own(inspected, result, context, initialize, ns_options, keep=not reshard_after_forward)
    except BaseException:
        for route in routes:  # modules hold their own again: a model of which dmuon owns a part is of no use
            for module, name in route.sites:
                module._parameters[name] = route.param
        forget_groups()  # on all ranks: one of them may have been interrupted while something was under way
        raise
    _watch_optimizers()
    _watched.add("step")
    _tell(routes, result, context, "are freed" if reshard_after_forward else "stay")
    return result


@cache
def _watch_optimizers() -> RemovableHandle:
    """Warn if the first optimizer that steps owned matrices is not Muon. Later steps are not looked at.

    The hook stays: one that removed itself would break off torch's loop over the hooks of all.
    """
    return register_optimizer_step_pre_hook(_look_at)


def _look_at(optimizer: Any, _args: object, _kwargs: object) -> None:
    if _watched:
        _look_into(optimizer)


@outside_compile
def _look_into(optimizer: Any) -> None:
    groups = [group for group in optimizer.param_groups if any(isinstance(p, OwnedTensor) for p in group["params"])]
    if not groups:
        return
    _watched.clear()
    if this_rank() == 0 and not all("use_muon" in group for group in groups):
        _log.warning(
            "%s trains matrices that were dedicated for Muon, so that none of them gets Muon's update: build "
            "dmuon.Muon(model), or leave dedicate_params out",
            type(optimizer).__name__,
        )


def _tell(routes: Sequence[Route], plan: OwnerPlan, comm: Comm, weights: str) -> None:
    """One rank tells the log."""
    topology = comm.topology
    if this_rank() != topology.ranks[0]:
        return
    if (told := notice(routes)) is not None:
        _log.warning("%s", told)
    if left := [route for route in routes if route.strategy != "owner"]:
        _log.info("%d tensors have no owner, such as %s: %s", len(left), left[0].fqn, left[0].reason)
    _log.info("dedicated %s; mesh: %s, whole weights %s after forward", plan.summary(), topology.text, weights)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("loads and batches of what was dedicated:\n%s", plan.report())


_Modules = TypeVar("_Modules", nn.Module, list[nn.Module])


def fully_shard(module: _Modules, *, ignored_params: Collection[nn.Parameter] = (), **kwargs: Any) -> _Modules:
    """Torch's ``fully_shard`` for everything in ``module`` that dmuon does not own.

    It leaves out all that a module below holds which was dedicated in a list, or over other ranks than those of
    ``mesh``, as the experts of a group are: others than these hold something else there.

    Args:
        module: a module, or a list of modules that communicate together.
        ignored_params: further parameters that FSDP2 shall not manage.
        kwargs: the other arguments of ``torch.distributed.fsdp.fully_shard``.
    """
    left_out: set[nn.Parameter] = set()
    for part in module if isinstance(module, list) else [module]:
        left_out |= owned_parameters(part)
        for below in part.modules():
            inner = None if below is part else dedication_of(below)
            if inner is None:
                continue
            mesh: DeviceMesh | None = kwargs.get("mesh")
            ranks = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
            if inner.is_list or set(inner.runtime.comm.ranks) != set(ranks):
                inner.note_around(ranks)
                left_out |= set(below.parameters())
    torch_fully_shard(module, ignored_params=left_out | set(ignored_params), **kwargs)
    return module  # torch shards in place


def owned_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of ``module`` that dmuon owns, in their resting form, also while whole weights stand in."""
    return {p for p in map(resting, module.parameters()) if issubclass(type(p), OwnedTensor)}


def _agree(
    model: nn.Module | Sequence[nn.Module],
    topology: Topology,
    group: dist.ProcessGroup,
    inspect: Callable[[], Inspected],
) -> tuple[Inspected, list[Seat]]:
    """Inspect, and fail on every rank if some rank fails or has another model.

    Returns:
        What this rank has inspected, and the seat of every data-parallel rank.
    """
    inspected: Inspected | None = None
    seats: list[Seat] = []
    first = FirstError()
    with first:  # also what select or blocks raise: the other ranks must not wait
        inspected = inspect()
    description: list[tuple[str, str]] = [] if inspected is None else inspected.description
    seat: Seat | None = None if inspected is None else inspected.seat
    with first:
        seats = require_same(group, first.error, description, seat)
    # The other tensor-parallel ranks have agreed among their own data-parallel ones only.
    across = tensor_group_of(model, topology.ranks)
    if across is not None:
        agree(across, first.error)
    first.throw()
    assert inspected is not None
    return inspected, seats


def _own(
    inspected: Inspected,
    plan: OwnerPlan,
    comm: Comm,
    initialize: Initialize | None,
    ns_options: Mapping[str, Any],
    *,
    keep: bool,
) -> None:
    """Make the first rank's values everyone's, give owners their masters and modules their hooks. Collective."""
    packed = _pack(inspected, plan, comm)
    weights_of_all = [weight for _, weights in packed for weight in weights]
    masters = share_initial_values(inspected.whole, weights_of_all, comm, initialize)
    modules = {r.block: r.block_module for r in inspected.routes}
    blocks: list[Block] = []
    for dtype, weights in packed:
        reduce_dtype = inspected.policy.reduce_dtype or torch.promote_types(dtype, torch.float32)
        buffer = OwnedBuffer(
            [(weight, masters.pop(weight.route.fqn)) for weight in weights],
            comm,
            comm_dtype=dtype,
            reduce_dtype=reduce_dtype,
            keep=keep,
        )
        by_block: dict[str | None, list[OwnedMatrix]] = {}
        for weight, matrix in zip(weights, buffer.matrices, strict=True):
            by_block.setdefault(weight.route.block, []).append(matrix)
        for name, of_block in by_block.items():
            module = modules[name]
            assert name is not None and module is not None, "what is owned lies in a block"
            blocks.append(Block(name, module, of_block, buffer))
    for inner in dedications(inspected.whole):
        inner.note_around(comm.topology.ranks)
    runtime = Runtime(inspected.roots, blocks, comm, plan)
    runtime.ns_options = ns_options
    hook_state_dicts([*inspected.roots.values()], runtime)
    Dedication(inspected.roots, inspected.routes, runtime)  # which stays on the model


def _pack(inspected: Inspected, plan: OwnerPlan, comm: Comm) -> list[tuple[torch.dtype, list[Weight]]]:
    """The weights of each buffer: one per block and communication dtype; small neighbours up to ``merge_bytes``."""
    packed: list[tuple[torch.dtype, list[Weight]]] = []
    growing: dict[torch.dtype, list[Weight]] = {}
    by_block: dict[str, dict[torch.dtype, list[Weight]]] = {}
    for route in inspected.routes:
        if route.block is not None:
            planned = [plan.owners[name] for name, _, _ in route.spec.named(route.fqn, route.param.shape)]
            weight = Weight(route, parts_of(route.param, planned, comm))
            by_block.setdefault(route.block, {}).setdefault(inspected.dtype_of(route), []).append(weight)
    for of_block in by_block.values():
        for dtype in sorted(growing.keys() - of_block.keys(), key=str):
            packed.append((dtype, growing.pop(dtype)))
        for dtype, weights in of_block.items():
            if dtype in growing and _nbytes(growing[dtype] + weights, dtype) > comm.options.merge_bytes:
                packed.append((dtype, growing.pop(dtype)))
            growing.setdefault(dtype, []).extend(weights)
    return packed + list(growing.items())


def _nbytes(weights: Sequence[Weight], dtype: torch.dtype) -> int:
    """Of whole weights: all tensor-parallel ranks, whose parts may differ, merge the same blocks."""
    return sum(weight.route.param.numel() for weight in weights) * dtype.itemsize
