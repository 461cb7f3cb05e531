"""What cannot work is refused: on all ranks, by name, with what to do instead, before any data moves."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import Raised, assert_equal_weights, raised_by
from harness.limits import PROGRAM_SECONDS
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.toy import OPTIONS, SIZE, WIDTH, batch, build
from harness.trees import node, stack
from torch import Tensor
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dmuon
from dmuon.check.model import Block, Network, loss_of, shard
from dmuon.check.topologies import full_state, tensor_parallel


def default_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def dedicate(model: Any, mesh: Any = None, **options: Any) -> None:
    dmuon.dedicate_params(model, default_mesh() if mesh is None else mesh, **{"costs": "flops", **options})


def dedicated(**options: Any) -> Network:
    model = build()
    dedicate(model, **options)
    return model


def refused(model: nn.Module, mesh: Any = None, **options: Any) -> None:
    """``dedicate_params`` must raise; then the model is untouched and a correct call still works."""
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters() if not p.is_meta}
    try:
        dedicate(model, mesh, **options)
    except Exception:
        after = dict(model.named_parameters())
        assert all(after[n] is p and torch.equal(p, value) for n, (p, value) in before.items()), "data moved"
        assert not model._forward_pre_hooks and not dmuon.owned_parameters(model)
        assert len(dmuon.owned_parameters(dedicated())) == 9, "the ranks are still in step"
        raise


# -- the same mistake on every rank -------------------------------------------------------------------------------


def pairs(*names: str) -> DeviceMesh:
    """Both ranks along the first dimension."""
    return init_device_mesh("cpu", (2, *[1] * (len(names) - 1)), mesh_dim_names=names)


def part_dedicated_before() -> None:
    model = build()
    dedicate(model.blocks, blocks=list(model.blocks))
    dedicate(model)


def fsdp_before() -> None:
    model = build()
    torch_fully_shard(model.blocks[1], mesh=default_mesh())
    dedicate(model)


def laid_out(name: str, mesh: DeviceMesh, placements: list[Placement], model: Network | None = None) -> Network:
    """A model with a DTensor for one parameter."""
    model = build() if model is None else model
    owner, _, leaf = name.rpartition(".")
    param = model.get_parameter(name)
    if all(type(p) in (Shard, Replicate) for p in placements):
        tensor = distribute_tensor(param.detach(), mesh, placements)
    else:
        tensor = DTensor.from_local(param.detach(), mesh, placements, run_check=False)
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
    return model


def buffer_sharded_over_the_mesh() -> None:
    model = build()
    model.register_buffer("table", distribute_tensor(torch.ones(4, 2), default_mesh(), [Shard(0)]))
    dedicate(model)


def tensor_placement(placement: Placement) -> None:
    """Tensor parallelism over both ranks with a placement that cannot be dedicated."""
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    dedicate(laid_out(UP, whole["tp"], [placement]), whole["dp"])


def two_tensor_parallel_meshes() -> None:
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = laid_out(UP, whole["tp"], [Shard(0)])
    dedicate(laid_out("blocks.1.up.weight", DeviceMesh("cpu", [1, 0]), [Shard(0)], model), whole["dp"])


def changed(change: Callable[[Network], Any]) -> None:
    """A model on which somebody has put a hand is refused; what ``change`` returns is alive meanwhile."""
    model = build()
    alive = change(model)
    refused(model)
    del alive


class _Engine(nn.Module):
    pass


_Engine.__module__ = "deepspeed.runtime.engine"
_Engine.__name__ = "DeepSpeedEngine"


def wrapped_afterwards(part: str, sync: bool) -> None:
    model = dedicated()
    wrapper = nn.parallel.DistributedDataParallel(model.get_submodule(part), init_sync=sync)
    assert not sync, "the first synchronization touches every parameter"
    wrapper(batch(0)[0])


def fsdp_without_ignored_params(part: str) -> None:
    torch_fully_shard(dedicated().get_submodule(part), mesh=default_mesh())


UP = "blocks.0.up.weight"
POLICY = MixedPrecisionPolicy
DDP = nn.parallel.DistributedDataParallel
BY_DDP = r"'blocks\.0\.\w+\.weight'.*DistributedDataParallel.*dmuon averages"
BY_FSDP = r"'blocks\.0\..*call dmuon\.fully_shard instead"

# By name: what is done, and what is raised. Ranks do all of them in one call.
EVERYWHERE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no matrices": (
        lambda: refused(nn.Sequential(nn.Linear(3, 3), nn.ReLU())),
        ValueError, r"no matrix was selected.*'0\.weight': output layer.*select=",
    ),
    "mesh is a group": (
        lambda: refused(build(), dist.group.WORLD),
        TypeError, "mesh must be a torch.distributed DeviceMesh, got ProcessGroup",
    ),
    "mesh tp": (
        lambda: refused(build(), pairs("tp")),
        ValueError, r"dimension 'tp' is one of tensor parallelism; pass the data-parallel dimensions",
    ),
    "mesh dp, pp": (
        lambda: refused(build(), pairs("dp", "pp")),
        ValueError, "dimension 'pp' is one of pipeline parallelism; pass the data-parallel",
    ),
    "mesh replicate, EP": (
        lambda: refused(build(), pairs("replicate", "EP")),
        ValueError, "dimension 'EP' is one of expert parallelism; pass the data-parallel",
    ),
    "mesh of three unnamed dimensions": (
        lambda: refused(build(), init_device_mesh("cpu", (2, 1, 1))),
        ValueError, "mesh has 3 dimensions without names; name them",
    ),
    "mesh in another order": (
        lambda: refused(build(), DeviceMesh("cpu", [1, 0])),
        ValueError, r"mesh holds ranks \[1, 0\], .*sort them",
    ),
    "mesh in another order along one dimension": (
        lambda: refused(build(), DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("replicate", "shard"))),
        ValueError, r"mesh holds ranks \[\[1\], \[0\]\], .*sort them",
    ),
    "every rank passes the mesh of the other": (
        lambda: refused(build(), DeviceMesh("cpu", [1 - dist.get_rank()])),
        ValueError, r"mesh holds ranks \[[01]\].*this is rank [01] of 2; build the mesh",
    ),
    "model is a function": (
        lambda: dedicate(lambda x: x),
        TypeError, "model must be an nn.Module, got function",
    ),
    "dedicated twice": (
        lambda: dedicate(dedicated()),
        ValueError, "was called on 'this model' already; call it once per model",
    ),
    "part dedicated before": (part_dedicated_before, ValueError, "was called on 'blocks' already"),
    "fsdp before": (
        fsdp_before,
        ValueError, r"'blocks\.1' is sharded by fully_shard already; call dedicate_params before",
    ),
    "matrix sharded over the mesh": (
        lambda: dedicate(laid_out(UP, default_mesh(), [Shard(0)])),
        ValueError, r"'blocks\.0\.up\.weight' .*Shard\(dim=0\).*call it before anything sh",
    ),
    "embedding sharded over the mesh": (
        lambda: dedicate(laid_out("embed.weight", default_mesh(), [Shard(0)])),
        ValueError, r"parameter 'embed\.weight' .*call it before anything shards",
    ),
    "buffer sharded over the mesh": (
        buffer_sharded_over_the_mesh,
        ValueError, r"buffer 'table' .*call it before anything shards",
    ),
    "matrix over two dimensions": (
        lambda: dedicate(
            laid_out(UP, init_device_mesh("cpu", (1, 2)), [Replicate(), Shard(0)]),
            DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))["b"],
        ),
        ValueError, r"'blocks\.0\.up\.weight'.*split over one dimension.*select=",
    ),
    "tensor parallel Partial": (
        lambda: tensor_placement(Partial()),
        ValueError, r"'blocks\.0\.up\.weight' .*Partial.*exclude it with select=",
    ),
    "tensor parallel _StridedShard": (
        lambda: tensor_placement(_StridedShard(0, split_factor=2)),
        ValueError, r"'blocks\.0\.up\.weight'.*exclude it with sel",
    ),
    "two tensor parallel meshes": (
        two_tensor_parallel_meshes,
        ValueError, r"'blocks\.1\.up\.weight' .*another one than .*over one mesh",
    ),
    "DataParallel": (
        lambda: refused(nn.DataParallel(build())),
        ValueError, "module 'model' is wrapped in DataParallel; .*plain model: one process per device",
    ),
    "DistributedDataParallel": (
        lambda: changed(lambda m: m.blocks.__setitem__(0, DDP(m.blocks[0]))),
        ValueError, r"'blocks\.0' is wrapped in DistributedDataParallel; .*named 'replicate'",
    ),
    "fsdp1": (
        lambda: refused(FullyShardedDataParallel(build(), device_id=torch.device("cpu"))),
        ValueError, "'model' is wrapped in FullyShardedDataParallel; .*dmuon.fully_shard",
    ),
    "composable replicate": (
        lambda: changed(lambda m: replicate(m.blocks[1])),
        ValueError, r"'blocks\.1' is wrapped in .*replicate; .*dimension named 'replicate'",
    ),
    "DeepSpeed engine": (
        lambda: refused(_Engine()),
        TypeError, "DeepSpeed DeepSpeedEngine.*pass the plain model",
    ),
    "DeepSpeed parameter": (
        lambda: changed(lambda m: setattr(m.blocks[1].up.weight, "ds_id", 3)),
        ValueError, r"'blocks\.1\.up\.weight' is managed by DeepSpeed ZeRO; pass a plain model",
    ),
    "optimizer before": (
        lambda: changed(lambda m: torch.optim.AdamW(m.parameters())),
        ValueError, r"AdamW already holds parameter 'blocks.*build the optimizer after",
    ),
    "Muon before": (
        lambda: changed(dmuon.Muon),
        ValueError, r"Muon already holds parameter 'blocks.*build the optimizer after",
    ),
    "shared by blocks": (
        lambda: changed(lambda m: setattr(m.blocks[2].mix, "weight", m.blocks[0].mix.weight)),
        ValueError, r"'blocks\.0\.mix\.weight' is shared by blocks blocks\.0, blocks\.2; untie it",
    ),
    "parametrized": (
        lambda: changed(lambda m: nn.utils.parametrizations.orthogonal(m.blocks[0].mix)),
        ValueError, r"'blocks\.0\.mix\.parametrizations\.weight\.original' is parametrized by _Orthogonal",
    ),
    "fused": (
        lambda: refused(node(layers=stack(lambda: node(qkv=nn.Linear(8, 24))))),
        ValueError, r"'layers\.0\.qkv\.weight' of shape \(24, 8\) looks like 3 .*select=",
    ),
    "DistributedDataParallel around it": (lambda: wrapped_afterwards("", True), RuntimeError, BY_DDP),
    "DistributedDataParallel around a block of it": (
        lambda: wrapped_afterwards("blocks.0", True), RuntimeError, BY_DDP,
    ),
    "DistributedDataParallel that runs": (lambda: wrapped_afterwards("", False), RuntimeError, BY_DDP),
    "fully_shard of torch on it": (lambda: fsdp_without_ignored_params(""), TypeError, BY_FSDP),
    "fully_shard of torch on a layer of it": (
        lambda: fsdp_without_ignored_params("blocks.0.mix"), TypeError, BY_FSDP,
    ),
}  # fmt: skip

BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward must be True or False, got 'yes'"),
    ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy must be a .*MixedPrecisionPolicy, got dtype"),
    ({"mp_policy": POLICY(output_dtype=torch.bfloat16)}, ValueError, "output_dtype.*fully_shard"),
    ({"mp_policy": POLICY(param_dtype=torch.int8)}, ValueError, "param_dtype must be a floating"),
    ({"comm": "single"}, TypeError, r"comm must be a dmuon\.CommOptions, got str"),
    ({"comm": {"transport": "single"}}, TypeError, r"comm must be a dmuon\.CommOptions, got dict"),
    ({"comm": dmuon.CommOptions(max_ctas=4)}, ValueError, "comm.max_ctas=4 needs NCCL, this group runs gloo; leave it"),
    ({"costs": "typo"}, ValueError, "cost cache typo: no such file; write it with dmuon-profile"),
    ({"costs": 3}, TypeError, "costs must be None, 'flops', the path .*got int"),
    ({"costs": dmuon.solver.CostTable.from_flops([(1, 2)])}, ValueError, "no cost for shape .*dmuon-profile"),
    ({"solve": "milp"}, TypeError, "solve must be a dmuon.solver.SolveOptions, got str"),
    (
        {"select": lambda fqn, *_: fqn == "head.weight"},
        ValueError,
        r"chose 'head\.weight', .* outside .*blocks=",
    ),
    ({"blocks": "blocks"}, ValueError, "blocks: str is not a submodule"),
]
EVERYWHERE |= {
    f"option {number} {next(iter(options))}": (partial(lambda o: refused(build(), **o), options), error, match)
    for number, (options, error, match) in enumerate(BAD_OPTIONS)
}


def make_mistakes(_rank: int, _world: int) -> dict[str, Raised]:
    return {name: raised_by(mistake) for name, (mistake, _, _) in EVERYWHERE.items()}


@pytest.fixture(scope="module")
def mistakes(ranks: RankPool) -> list[dict[str, Raised]]:
    return ranks(2, make_mistakes, timeout=110)


@pytest.mark.pitfall("P02", "P05", "P54", "P55", "P60")
@pytest.mark.parametrize("name", EVERYWHERE)
def test_mistakes_raise_on_every_rank_and_move_nothing(mistakes: list[dict[str, Raised]], name: str) -> None:
    _, error, match = EVERYWHERE[name]
    for of_rank in mistakes:
        assert of_rank[name].matches(error, match), of_rank[name]


def mesh_outlived_its_group(rank: int, world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    sub = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))["b"]
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="torn down"):
        dedicate(build(), mesh)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    refused(build(), sub)


@pytest.mark.pitfall("P24")
def test_a_mesh_that_outlived_its_group_is_refused(ranks: RankPool) -> None:
    ranks(2, mesh_outlived_its_group, expect=ValueError, match="mesh.*process group.*build", timeout=30, fresh=True)


BAD_COMM: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"transport": "ring"}, ValueError, "comm.transport must be one of auto, broadcast, single, got 'ring'"),
    ({"prefetch": -1}, ValueError, "comm.prefetch must be at least 0, got -1"),
    ({"prefetch": 1.5}, TypeError, "comm.prefetch must be an integer, got 1.5"),
    ({"outstanding_reductions": 0}, ValueError, "comm.outstanding_reductions must be at least 1, got 0"),
    ({"outstanding_reductions": True}, TypeError, "comm.outstanding_reductions must be an integer, got True"),
    ({"merge_bytes": -5}, ValueError, "comm.merge_bytes must be at least 0, got -5"),
    ({"merge_bytes": "1M"}, TypeError, "comm.merge_bytes must be an integer, got '1M'"),
    ({"max_ctas": 0}, ValueError, "comm.max_ctas must be at least 1, got 0"),
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
    dedicate(model)


# -- a fault on one rank only -------------------------------------------------------------------------------------


class Fault(LookupError):
    pass


def _raise(error: Exception) -> bool:
    raise error


def reversed_modules(model: Network) -> None:
    model.blocks[0]._modules = dict(reversed(model.blocks[0]._modules.items()))


def sharded_alone(model: Network) -> None:
    weight = DTensor.from_local(model.embed.weight.detach(), default_mesh(), [Shard(0)], run_check=False)
    model.embed.weight = nn.Parameter(weight)


# By name: what the rank at fault does to its model, which options it returns, and what is raised there.
ONE_RANK: dict[str, tuple[Callable[[Network], Any], type[Exception], str]] = {
    "other shapes": (
        lambda m: setattr(m.blocks[1], "up", nn.Linear(WIDTH, 30)),
        ValueError, r"'blocks\.1\.up\.weight' is \(30, 13\).* on rank 1 and \(29, 13\).* on rank 0; b",
    ),
    "other AdamW shapes": (
        lambda m: setattr(m, "norm", nn.LayerNorm(WIDTH, bias=False)),
        ValueError, r"'norm\.bias' is absent on rank 1 and \(13,\).* on rank 0",
    ),
    "other dtype": (
        lambda m: m.head.to(torch.bfloat16),
        ValueError, r"'head\.weight' is \(17, 13\), torch\.bfloat16, AdamW on rank 1",
    ),
    "missing block": (
        lambda m: m.blocks.__delitem__(2),
        ValueError, r"'blocks\.2\.\w+\.\w+' is absent on rank 1 and .* on rank 0",
    ),
    "extra block": (
        lambda m: m.blocks.append(Block(SIZE)),
        ValueError, r"'blocks\.3\.\w+\.\w+' is .* on rank 1 and absent on rank 0",
    ),
    "other order": (
        reversed_modules, ValueError, "come in another order on some ranks.*build the same model",
    ),
    "extra buffer": (
        lambda m: m.register_buffer("table", torch.zeros(3)),
        ValueError, r"buffer 'table' is \(3,\), torch\.float32 on rank 1 and absent on rank 0",
    ),
    "frozen": (
        lambda m: m.blocks[0].mix.weight.requires_grad_(False),
        ValueError, r"'blocks\.0\.mix\.weight' is .*AdamW, frozen on rank 1 and .*Muon in block blocks\.0 on rank 0",
    ),
    "other policy": (
        lambda _: {"mp_policy": POLICY(param_dtype=torch.bfloat16)},
        ValueError, "option mp_policy is param_dtype=torch.bfloat16.* on rank 1",
    ),
    "other residency": (
        lambda _: {"reshard_after_forward": False},
        ValueError, "option reshard_after_forward is False on rank 1 and True on rank 0",
    ),
    "other costs": (
        lambda _: {"costs": None}, ValueError, "option costs is NoneType on rank 1 and flops on rank 0",
    ),
    "other prefetch": (
        lambda _: {"comm": dmuon.CommOptions(prefetch=3)},
        ValueError, r"option comm is .*prefetch=3.* on rank 1 and .*prefetch=1.* on rank 0",
    ),
    "impossible option": (
        lambda _: {"comm": dmuon.CommOptions(max_ctas=4)}, ValueError, "comm.max_ctas=4 needs NCCL",
    ),
    "wrapped": (
        lambda m: m.blocks.__setitem__(0, nn.DataParallel(m.blocks[0])),
        ValueError, r"module 'blocks\.0' is wrapped in DataParallel",
    ),
    "bad option": (lambda _: {"mp_policy": "bf16"}, TypeError, "mp_policy must be"),
    "optimizer": (
        lambda m: setattr(m, "optimizer", torch.optim.SGD(m.parameters(), lr=0.1)),
        ValueError, r"optimizer SGD already holds parameter",
    ),
    "select raises ValueError": (lambda _: {"select": lambda *_: _raise(ValueError("mine"))}, ValueError, "mine"),
    "select raises TypeError": (lambda _: {"select": lambda *_: _raise(TypeError("mine"))}, TypeError, "mine"),
    "select raises KeyError": (lambda _: {"select": lambda *_: _raise(KeyError("mine"))}, KeyError, "mine"),
    "select raises its own type": (lambda _: {"select": lambda *_: _raise(Fault("mine"))}, Fault, "mine"),
    "select returns no bool": (
        lambda _: {"select": lambda *_: "yes"},
        TypeError, r"select\('embed\.weight', …\) returned 'yes'; return True or False",
    ),
    "sharded": (
        sharded_alone,
        ValueError, r"parameter 'embed\.weight' is a DTensor",
    ),
}  # fmt: skip


def make_faults(rank: int, _world: int) -> dict[str, Raised]:
    def fault(kind: str) -> None:
        model = build()
        change = ONE_RANK[kind][0](model) if rank == 1 else None
        options = change if isinstance(change, dict) else {}
        if kind == "sharded":  # comparing DTensors would communicate
            dedicate(model)
        refused(model, **options)

    default_mesh()
    return {kind: raised_by(partial(fault, kind)) for kind in ONE_RANK}


@pytest.fixture(scope="module")
def faults(ranks: RankPool) -> list[dict[str, Raised]]:
    return ranks(2, make_faults, timeout=110)


@pytest.mark.pitfall("P21", "P48", "P49")
@pytest.mark.parametrize("kind", ONE_RANK)
def test_a_fault_on_one_rank_ends_all_of_them(faults: list[dict[str, Raised]], kind: str) -> None:
    _, error, match = ONE_RANK[kind]
    first, second = (of_rank[kind] for of_rank in faults)
    assert first.matches(ValueError, match) and ("rank 1" in first.message or kind == "other order"), first
    assert second.matches(error, match), f"the rank at fault raises the original: {second}"


# -- a fault in one data-parallel group of several ----------------------------------------------------------------


def make_faults_in_one_group(rank: int, _world: int) -> dict[str, Raised]:
    """Two data-parallel ranks times two tensor-parallel ones; ranks 0 and 2 or rank 3 alone are wrong."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def fault(kind: str) -> None:
        options: dict[str, Any] = {}
        model = build()
        if kind == "option" and rank in (0, 2):
            options["reshard_after_forward"] = "yes"
        if kind == "policy" and rank in (0, 2):
            options["mp_policy"] = POLICY(param_dtype=torch.bfloat16)
        tensor_parallel(model, whole["tp"])
        if kind == "model" and rank == 3:
            model.blocks[1] = nn.DataParallel(model.blocks[1])
        dedicate(model, whole["dp"], **options)

    return {kind: raised_by(partial(fault, kind)) for kind in IN_ONE_GROUP}


