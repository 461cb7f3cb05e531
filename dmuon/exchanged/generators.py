"""Configurations for the usual ways of laying a model over ranks, and the three functions that they consist of.

Users may call, wrap and replace these functions as their own. They keep nothing. What the parameters' layouts are
stands in the ``state`` that each of them gets, where ``assign_fn`` puts it, so that one configuration serves several
optimizers. ``dmuon.Muon`` recognizes a ``gather_fn`` and a ``redistribute_fn`` of one recipe, and exchanges many
matrices at once by the same layouts, instead of calling them for one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon.comm.domain import Copies, Copying, connect_copies, redistribute_all
from dmuon.comm.process_groups import grid_of_groups, ranks_of, this_rank
from dmuon.exchanged.config import (
    CHUNK_BYTES,
    LAYOUTS,
    DistributedConfig,
    LayoutOptions,
    LayoutRecipe,
)
from dmuon.exchanged.layouts import Layouts, lay_out, plan, planned_owners, whole_parcel
from dmuon.layout.topology import GlobalRank, ShardDims, grid_of_mesh
from dmuon.model.matrix_spec import flat_of
from dmuon.planning.owner_plan import Costs, Speeds
from dmuon.planning.strategies import SMALL_PARAM_NUMEL
from dmuon.platform.options import check_integer, refuse_unknown, told_apart
from dmuon.platform.torch_private import local_tensor
from dmuon.solver import SolveOptions

ELSEWHERE = told_apart(  # of pipelined all-to-all Muon
    ("warmup_step", "prefetch_count=…, of as many rounds that travel ahead"),
    ("chunk_size", "chunk_bytes=…, the bytes of whole matrices that travel to an owner at once"),
)
_SINGLE = "layout_of_update"  # in ``state``, of a tensor that was gathered without an assignment


@refuse_unknown("dmuon.create_dtensor_config", ELSEWHERE)
def create_dtensor_config(
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    *,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    small_param_numel_threshold: int = SMALL_PARAM_NUMEL,
    ranks: Speeds = None,
) -> DistributedConfig:
    """For DTensor parameters on any mesh: their placements say which pieces lie where. Plain tensors stay local.

    Any mix of ``Replicate``, ``Shard(d)`` and FSDP2's strided shards over a mesh of any number of dimensions, even or
    not. Of a stack ``(e, m, n)`` each matrix is one of its own: cut along ``e``, nothing of it travels.

    Args:
        async_gpu_parallelism: owners orthogonalize at the same time. False: one batch after the other, for debugging;
            results are bitwise the same.
        prefetch_count: rounds of batches whose gathers are on their way while another is orthogonalized; 0: none, and
            every collective ends before the next thing begins.
        costs: ``None`` finds or measures what Newton-Schulz takes on this device; ``"flops"`` measures nothing; a path
            reads a cost cache; a ``CostTable`` is used as it is.
        solve: options of the solver that gives every matrix its owner.
        chunk_bytes: most bytes of whole matrices, in the dtype of momentum, that an owner gets at once; more than one
            matrix is never taken beyond it.
        small_param_numel_threshold: matrices of at most so many elements share rounds up to ``chunk_bytes``.
        ranks: how fast each rank of the job computes, relative to the others, so that a slower one owns less; None:
            all alike.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range.
    """
    options = LayoutOptions(costs, solve, chunk_bytes, small_param_numel_threshold, ranks)
    return _config(LayoutRecipe(options=options), async_gpu_parallelism, prefetch_count)


@refuse_unknown("dmuon.create_processgroup_config", ELSEWHERE)
def create_processgroup_config(
    fsdp_pg: dist.ProcessGroup | None = None,
    tp_pg: dist.ProcessGroup | None = None,
    dp_pg: dist.ProcessGroup | None = None,
    ep_pg: dist.ProcessGroup | None = None,
    cp_pg: dist.ProcessGroup | None = None,
    pp_pg: dist.ProcessGroup | None = None,
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    *,
    shard_dims: ShardDims | Callable[[Tensor], ShardDims] | None = None,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    small_param_numel_threshold: int = SMALL_PARAM_NUMEL,
    ranks: Speeds = None,
) -> DistributedConfig:
    """For process groups of the user's own, each of which holds this rank. Collective over them.

    ``dp_pg`` and ``cp_pg`` hold copies; along ``fsdp_pg`` and ``tp_pg`` parameters are cut; along ``ep_pg`` and
    ``pp_pg`` ranks hold different parameters. DTensors lie as their placements say, whatever a group is called; along
    the groups of copies that their mesh does not know of they are copied.

    Args:
        shard_dims: of plain tensors that are shards: the dimension that each role cuts, such as
            ``{"fsdp": 0, "tp": 1}``, with None for copies; or a function of the tensor that says so. Where two roles
            cut one dimension, tensor and expert parallelism do it first.

    Further arguments are those of :func:`create_dtensor_config`.

    Raises:
        TypeError, ValueError: on all ranks of the groups, for groups that are not the lines of one grid; an option.
    """
    groups = {"fsdp": fsdp_pg, "tp": tp_pg, "dp": dp_pg, "ep": ep_pg, "cp": cp_pg, "pp": pp_pg}
    alone = not dist.is_initialized() and all(group is None for group in groups.values())
    grid = None if alone else grid_of_groups(groups)  # before anything that one rank alone may refuse
    options = LayoutOptions(costs, solve, chunk_bytes, small_param_numel_threshold, ranks)
    config = _config(LayoutRecipe(grid, shard_dims, options=options), async_gpu_parallelism, prefetch_count)
    config.state["process_groups"] = {role: group for role, group in groups.items() if group is not None}
    return config


@refuse_unknown("dmuon.create_devicemesh_config", ELSEWHERE)
def create_devicemesh_config(
    device_mesh: DeviceMesh,
    mesh_dim_names: Sequence[str],
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    *,
    shard_dims: ShardDims | Callable[[Tensor], ShardDims] | None = None,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    small_param_numel_threshold: int = SMALL_PARAM_NUMEL,
    ranks: Speeds = None,
) -> DistributedConfig:
    """For a device mesh: one name per dimension says what it is for.

    Args:
        mesh_dim_names: names that contain ``fsdp`` or ``shard``, ``tp``, ``dp`` or ``replicate``, ``cp``, ``ep``,
            ``pp``. What ``dp`` means, copies or shards, the placements of DTensors and ``shard_dims`` decide.

    Further arguments are those of :func:`create_processgroup_config`.

    Raises:
        TypeError, ValueError: a name that tells no role, another number of names than of dimensions; an option.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch.distributed DeviceMesh, got {type(device_mesh).__name__}")
    options = LayoutOptions(costs, solve, chunk_bytes, small_param_numel_threshold, ranks)
    recipe = LayoutRecipe(grid_of_mesh(device_mesh, mesh_dim_names, this_rank()), shard_dims, options=options)
    config = _config(recipe, async_gpu_parallelism, prefetch_count)
    config.state["device_mesh"] = device_mesh
    return config


