"""What cannot work is refused: on all ranks, by name, with what to do instead, before any data moves."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.toy import LR, SIZE, WIDTH, batch, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dmuon
from dmuon.check.model import Block, Network, loss_of, shard
from dmuon.check.topologies import full_state, tensor_parallel

OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "ns_coefficients": "classic"}


def default_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def dedicated(world: int, **options: Any) -> Network:
    model = build()
    dmuon.dedicate_params(model, default_mesh(world), **{"costs": "flops", **options})
    return model


def refused(model: nn.Module, mesh: Any, **options: Any) -> None:
    """``dedicate_params`` must raise; then the model is untouched and a correct call still works."""
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters() if not p.is_meta}
    try:
        dmuon.dedicate_params(model, mesh, **{"costs": "flops", **options})
    except Exception:
        after = dict(model.named_parameters())
        assert all(after[n] is p and torch.equal(p, value) for n, (p, value) in before.items()), "data moved"
        assert not model._forward_pre_hooks and not dmuon.owned_parameters(model)
        again = build()
        dmuon.dedicate_params(again, default_mesh(dist.get_world_size()), costs="flops")
        assert len(dmuon.owned_parameters(again)) == 9, "the ranks are still in step"
        raise


# -- the same mistake on every rank -------------------------------------------------------------------------------


def no_matrices(rank: int, world: int) -> None:
    refused(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), default_mesh(world))


def mesh_is_a_group(rank: int, world: int) -> None:
    refused(build(), dist.group.WORLD)


class mesh_names:
    """A picklable case: a mesh with these names, over both ranks."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.__qualname__ = f"mesh_names {names}"

    def __call__(self, rank: int, world: int) -> None:
        extents = (world, *[1] * (len(self.names) - 1))
        refused(build(), init_device_mesh("cpu", extents, mesh_dim_names=self.names))


def mesh_of_three_unnamed_dimensions(rank: int, world: int) -> None:
    refused(build(), init_device_mesh("cpu", (world, 1, 1)))


def mesh_in_another_order(rank: int, world: int) -> None:
    refused(build(), DeviceMesh("cpu", [1, 0]))


def mesh_in_another_order_along_one_dimension(rank: int, world: int) -> None:
    refused(build(), DeviceMesh("cpu", [[0], [1]][::-1], mesh_dim_names=("replicate", "shard")))


def mesh_of_other_ranks(rank: int, world: int) -> None:
    refused(build(), DeviceMesh("cpu", [1 - rank]))  # every rank passes the mesh of the other


def mesh_outlived_its_group(rank: int, world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    sub = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))["b"]
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    try:
        dmuon.dedicate_params(build(), mesh, costs="flops")
        raise AssertionError("no process group")
    except ValueError as error:
        assert "torn down" in str(error)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    refused(build(), sub)


def model_is_a_function(rank: int, world: int) -> None:
    dmuon.dedicate_params(lambda x: x, default_mesh(world), costs="flops")  # type: ignore[arg-type]


def dedicated_twice(rank: int, world: int) -> None:
    dmuon.dedicate_params(dedicated(world), default_mesh(world), costs="flops")


def part_dedicated_before(rank: int, world: int) -> None:
    model = build()
    dmuon.dedicate_params(model.blocks, default_mesh(world), costs="flops", blocks=list(model.blocks))
    dmuon.dedicate_params(model, default_mesh(world), costs="flops")


def fsdp_before(rank: int, world: int) -> None:
    model = build()
    torch_fully_shard(model.blocks[1], mesh=default_mesh(world))
    dmuon.dedicate_params(model, default_mesh(world), costs="flops")