IN_ONE_GROUP = {
    "option": (Exception, "reshard_after_forward must be True or False, got 'yes'"),
    "policy": (ValueError, "option mp_policy is .* on rank 1 and .*bfloat16.* on rank 0"),
    "model": (ValueError, r"module 'blocks\.1' is wrapped in DataParallel"),
}


@pytest.mark.pitfall("P21", "P48")
def test_a_fault_in_one_data_parallel_group_ends_all_of_them(ranks: RankPool) -> None:
    for found in ranks(4, make_faults_in_one_group):
        for kind, raised in found.items():
            assert raised.matches(*IN_ONE_GROUP[kind]), raised


# -- wrappers after dedication ------------------------------------------------------------------------------------


def data_parallel_afterwards(rank: int, world: int) -> None:
    """Without devices it only calls the module; with them it would copy the parameters, which is refused."""
    model = dedicated()
    wrapped = nn.DataParallel(model)
    assert_equal_weights(trained(model, rank, world, wrapper=wrapped), reference_weights(2))
    with pytest.raises(RuntimeError, match="is owned by dmuon"):
        copy.deepcopy(wrapped)


@pytest.mark.pitfall("P55")
def test_data_parallel_after_dedication_changes_nothing_on_the_cpu(ranks: RankPool) -> None:
    ranks(2, data_parallel_afterwards)