@refuse_unknown("dmuon.create_auto_config", ELSEWHERE)
def create_auto_config(
    tp_process_group: dist.ProcessGroup | None = None,
    fsdp_process_group: dist.ProcessGroup | None = None,
    dp_process_group: dist.ProcessGroup | None = None,
    ep_process_group: dist.ProcessGroup | None = None,
    cp_process_group: dist.ProcessGroup | None = None,
    pp_process_group: dist.ProcessGroup | None = None,
    *,
    tp_shard_dim: int | None = None,
    fsdp_shard_dim: int | None = 0,
    ep_shard_dim: int | None = None,
    pp_stage_id: int | None = None,
    pp_num_stages: int | None = None,
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    small_param_numel_threshold: int = SMALL_PARAM_NUMEL,
    ranks: Speeds = None,
) -> DistributedConfig:
    """For process groups, with one dimension for all plain parameters that a group cuts. Collective over the groups.

    Args:
        tp_shard_dim, fsdp_shard_dim, ep_shard_dim: the dimension of plain tensors that the group cuts. None for ``ep``
            is different parameters; for ``tp`` and ``fsdp`` plain tensors are refused then. DTensors lie as their
            placements say.
        pp_stage_id, pp_num_stages: this rank's stage, from 0, and how many there are; stages are independent.

    Further arguments are those of :func:`create_dtensor_config`.

    Raises:
        TypeError, ValueError: groups that are not the lines of one grid, or a stage that the groups do not have.
    """
    _check_stage(pp_process_group, pp_stage_id, pp_num_stages)
    shard_dims = {"tp": tp_shard_dim, "fsdp": fsdp_shard_dim, "ep": ep_shard_dim}
    config = create_processgroup_config(
        fsdp_process_group,
        tp_process_group,
        dp_process_group,
        ep_process_group,
        cp_process_group,
        pp_process_group,
        async_gpu_parallelism,
        prefetch_count,
        shard_dims={role: dim for role, dim in shard_dims.items() if dim is not None},
        costs=costs,
        solve=solve,
        chunk_bytes=chunk_bytes,
        small_param_numel_threshold=small_param_numel_threshold,
        ranks=ranks,
    )
    if pp_stage_id is not None:
        config.state |= {"pp_stage_id": pp_stage_id, "pp_num_stages": pp_num_stages}
    return config