def lay_out(module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Replace a parameter by a DTensor."""
    param = getattr(module, name)
    if all(type(p) in (Shard, Replicate) for p in placements):
        tensor = distribute_tensor(param.detach(), mesh, placements)
    else:
        tensor = DTensor.from_local(param.detach(), mesh, placements, run_check=False)
    setattr(module, name, nn.Parameter(tensor))


def matrix_sharded_over_the_mesh(rank: int, world: int) -> None:
    model = build()
    lay_out(model.blocks[0].up, "weight", default_mesh(world), [Shard(0)])
    dmuon.dedicate_params(model, default_mesh(world), costs="flops")


def embedding_sharded_over_the_mesh(rank: int, world: int) -> None:
    model = build()
    lay_out(model.embed, "weight", default_mesh(world), [Shard(0)])
    dmuon.dedicate_params(model, default_mesh(world), costs="flops")


def buffer_sharded_over_the_mesh(rank: int, world: int) -> None:
    model = build()
    model.register_buffer("table", distribute_tensor(torch.ones(4, 2), default_mesh(world), [Shard(0)]))
    dmuon.dedicate_params(model, default_mesh(world), costs="flops")


def matrix_over_two_dimensions(rank: int, world: int) -> None:
    model = build()
    lay_out(model.blocks[0].up, "weight", init_device_mesh("cpu", (1, world)), [Replicate(), Shard(0)])
    dmuon.dedicate_params(model, DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))["b"], costs="flops")


class tensor_placement:
    """A picklable case: tensor parallelism over both ranks with a placement that cannot be dedicated."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.__qualname__ = f"tensor_placement {type(placement).__name__}"

    def __call__(self, rank: int, world: int) -> None:
        model = build()
        whole = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        lay_out(model.blocks[0].up, "weight", whole["tp"], [self.placement])
        dmuon.dedicate_params(model, whole["dp"], costs="flops")


def two_tensor_parallel_meshes(rank: int, world: int) -> None:
    model = build()
    whole = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    lay_out(model.blocks[0].up, "weight", whole["tp"], [Shard(0)])
    lay_out(model.blocks[1].up, "weight", DeviceMesh("cpu", [1, 0]), [Shard(0)])
    dmuon.dedicate_params(model, whole["dp"], costs="flops")


def data_parallel(rank: int, world: int) -> None:
    refused(nn.DataParallel(build()), default_mesh(world))


def distributed_data_parallel(rank: int, world: int) -> None:
    model = build()
    model.blocks[0] = nn.parallel.DistributedDataParallel(model.blocks[0])
    refused(model, default_mesh(world))


def fsdp1(rank: int, world: int) -> None:
    refused(FullyShardedDataParallel(build(), device_id=torch.device("cpu")), default_mesh(world))


def composable_replicate(rank: int, world: int) -> None:
    from torch.distributed._composable.replicate import replicate

    model = build()
    replicate(model.blocks[1])
    refused(model, default_mesh(world))


class _Engine(nn.Module):
    pass


_Engine.__module__ = "deepspeed.runtime.engine"
_Engine.__name__ = "DeepSpeedEngine"


def deepspeed_engine(rank: int, world: int) -> None:
    refused(_Engine(), default_mesh(world))


def deepspeed_parameter(rank: int, world: int) -> None:
    model = build()
    model.blocks[1].up.weight.ds_id = 3  # type: ignore[attr-defined]
    refused(model, default_mesh(world))


def optimizer_before(rank: int, world: int) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    refused(model, default_mesh(world))
    del optimizer


def muon_before(rank: int, world: int) -> None:
    model = build()
    optimizer = dmuon.Muon(model)
    refused(model, default_mesh(world))
    del optimizer


def shared_by_blocks(rank: int, world: int) -> None:
    model = build()
    model.blocks[2].mix.weight = model.blocks[0].mix.weight
    refused(model, default_mesh(world))


def meta_device(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = build()
    refused(model, default_mesh(world))


def meta_buffer(rank: int, world: int) -> None:
    model = build()
    model.register_buffer("table", torch.zeros(3, device="meta"))
    refused(model, default_mesh(world))


def parametrized(rank: int, world: int) -> None:
    model = build()
    nn.utils.parametrizations.orthogonal(model.blocks[0].mix)
    refused(model, default_mesh(world))


def fused(rank: int, world: int) -> None:
    refused(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), default_mesh(world))


def option(**options: Any) -> Callable[[int, int], None]:
    return _Option(options)


class _Option:
    """A picklable case: ``dedicate_params`` with one option that it cannot take."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.__qualname__ = f"option {options}"

    def __call__(self, rank: int, world: int) -> None:
        refused(build(), default_mesh(world), **self.options)


def choose_head(fqn: str, module: nn.Module, param: nn.Parameter) -> bool:
    return fqn == "head.weight"


EVERYWHERE: list[tuple[Callable[[int, int], None], type[Exception], str]] = [
    (no_matrices, ValueError, r"no matrix was selected.*blocks=\[…\]"),
    (mesh_is_a_group, TypeError, "mesh must be a torch.distributed DeviceMesh, got ProcessGroup"),
    (mesh_names("tp"), ValueError, r"dimension 'tp' is one of tensor parallelism; pass the data-parallel dimensions"),
    (mesh_names("dp", "pp"), ValueError, "dimension 'pp' is one of pipeline parallelism; pass the data-parallel"),
    (mesh_names("replicate", "EP"), ValueError, "dimension 'EP' is one of expert parallelism; pass the data-parallel"),
    (mesh_of_three_unnamed_dimensions, ValueError, "mesh has 3 dimensions without names; name them"),
    (mesh_in_another_order, ValueError, r"mesh holds ranks \[1, 0\], .*sort them"),
    (mesh_in_another_order_along_one_dimension, ValueError, r"mesh holds ranks \[\[1\], \[0\]\], .*sort them"),
    (mesh_of_other_ranks, ValueError, r"mesh holds ranks \[[01]\].*this is rank [01] of 2; build the mesh"),
    (mesh_outlived_its_group, ValueError, "mesh.*process group.*build"),
    (model_is_a_function, TypeError, "model must be an nn.Module, got function"),
    (dedicated_twice, ValueError, "was called on 'this model' already; call it once per model"),
    (part_dedicated_before, ValueError, "was called on 'blocks' already"),
    (fsdp_before, ValueError, r"'blocks\.1' is sharded by fully_shard already; call dedicate_params before"),
    (matrix_sharded_over_the_mesh, ValueError, r"'blocks\.0\.up\.weight' .*Shard\(dim=0\).*call it before anything sh"),
    (embedding_sharded_over_the_mesh, ValueError, r"parameter 'embed\.weight' .*call it before anything shards"),
    (buffer_sharded_over_the_mesh, ValueError, r"buffer 'table' .*call it before anything shards"),
    (matrix_over_two_dimensions, ValueError, r"'blocks\.0\.up\.weight'.*split over one dimension.*select="),
    (tensor_placement(Partial()), ValueError, r"'blocks\.0\.up\.weight' .*Partial.*exclude it with select="),
    (tensor_placement(_StridedShard(0, split_factor=2)), ValueError, r"'blocks\.0\.up\.weight'.*exclude it with sel"),
    (two_tensor_parallel_meshes, ValueError, r"'blocks\.1\.up\.weight' .*another one than .*over one mesh"),
    (data_parallel, ValueError, "module 'model' is wrapped in DataParallel; .*plain model: one process per device"),
    (distributed_data_parallel, ValueError, r"'blocks\.0' is wrapped in DistributedDataParallel; .*named 'replicate'"),
    (fsdp1, ValueError, "'model' is wrapped in FullyShardedDataParallel; .*dmuon.fully_shard"),
    (composable_replicate, ValueError, r"'blocks\.1' is wrapped in .*replicate; .*dimension named 'replicate'"),
    (deepspeed_engine, TypeError, "DeepSpeed DeepSpeedEngine.*pass the plain model"),
    (deepspeed_parameter, ValueError, r"'blocks\.1\.up\.weight' is managed by DeepSpeed ZeRO; pass a plain model"),
    (optimizer_before, ValueError, r"AdamW already holds parameter 'blocks.*build the optimizer after"),
    (muon_before, ValueError, r"Muon already holds parameter 'blocks.*build the optimizer after"),
    (shared_by_blocks, ValueError, r"'blocks\.0\.mix\.weight' is shared by blocks blocks\.0, blocks\.2; untie it"),
    (meta_device, ValueError, "parameter 'embed.weight' is on the meta device; materialize"),
    (meta_buffer, ValueError, "buffer 'table' is on the meta device; materialize"),
    (parametrized, ValueError, r"'blocks\.0\.mix\.parametrizations\.weight\.original' is parametrized by _Orthogonal"),
    (fused, ValueError, r"'layers\.0\.self_attn\.in_proj_weight' of shape \(24, 8\) looks like several.*select="),
    (option(reshard_after_forward="yes"), TypeError, "reshard_after_forward must be True or False, got 'yes'"),
    (option(mp_policy=torch.bfloat16), TypeError, "mp_policy must be a .*MixedPrecisionPolicy, got dtype"),
    (option(mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16)), ValueError, "output_dtype.*fully_shard"),
    (option(mp_policy=MixedPrecisionPolicy(param_dtype=torch.int8)), ValueError, "param_dtype must be a floating"),
    (option(comm="single"), TypeError, r"comm must be a dmuon\.CommOptions, got str"),
    (option(comm={"transport": "single"}), TypeError, r"comm must be a dmuon\.CommOptions, got dict"),
    (option(comm=dmuon.CommOptions(transport="list")), ValueError, "transport='list' needs NCCL.*take 'broadcast' or"),
    (option(costs="typo"), ValueError, "cost cache typo: no such file; write it with dmuon-profile"),
    (option(costs=3), TypeError, "costs must be None, 'flops', the path .*got int"),
    (option(costs=dmuon.solver.CostTable.from_flops([(1, 2)])), ValueError, "no cost for shape .*dmuon-profile"),
    (option(solve="milp"), TypeError, "solve must be a dmuon.solver.SolveOptions, got str"),
    (option(select=choose_head), ValueError, r"select chose 'head\.weight', which lies outside .*blocks="),
    (option(blocks="blocks"), ValueError, "blocks: str is not a submodule"),
]


@pytest.mark.pitfall("P02", "P05", "P54", "P55", "P60", "P24")
@pytest.mark.parametrize(("case", "error", "match"), EVERYWHERE, ids=[f[0].__qualname__ for f in EVERYWHERE])
def test_mistakes_raise_on_every_rank_and_move_nothing(
    ranks: RankPool, case: Callable[[int, int], None], error: type[Exception], match: str
) -> None:
    ranks(2, case, expect=error, match=match, timeout=30)


BAD_COMM: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"transport": "ring"}, ValueError, "comm.transport must be one of auto, broadcast, single, list, got 'ring'"),
    ({"prefetch": -1}, ValueError, "comm.prefetch must be at least 0, got -1"),
    ({"prefetch": 1.5}, TypeError, "comm.prefetch must be an integer, got 1.5"),
    ({"outstanding_reductions": 0}, ValueError, "comm.outstanding_reductions must be at least 1, got 0"),
    ({"outstanding_reductions": True}, TypeError, "comm.outstanding_reductions must be an integer, got True"),
    ({"merge_bytes": -5}, ValueError, "comm.merge_bytes must be at least 0, got -5"),
    ({"merge_bytes": "1M"}, TypeError, "comm.merge_bytes must be an integer, got '1M'"),
    ({"asynchronous": 0}, TypeError, "comm.asynchronous must be True or False, got 0"),
    ({"timeout": 30}, TypeError, "comm.timeout must be a datetime.timedelta or None, got 30"),
    ({"timeout": timedelta(0)}, ValueError, "comm.timeout must be positive"),
    ({"depth": 2}, TypeError, "depth"),
]


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize(("options", "error", "match"), BAD_COMM, ids=[str(o) for o, _, _ in BAD_COMM])
def test_comm_options_name_the_value(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        dmuon.CommOptions(**options)


def test_solve_options_name_the_value() -> None:
    with pytest.raises(ValueError, match="method must be one of auto, milp, greedy, got 'x'"):
        dmuon.solver.SolveOptions(method="x")  # type: ignore[arg-type]


@pytest.mark.pitfall("P55")
def test_an_optimizer_that_nobody_can_reach_any_more_is_no_obstacle(ranks: RankPool) -> None:
    ranks(2, forgotten_optimizer)


def forgotten_optimizer(rank: int, world: int) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.cycle = optimizer  # type: ignore[attr-defined]
    del optimizer
    dmuon.dedicate_params(model, default_mesh(world), costs="flops")


# -- a fault on one rank only -------------------------------------------------------------------------------------


class Fault(LookupError):
    pass


def fault_on_one_rank(rank: int, world: int, kind: str) -> None:
    model = build()
    mesh = default_mesh(world)
    options: dict[str, Any] = {}
    if rank == 1:
        match kind:
            case "other shapes":
                model.blocks[1].up = nn.Linear(WIDTH, 30)
            case "other AdamW shapes":
                model.norm = nn.LayerNorm(WIDTH, bias=False)
            case "other dtype":
                model.head.to(torch.bfloat16)
            case "missing block":
                del model.blocks[2]
            case "extra block":
                model.blocks.append(Block(SIZE))
            case "other order":
                model.blocks[0]._modules = dict(reversed(model.blocks[0]._modules.items()))
            case "extra buffer":
                model.register_buffer("table", torch.zeros(3))
            case "frozen":
                model.blocks[0].mix.weight.requires_grad_(False)
            case "other policy":
                options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            case "other residency":
                options["reshard_after_forward"] = False
            case "other costs":
                options["costs"] = None
            case "other prefetch":
                options["comm"] = dmuon.CommOptions(prefetch=3)
            case "impossible transport":
                options["comm"] = dmuon.CommOptions(transport="list")
            case "wrapped":
                model.blocks[0] = nn.DataParallel(model.blocks[0])
            case "sharded":
                weight = DTensor.from_local(model.embed.weight.detach(), mesh, [Shard(0)], run_check=False)
                model.embed.weight = nn.Parameter(weight)
            case "bad option":
                options["mp_policy"] = "bf16"
            case "optimizer":
                model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            case _:
                options["select"] = SELECTS[kind]
    if kind == "sharded":  # comparing DTensors would communicate
        dmuon.dedicate_params(model, mesh, costs="flops")
    refused(model, mesh, **options)


def _raise(error: Exception) -> bool:
    raise error


SELECTS: dict[str, Callable[..., Any]] = {
    "select raises ValueError": lambda *_: _raise(ValueError("mine")),
    "select raises TypeError": lambda *_: _raise(TypeError("mine")),
    "select raises KeyError": lambda *_: _raise(KeyError("mine")),
    "select raises its own type": lambda *_: _raise(Fault("mine")),
    "select returns no bool": lambda *_: "yes",
}

ONE_RANK = {
    "other shapes": (ValueError, r"'blocks\.1\.up\.weight' is \(30, 13\).* on rank 1 and \(29, 13\).* on rank 0; b"),
    "other AdamW shapes": (ValueError, r"'norm\.bias' is absent on rank 1 and \(13,\).* on rank 0"),
    "other dtype": (ValueError, r"'head\.weight' is \(17, 13\), torch\.bfloat16, AdamW on rank 1"),
    "missing block": (ValueError, r"'blocks\.2\.\w+\.\w+' is absent on rank 1 and .* on rank 0"),
    "extra block": (ValueError, r"'blocks\.3\.\w+\.\w+' is .* on rank 1 and absent on rank 0"),
    "other order": (ValueError, "come in another order on some ranks.*build the same model"),
    "extra buffer": (ValueError, r"buffer 'table' is \(3,\), torch\.float32 on rank 1 and absent on rank 0"),
    "frozen": (ValueError, r"'blocks\.0\.mix\.weight' is .*AdamW on rank 1 and .*Muon in block blocks\.0 on rank 0"),
    "other policy": (ValueError, "option mp_policy is param_dtype=torch.bfloat16.* on rank 1"),
    "other residency": (ValueError, "option reshard_after_forward is False on rank 1 and True on rank 0"),
    "other costs": (ValueError, "option costs is NoneType on rank 1 and flops on rank 0"),
    "other prefetch": (ValueError, r"option comm is .*prefetch=3.* on rank 1 and .*prefetch=1.* on rank 0"),
    "impossible transport": (ValueError, "comm.transport='list' needs NCCL"),
    "wrapped": (ValueError, r"module 'blocks\.0' is wrapped in DataParallel"),
    "sharded": (ValueError, r"parameter 'embed\.weight' is a DTensor"),
    "bad option": (TypeError, "mp_policy must be"),
    "optimizer": (ValueError, r"optimizer SGD already holds parameter"),
    "select raises ValueError": (ValueError, "mine"),
    "select raises TypeError": (TypeError, "mine"),
    "select raises KeyError": (KeyError, "mine"),
    "select raises its own type": (Fault, "mine"),
    "select returns no bool": (TypeError, r"select\('embed\.weight', …\) returned 'yes'; return True or False"),
}  # fmt: skip


@pytest.mark.pitfall("P21", "P48", "P49")
@pytest.mark.parametrize("kind", ONE_RANK)
def test_a_fault_on_one_rank_ends_all_of_them(ranks: RankPool, kind: str) -> None:
    error, match = ONE_RANK[kind]
    first, second = ranks.outcomes(2, fault_on_one_rank, kind, timeout=30)
    assert first.raised(ValueError) and ("rank 1" in first.message or kind == "other order"), first
    assert second.raised(error), f"the rank at fault raises the original: {second}"
    for outcome in (first, second):
        assert re.search(match, outcome.message), outcome.message


# -- a fault in one data-parallel group of several ----------------------------------------------------------------


def fault_in_one_group(rank: int, world: int, kind: str) -> None:
    """Two data-parallel ranks times two tensor-parallel ones; ranks 0 and 2 or rank 3 alone are wrong."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build()
    options: dict[str, Any] = {}
    match kind:
        case "option":
            options["reshard_after_forward"] = "yes" if rank in (0, 2) else True
        case "policy":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if rank in (0, 2) else None
    tensor_parallel(model, whole["tp"])
    if kind == "model" and rank == 3:
        model.blocks[1] = nn.DataParallel(model.blocks[1])
    dmuon.dedicate_params(model, whole["dp"], costs="flops", **options)


@pytest.mark.pitfall("P21", "P48")
@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("option", Exception, "reshard_after_forward must be True or False, got 'yes'"),
        ("policy", ValueError, "option mp_policy is .* on rank 1 and .*bfloat16.* on rank 0"),
        ("model", ValueError, r"module 'blocks\.1' is wrapped in DataParallel"),
    ],
)
def test_a_fault_in_one_data_parallel_group_ends_all_of_them(
    ranks: RankPool, kind: str, error: type[Exception], match: str
) -> None:
    ranks(4, fault_in_one_group, kind, expect=error, match=match, timeout=30, pg_timeout=15)