# -- cost files ---------------------------------------------------------------------------------------------------

UNUSABLE = {
    "absent": (None, "no such file; write it with dmuon-profile"),
    "empty": (b"", "corrupt or truncated JSON"),
    "cut off": (b'{"schema": 1, "entr', "corrupt or truncated JSON"),
    "no object": (b"[1, 2]", "delete the file or measure anew"),
    "another schema": (b'{"schema": 99}', "delete the file or measure anew"),
    "no text": (b"\xff\xfe\x00", "corrupt or truncated"),
}


def with_cost_files(_rank: int, _world: int, paths: dict[str, str]) -> dict[str, Raised]:
    return {name: raised_by(lambda: refused(build(), costs=path)) for name, path in paths.items()}  # noqa: B023


@pytest.mark.pitfall("P50")
def test_unusable_cost_files_are_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    for name, (content, _) in UNUSABLE.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "costs.json").write_bytes(content)
    for found in ranks(2, with_cost_files, {name: str(tmp_path / name / "costs.json") for name in UNUSABLE}):
        for name, raised in found.items():
            assert raised.matches(ValueError, rf"cost cache .*costs\.json: .*{UNUSABLE[name][1]}"), raised


def save_costs(_rank: int, _world: int, folder: str) -> None:
    """Files that fit this machine, two of them altered."""
    from dmuon.planning.cost_cache import CostCache, Timing
    from dmuon.planning.device_key import NsOptions, device_key

    timing = Timing(median_ns=1000, p10_ns=990, p90_ns=1010, n=5)
    path = Path(folder) / "costs.json"
    CostCache(device_key(torch.device("cpu"), NsOptions()), {s: {1: timing} for s in {(13, 13), (13, 29)}}).save(path)
    text = path.read_text()
    document = json.loads(text)
    document["key"]["device"] = "another device"
    (Path(folder) / "foreign.json").write_text(json.dumps(document))
    (Path(folder) / "negative.json").write_text(text.replace("1000", "-1000"))