def default_config(copies: Mapping[int, dist.ProcessGroup], params: Sequence[Tensor]) -> DistributedConfig | None:
    """What ``distributed_config=None`` stands for; None where every rank has all of everything to itself.

    Args:
        copies: by ``id``, the parameters that ``DistributedDataParallel`` replicates, and over which group.
    """
    if not any(id(p) in copies or isinstance(p, DTensor) or flat_of(p) for p in params):
        return None
    ranks = {key: ranks_of(group) for key, group in copies.items()}
    return _config(LayoutRecipe(copies=ranks, options=LayoutOptions()))


def _config(recipe: LayoutRecipe, async_gpu_parallelism: bool = True, prefetch_count: int = 1) -> DistributedConfig:
    return DistributedConfig(
        AssignByLayout(recipe),
        GatherByLayout(recipe),
        RedistributeByLayout(recipe),
        {},
        async_gpu_parallelism,
        prefetch_count,
    )


def _check_stage(group: dist.ProcessGroup | None, stage: int | None, stages: int | None) -> None:
    if (stage is None) != (stages is None):
        raise ValueError("pp_stage_id and pp_num_stages belong together; pass both or neither")
    if stage is None or stages is None:
        return
    check_integer("pp_stage_id", stage)
    check_integer("pp_num_stages", stages)
    if not 0 <= stage < stages:
        raise ValueError(f"pp_stage_id must be from 0 to pp_num_stages - 1 = {stages - 1}, got {stage}")
    if group is not None and group.size() != stages:
        raise ValueError(f"pp_num_stages is {stages}, but pp_process_group has {group.size()} ranks, one per stage")


# -- the functions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ByLayout:
    """One of the three functions: what it does follows from a recipe, by which an optimizer may do the same at once."""

    recipe: LayoutRecipe


def recipe_of(config: DistributedConfig) -> LayoutRecipe | None:
    """By which matrices are exchanged at once; None where a user's functions gather or redistribute."""
    functions: tuple[object, ...] = (config.gather_fn, config.redistribute_fn)
    gathered, redistributed = (fn.recipe if isinstance(fn, ByLayout) else None for fn in functions)
    return gathered if gathered is redistributed else None