# -- wrappers after dedication ------------------------------------------------------------------------------------


def wrapped_afterwards(rank: int, world: int, part: str, sync: bool) -> None:
    model = dedicated(world)
    module = model if part == "model" else model.blocks[0]
    wrapper = nn.parallel.DistributedDataParallel(module, init_sync=sync)
    assert not sync, "the first synchronization touches every parameter"
    wrapper(batch(0)[0])


@pytest.mark.pitfall("P54", "P55")
@pytest.mark.parametrize(("part", "sync"), [("model", True), ("block", True), ("model", False)])
def test_distributed_data_parallel_after_dedication_is_refused(ranks: RankPool, part: str, sync: bool) -> None:
    ranks(
        2,
        wrapped_afterwards,
        part,
        sync,
        expect=RuntimeError,
        match=r"'blocks\.0\.\w+\.weight'.*DistributedDataParallel.*dmuon averages",
    )


def data_parallel_afterwards(rank: int, world: int) -> None:
    """Without devices it only calls the module; with them it would copy the parameters, which is refused."""
    model = dedicated(world)
    wrapped = nn.DataParallel(model)
    assert_equal_weights(trained(model, rank, world, wrapper=wrapped), reference_weights(2))
    with pytest.raises(RuntimeError, match="is owned by dmuon"):
        copy.deepcopy(wrapped)