def plan_from_cost_file(_rank: int, _world: int, path: str) -> tuple[str, int]:
    plan = dmuon.dedicate_params(build(), default_mesh(), costs=path)
    return plan.cost_source, max(plan.solution.loads_ns)


@pytest.mark.pitfall("P50")
def test_cost_files_of_another_device_are_refused_and_of_this_one_used(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, save_costs, str(tmp_path))
    messages = {
        "foreign": r"'device' is 'another device', this run's is .*dmuon-profile",
        "negative": r"negative\.json: .*-1000",
    }
    for found in ranks(2, with_cost_files, {name: str(tmp_path / f"{name}.json") for name in messages}):
        for name, raised in found.items():
            assert raised.matches(ValueError, messages[name]), raised
    path = str(tmp_path / "costs.json")
    assert ranks(2, plan_from_cost_file, path) == [(f"cost cache {path}", 5000)] * 2, "9 matrices of 1000 ns each"


# -- owned parameters after dedication ----------------------------------------------------------------------------


def operations(rank: int, world: int) -> dict[str, str]:
    """What each use of a resting weight raises; every rank does them alone, so one that communicated would hang."""
    model = dedicated()
    weight = model.blocks[0].mix.weight
    mesh = default_mesh()
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
    "largest of each row": lambda m, w, mesh: w.max(dim=1),
    "sum of rows": lambda m, w, mesh: w.sum(0),
    "mean of rows": lambda m, w, mesh: w.detach().mean(0),
    "deviation": lambda m, w, mesh: w.std(),
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
}  # fmt: skip


@pytest.mark.pitfall("P54")
def test_what_would_lie_or_hang_raises_on_the_rank_that_does_it(ranks: RankPool) -> None:
    found = ranks(2, operations)[1]
    assert found.keys() == OPERATIONS.keys()
    for name, message in found.items():
        remedy = REMEDIES.get(name, r"RuntimeError.*dmuon\.summon_full_params\(model\)")
        assert re.search(remedy, message) and "'blocks.0.mix.weight'" in message, f"{name}: {message}"


def fsdp_by_the_rules(rank: int, world: int) -> None:
    model = dedicated()
    mesh = default_mesh()
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
        model = dedicated()
        move(model)
        found.append(trained(model, rank, world))
        model = dedicated()
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
    model = dedicated(reshard_after_forward=not keep)
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
    dedicate(model)
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
        timeout=PROGRAM_SECONDS,
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