class AssignByLayout(ByLayout):
    """``assign_fn(params, state)``: find where the parameters lie, and plan who owns them.

    Collective over the ranks that share parameters, and over all ranks of the process groups of the configuration.

    Returns:
        Index to the owner; of a stack of matrices, to that of its first matrix.
    """

    def __call__(self, params: Sequence[Tensor], state: dict[str, Any]) -> dict[int, GlobalRank]:
        names = list(state.get("param_names", ()))
        if len(names) != len(params):
            names = [str(i) for i in range(len(params))]
        last: Layouts | None = state.get(LAYOUTS)
        among_holders = last is not None and last.among_holders
        state[LAYOUTS] = plan(lay_out(self.recipe, params, names, among_holders=among_holders))
        return planned_owners(state[LAYOUTS])


class GatherByLayout(ByLayout):
    """``gather_fn(update, dst_rank, state)``: the whole of a parameter's tensor on ``dst_rank``, None elsewhere.

    Collective over the ranks that hold the parameter. ``update`` is this rank's part, or a DTensor. Without
    ``state["current_param_idx"]``, or without an assignment, it lies as it says itself.

    Raises:
        ValueError: ``dst_rank`` does not hold the parameter.
        RuntimeError: ``update`` is not shaped as this rank's part.
    """

    def __call__(self, update: Tensor, dst_rank: GlobalRank, state: dict[str, Any]) -> Tensor | None:
        local = local_tensor(update).detach()
        found = _under_way(state)
        if found is None:
            state[_SINGLE] = lay_out(self.recipe, [update], ["update"])
            found = state[_SINGLE], 0
        layouts, index = found
        expected = local_tensor(layouts.params[index]).shape
        if local.shape != expected:
            raise RuntimeError(
                f"gather_fn got a tensor of shape {tuple(local.shape)} for parameter {index} on rank {this_rank()}, "
                f"whose part here is {tuple(expected)}"
            )
        placed = layouts.placed[index]
        if placed is None:
            return local
        placed = placed.whole
        parcel = whole_parcel(placed, dst_rank)
        domain, what = layouts.domains[placed.ranks], "gather of one matrix"
        part = local.reshape(1, *parcel.spread.pieces[domain.position].shape)  # of a flat piece, one row
        wholes = redistribute_all([parcel.to_owner], {0: part}, domain, local, what)
        return wholes[0][0] if wholes else None


class RedistributeByLayout(ByLayout):
    """``redistribute_fn(update, src_rank, state)``: this rank's part of what ``src_rank`` has whole.

    Collective over the ranks that hold the parameter. ``update`` is the whole tensor on ``src_rank``, None elsewhere.

    Raises:
        RuntimeError: called before ``gather_fn``, which learns where the tensor lies.
    """

    def __call__(self, update: Tensor | None, src_rank: GlobalRank, state: dict[str, Any]) -> Tensor:
        layouts, index = _under_way(state) or (state.get(_SINGLE), 0)
        if layouts is None:
            raise RuntimeError("redistribute_fn was called before gather_fn, which learns where the tensor lies")
        placed, local = layouts.placed[index], local_tensor(layouts.params[index])
        if placed is None:
            assert update is not None
            return update
        placed = placed.whole
        parcel = whole_parcel(placed, src_rank)
        domain, what = layouts.domains[placed.ranks], "scatter of one matrix"
        connect_copies(domain, [parcel.spread])
        held = {} if update is None else {0: update[None]}
        parts = redistribute_all([parcel.from_owner], held, domain, local, what)
        copies = Copies([parcel], domain)
        if copies.needed:
            parts = Copying(copies, parts, local.new_empty(0), f"copies of {what}").wait()
        return parts[0].view(local.shape).to(local.dtype) if parts else local.new_empty(local.shape)


def _under_way(state: Mapping[str, Any]) -> tuple[Layouts, int] | None:
    """The layouts of all parameters, and which of them a call is about; None without an assignment."""
    index: int | None = state.get("current_param_idx")
    layouts: Layouts | None = state.get(LAYOUTS)
    return None if index is None or layouts is None else (layouts, index)