@pytest.mark.pitfall("P55")
def test_data_parallel_after_dedication_changes_nothing_on_the_cpu(ranks: RankPool) -> None:
    ranks(2, data_parallel_afterwards)


# -- cost files ---------------------------------------------------------------------------------------------------


def with_cost_file(rank: int, world: int, path: str) -> None:
    refused(build(), default_mesh(world), costs=path)


@pytest.mark.pitfall("P50")
@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "no such file; write it with dmuon-profile"),
        (b"", "corrupt or truncated JSON"),
        (b'{"schema": 1, "entr', "corrupt or truncated JSON"),
        (b"[1, 2]", "delete the file or measure anew"),
        (b'{"schema": 99}', "delete the file or measure anew"),
        (b"\xff\xfe\x00", "corrupt or truncated"),
    ],
)
def test_unusable_cost_files_are_refused_by_name(
    ranks: RankPool, tmp_path: Path, content: bytes | None, match: str
) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    ranks(2, with_cost_file, str(path), expect=ValueError, match=rf"cost cache .*costs\.json: .*{match}", timeout=30)


def save_costs(rank: int, world: int, path: str, device: str | None, bad_ns: int | None) -> None:
    """A file that fits this machine, except for what the caller alters."""
    from dmuon.planning.cost_cache import CostCache, Timing
    from dmuon.planning.device_key import NsOptions, device_key

    shapes = {(13, 13), (13, 29)}
    timing = Timing(median_ns=1000, p10_ns=990, p90_ns=1010, n=5)
    CostCache(device_key(torch.device("cpu"), NsOptions()), {s: {1: timing} for s in shapes}).save(path)
    text = Path(path).read_text()
    document = json.loads(text)
    if device is not None:
        document["key"]["device"] = device
    if bad_ns is not None:
        text = json.dumps(document).replace("1000", str(bad_ns))
    else:
        text = json.dumps(document)
    Path(path).write_text(text)


def plan_from_cost_file(rank: int, world: int, path: str) -> tuple[str, int]:
    plan = dmuon.dedicate_params(build(), default_mesh(world), costs=path)
    return plan.cost_source, max(plan.solution.loads_ns)


@pytest.mark.pitfall("P50")
def test_cost_files_of_another_device_are_refused_and_of_this_one_used(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "costs.json")
    ranks(1, save_costs, path, "another device", None)
    ranks(
        2, with_cost_file, path, expect=ValueError, match=r"'device' is 'another device', this run's is .*dmuon-profile"
    )
    os.unlink(path)
    ranks(1, save_costs, path, None, -1000)
    ranks(2, with_cost_file, path, expect=ValueError, match=r"costs\.json: .*-1000")
    os.unlink(path)
    ranks(1, save_costs, path, None, None)
    assert ranks(2, plan_from_cost_file, path) == [(f"cost cache {path}", 5000)] * 2, "9 matrices of 1000 ns each"


# -- owned parameters after dedication ----------------------------------------------------------------------------


def operations(rank: int, world: int) -> dict[str, str]:
    """What each use of a resting weight raises; every rank does them alone, so one that communicated would hang."""
    model = dedicated(world)
    weight = model.blocks[0].mix.weight
    mesh = default_mesh(world)
    before = full_state(model)
    found = {}
    if rank == 1:
        for name, use in OPERATIONS.items():
            try:
                use(model, weight, mesh)
                found[name] = "nothing"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    after = full_state(model)
    assert all(torch.equal(after[n], t) for n, t in before.items()), "a refused operation changed a weight"
    return found


OPERATIONS: dict[str, Callable[[Network, Any, DeviceMesh], Any]] = {
    "full_tensor": lambda m, w, mesh: w.full_tensor(),
    "redistribute": lambda m, w, mesh: w.redistribute(mesh, [Replicate()]),
    "to_local": lambda m, w, mesh: w.to_local().clone(),
    "max": lambda m, w, mesh: w.max(),
    "sum": lambda m, w, mesh: w.sum(),
    "mean": lambda m, w, mesh: w.detach().mean(),
    "isnan": lambda m, w, mesh: w.isnan(),
    "inf norm": lambda m, w, mesh: w.norm(float("inf")),
    "row norms": lambda m, w, mesh: w.norm(dim=1),
    "matmul": lambda m, w, mesh: torch.ones(2, WIDTH) @ w,
    "linear": lambda m, w, mesh: m.blocks[0].mix(torch.ones(2, WIDTH)),
    "transpose": lambda m, w, mesh: w.T,
    "index": lambda m, w, mesh: w[0],
    "view": lambda m, w, mesh: w.view(-1),
    "equal": lambda m, w, mesh: torch.equal(w, w),
    "mix owners": lambda m, w, mesh: w.data.add_(torch.ones(WIDTH, WIDTH)),
    "copy_": lambda m, w, mesh: w.data.copy_(torch.ones(WIDTH, WIDTH)),
    "data =": lambda m, w, mesh: setattr(w, "data", torch.ones(WIDTH, WIDTH)),
    "random init": lambda m, w, mesh: nn.init.normal_(w),
    "reset_parameters": lambda m, w, mesh: m.blocks[0].mix.reset_parameters(),
    "share_memory": lambda m, w, mesh: w.share_memory_(),
    "weight_norm": lambda m, w, mesh: nn.utils.parametrizations.weight_norm(m.blocks[0].mix),
    "deepcopy": lambda m, w, mesh: copy.deepcopy(w),
    "deepcopy model": lambda m, w, mesh: copy.deepcopy(m),
    "pickle": lambda m, w, mesh: pickle.dumps(w),
    "torch.save(model)": lambda m, w, mesh: torch.save(m, io.BytesIO()),
    "bfloat16": lambda m, w, mesh: m.blocks[0].mix.to(torch.bfloat16),
    "half": lambda m, w, mesh: m.blocks[0].mix.half(),
    "double": lambda m, w, mesh: m.blocks[0].mix.double(),
    "meta": lambda m, w, mesh: m.blocks[0].mix.to("meta"),
    "to_empty": lambda m, w, mesh: m.blocks[0].mix.to_empty(device="cpu"),
}
REMEDIES = {
    "deepcopy": "RuntimeError.*cannot be copied: copy the model before dedicate_params",
    "deepcopy model": "RuntimeError.*cannot be copied: copy the model before dedicate_params",
    "pickle": r"RuntimeError.*cannot be pickled: save model\.state_dict\(\)",
    "torch.save(model)": r"RuntimeError.*cannot be pickled: save model\.state_dict\(\)",
    **dict.fromkeys(
        ("bfloat16", "half", "double", "meta", "to_empty"), "RuntimeError.*move the model before dedicate.*mp_policy"
    ),
    "inf norm": r"RuntimeError.*dmuon\.clip_grad_norm_",
}  # fmt: skip


@pytest.mark.pitfall("P54")
def test_what_would_lie_or_hang_raises_on_the_rank_that_does_it(ranks: RankPool) -> None:
    found = ranks(2, operations)[1]
    assert found.keys() == OPERATIONS.keys()
    for name, message in found.items():
        remedy = REMEDIES.get(name, r"RuntimeError.*dmuon\.summon_full_params\(model\)")
        assert re.search(remedy, message) and "'blocks.0.mix.weight'" in message, f"{name}: {message}"


def fsdp_without_ignored_params(rank: int, world: int, root: bool) -> None:
    model = dedicated(world)
    torch_fully_shard(model if root else model.blocks[0].mix, mesh=default_mesh(world))


@pytest.mark.pitfall("P54")
@pytest.mark.parametrize("root", [False, True], ids=["layer", "root"])
def test_torch_fully_shard_names_our_own(ranks: RankPool, root: bool) -> None:
    ranks(
        2, fsdp_without_ignored_params, root, expect=TypeError, match=r"'blocks\.0\..*call dmuon\.fully_shard instead"
    )


def fsdp_by_the_rules(rank: int, world: int) -> None:
    model = dedicated(world)
    mesh = default_mesh(world)
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh, ignored_params=dmuon.owned_parameters(model))
    torch_fully_shard(model, mesh=mesh, ignored_params=dmuon.owned_parameters(model))
    assert_equal_weights(trained(model, rank, world), reference_weights(2))


@pytest.mark.pitfall("P54")
def test_torch_fully_shard_works_with_ignored_params(ranks: RankPool) -> None:
    ranks(2, fsdp_by_the_rules)


def trained(
    model: nn.Module,
    rank: int,
    world: int,
    before_step: Callable[[], Any] = lambda: None,
    wrapper: nn.Module | None = None,
) -> dict[str, Tensor]:
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(2):
        before_step()
        optimizer.zero_grad()
        loss_of(wrapper or model, *shard(batch(step), rank, world)).backward()
        optimizer.step()
    return full_state(model)


def moves_that_change_nothing(rank: int, world: int) -> list[dict[str, Tensor]]:
    found = []
    for move in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.to(torch.float32).cpu()):
        model = dedicated(world)
        move(model)
        found.append(trained(model, rank, world))
        model = dedicated(world)
        found.append(trained(model, rank, world, before_step=lambda m=model, f=move: f(m)))
    return found


@pytest.mark.pitfall("P55")
def test_moves_that_change_nothing_keep_training_exact(ranks: RankPool) -> None:
    expected = reference_weights(2)
    for found in ranks(2, moves_that_change_nothing):
        for weights in found:
            assert_equal_weights(weights, expected)


def edits(rank: int, world: int, keep: bool) -> list[Tensor]:
    """Logits of forwards, each after an edit of a resting weight in place."""
    model = dedicated(world, reshard_after_forward=not keep)
    tokens = batch(0)[0]
    outputs = [model(tokens)]
    with torch.no_grad():
        for edit in (
            lambda w: w.data.mul_(2),
            lambda w: w.mul_(0.5),
            lambda w: nn.init.zeros_(w),
            lambda w: w.data.detach().add_(1.0),
            lambda w: torch._foreach_mul_([w], 3.0),
            lambda w: w.fill_(0.25),
        ):
            edit(model.blocks[0].mix.weight)
            outputs.append(model(tokens))
    return [o.detach() for o in outputs]


def edits_in_one_process() -> list[Tensor]:
    model = build()
    tokens = batch(0)[0]
    start = model.blocks[0].mix.weight.detach().clone()
    outputs = []
    with torch.no_grad():
        for value in (start, 2 * start, start, 0 * start, 0 * start + 1, 0 * start + 3, 0 * start + 0.25):
            model.blocks[0].mix.weight.copy_(value)
            outputs.append(model(tokens))
    return outputs


@pytest.mark.pitfall("P17", "P28")
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
def test_edits_in_place_reach_the_next_forward(ranks: RankPool, keep: bool) -> None:
    expected = edits_in_one_process()
    for found in ranks(2, edits, keep):
        for number, (output, wanted) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(output, wanted, msg=lambda m, n=number: f"after edit {n}: {m}")


ODD_BUFFERS: dict[str, Tensor] = {
    "bool": torch.tensor([True, False]),
    "int16": torch.ones(3, dtype=torch.int16),
    "int64 scalar": torch.tensor(7),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "complex": torch.ones(2, dtype=torch.complex64),
    "empty": torch.zeros(0, 3),
    "strided": torch.arange(12.0).view(3, 4).T,
}


def odd_parameters(rank: int, world: int) -> None:
    model = build()
    model.table = nn.Parameter(torch.full((2, 2), rank), requires_grad=False)
    model.blocks[0].codes = nn.Parameter(torch.full((2, 2), rank), requires_grad=False)
    for name, value in ODD_BUFFERS.items():
        model.register_buffer(name, value if rank == 0 else torch.zeros_like(value))
    dmuon.dedicate_params(model, default_mesh(world), costs="flops")
    assert torch.equal(model.table, torch.zeros(2, 2, dtype=torch.int64)), "rank 0's"
    assert torch.equal(model.blocks[0].codes, torch.zeros(2, 2, dtype=torch.int64))
    for name, value in ODD_BUFFERS.items():
        assert torch.equal(getattr(model, name).to(torch.complex64), value.to(torch.complex64)), name
    trained(model, rank, world)


@pytest.mark.pitfall("P60")
def test_integer_parameters_and_buffers_of_any_dtype_become_rank_0s(ranks: RankPool) -> None:
    ranks(2, odd_parameters)


# -- one process --------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P56")
def test_one_process_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    assert_equal_weights(dict(model.state_dict()), reference_weights(2))
    with pytest.raises(TypeError, match=r"mesh must be a torch\.distributed DeviceMesh"):
        dmuon.dedicate_params(model, None)  # type: ignore[arg-type]
    for use in (
        lambda: dmuon.set_requires_gradient_sync(model, False),
        lambda: dmuon.summon_full_params(model).__enter__(),
        lambda: dmuon.no_sync(model).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"not dedicated: call dmuon\.dedicate_params"):
            use()
    assert dmuon.owned_parameters(model) == set()


@pytest.mark.pitfall("P56")
def test_a_mesh_without_a_process_group_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    with pytest.raises(ValueError, match=r"not initialized.*init_process_group.*dmuon\.Muon\(model\) alone is enough"):
        dmuon.dedicate_params(build(), mesh)


# -- import -------------------------------------------------------------------------------------------------------

IMPORT = """
    import multiprocessing, os, sys, threading
    import torch, torch.distributed as dist
    import torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.checkpoint
    {before}
    def tasks():
        return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    environment, threads, modules = dict(os.environ), tasks(), set(sys.modules)
    patched = {{(m, n): v for m in ("torch", "torch.distributed", "torch.nn", "torch.optim", "torch.Tensor")
               for n, v in vars(eval(m)).items()}}
    generator = torch.get_rng_state()
    import dmuon
    assert not dist.is_initialized()
    assert tasks() == threads and not multiprocessing.active_children()
    assert dict(os.environ) == environment
    assert not torch.cuda.is_initialized()
    assert torch.equal(torch.get_rng_state(), generator)
    changed = [k for k, v in patched.items() if vars(eval(k[0])).get(k[1]) is not v]
    assert not changed, f"patched {{changed}}"
    heavy = {{"pulp", "triton", "matplotlib", "tqdm", "multiprocessing.pool"}} & (set(sys.modules) - modules)
    assert not heavy, f"imported {{heavy}}"
    {after}
"""


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "" and done.stderr == "", "an import prints nothing"


def test_import_has_no_side_effects() -> None:
    run_python(IMPORT.format(before="", after=""))


@pytest.mark.pitfall("P51", "P47")
def test_works_without_a_solver_and_without_triton() -> None:
    after = """
    matrices = [dmuon.solver.Matrix(f"m{i}", 64, 64 + i, "b") for i in range(6)]
    table = dmuon.solver.CostTable.from_flops({m.shape for m in matrices})
    plan = dmuon.solver.plan(matrices, 2, table)
    assert len(plan.owners) == 6
    x = torch.randn(3, 8, 12)
    u = dmuon.kernels.orthogonalize(x)
    assert (torch.linalg.svdvals(u) - 1).abs().max() < 0.5
    """
    run_python(
        IMPORT.format(
            before="sys.modules['pulp'] = sys.modules['triton'] = None", after=textwrap.indent(after, "")
        ).replace("set(sys.modules) - modules", "{n for n, m in sys.modules.items() if m is not None} - modules")
    )
