"""What cannot work is refused: on all ranks, by name, with what to do instead, before any data moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import raised_by, says_what_to_do
from harness.dedicated_toy import dedicate, dedicated, default_mesh, refused
from harness.inside import default_store
from harness.network import Block, Network, tensor_parallel
from harness.on_ranks import on_ranks
from harness.toy import SIZE, WIDTH, batch, build
from harness.trees import node, stack
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dmuon


def pairs(*names: str) -> DeviceMesh:
    """Both ranks along the first dimension."""
    return init_device_mesh("cpu", (2, *[1] * (len(names) - 1)), mesh_dim_names=names)


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


def strided_over_tensor_parallel_ranks() -> None:
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    dedicate(laid_out(UP, whole["tp"], [_StridedShard(0, split_factor=2)]), whole["dp"])


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


def on_meta() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.empty(3, device="meta"))])


class _Engine(nn.Module):
    pass


_Engine.__module__ = "deepspeed.runtime.engine"
_Engine.__name__ = "DeepSpeedEngine"


def wrapped_afterwards() -> None:
    wrapper = nn.parallel.DistributedDataParallel(dedicated(), init_sync=False)
    wrapper(batch(0)[0])


UP = "blocks.0.up.weight"
POLICY = MixedPrecisionPolicy
DDP = nn.parallel.DistributedDataParallel
BY_DDP = r"'blocks\.0\.\w+\.weight'.*DistributedDataParallel.*dmuon averages"
BY_FSDP = r"'blocks\.0\..*call dmuon\.fully_shard instead"

# By name: what is done, and what is raised. Ranks do all of them in one call.
EVERYWHERE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "mesh tp": (
        lambda: refused(build(), pairs("tp")),
        ValueError, r"dimension 'tp' is one of tensor parallelism; pass the data-parallel dimensions",
    ),
    "mesh of three unnamed dimensions": (
        lambda: refused(build(), init_device_mesh("cpu", (2, 1, 1))),
        ValueError, "mesh has 3 dimensions without names; name them",
    ),
    "every rank passes the mesh of the other": (
        lambda: refused(build(), DeviceMesh("cpu", [1 - dist.get_rank()])),
        ValueError, r"mesh holds ranks \[[01]\].*this is rank [01] of 2; build the mesh",
    ),
    "a module and one inside of it": (
        lambda: dedicate([m := build(), m.blocks[1]]),
        ValueError, r"model\[1\], a Block, lies in another module of the list; give each once",
    ),
    "nothing initializes a module": (
        lambda: changed(lambda m: m.to("meta").blocks[0].register_module("table", on_meta())),
        ValueError, r"'blocks\.0\.table' \(ParameterList\) are on the meta device and have no reset_parameters\(\)",
    ),
    "half of a module on the meta device": (
        lambda: changed(lambda m: setattr(m.to("meta").blocks[0].up, "bias", nn.Parameter(torch.zeros(29)))),
        ValueError, r"module 'blocks\.0\.up' has tensors on the meta device and",
    ),
    "dedicated twice": (
        lambda: dedicate(dedicated()),
        ValueError, "was called on 'this model' already; call it once per model",
    ),
    "fsdp before": (
        fsdp_before,
        ValueError, r"'blocks\.1' is sharded by fully_shard already; call dedicate_params before",
    ),
    "matrix sharded over the mesh": (
        lambda: dedicate(laid_out(UP, default_mesh(), [Shard(0)])),
        ValueError, r"'blocks\.0\.up\.weight' .*Shard\(dim=0\).*call it before anything sh",
    ),
    "matrix over two dimensions": (
        lambda: dedicate(
            laid_out(UP, init_device_mesh("cpu", (1, 2)), [Replicate(), Shard(0)]),
            DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))["b"],
        ),
        ValueError, r"'blocks\.0\.up\.weight'.*split over one dimension.*select=",
    ),
    "tensor parallel _StridedShard": (
        strided_over_tensor_parallel_ranks,
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
    "DeepSpeed parameter": (
        lambda: changed(lambda m: setattr(m.blocks[1].up.weight, "ds_id", 3)),
        ValueError, r"'blocks\.1\.up\.weight' is managed by DeepSpeed ZeRO; pass a plain model",
    ),
    "optimizer before": (
        lambda: changed(lambda m: torch.optim.AdamW(m.parameters())),
        ValueError, r"AdamW already holds parameter 'blocks.*build the optimizer after",
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
        ValueError, r"'layers\.0\.qkv\.weight' of shape \(24, 8\) looks like several .*select=",
    ),
    "DistributedDataParallel that runs": (wrapped_afterwards, RuntimeError, BY_DDP),
    "fully_shard of torch on a layer of it": (
        lambda: torch_fully_shard(dedicated().blocks[0].mix, mesh=default_mesh()), TypeError, BY_FSDP,
    ),
}  # fmt: skip

BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mp_policy": POLICY(output_dtype=torch.bfloat16)}, ValueError, "output_dtype.*fully_shard"),
    ({"mp_policy": POLICY(param_dtype=torch.int8)}, ValueError, "param_dtype must be a floating"),
    ({"costs": dmuon.solver.CostTable.from_flops([(1, 2)])}, ValueError, "no cost for shape .*dmuon-profile"),
    (
        {"select": lambda fqn, *_: fqn == "head.weight"},
        ValueError,
        r"chose 'head\.weight', .* outside .*blocks=",
    ),
    ({"ns_coefficients": "quintic"}, ValueError, "ns_coefficients, ns_steps or ns_dtype: .*quintic"),
    ({"ranks": [1.0]}, ValueError, "ranks= has 1 speeds, and the job 2 ranks"),
    ({"plan": "p"}, ValueError, "costs= says how to plan, and plan= is a plan .*; leave"),
]
EVERYWHERE |= {
    f"option {number} {next(iter(options))}": (partial(lambda o: refused(build(), **o), options), error, match)
    for number, (options, error, match) in enumerate(BAD_OPTIONS)
}


@pytest.mark.pitfall("P02", "P05", "P54", "P55", "P60")
@on_ranks(2, timeout=110)
def test_mistakes_raise_on_every_rank_and_move_nothing(rank: int, world: int) -> None:
    for name, (mistake, error, match) in EVERYWHERE.items():
        raised = raised_by(mistake)
        assert raised.matches(error, match), (name, raised)
        assert says_what_to_do(raised.message), f"without a remedy: {raised.message}"
    assert len(dmuon.owned_parameters(dedicated())) == 9, "the ranks are still in step"


# -- a mistake on one rank: there its own error, elsewhere by name -----------------------------------------------------


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
    "extra block": (
        lambda m: m.blocks.append(Block(SIZE)),
        ValueError, r"'blocks\.3\.\w+\.\w+' is .* on rank 1 and absent on rank 0",
    ),
    "other order": (
        reversed_modules, ValueError, "come in another order on some ranks.*build the same model",
    ),
    "frozen": (
        lambda m: m.blocks[0].mix.weight.requires_grad_(False),
        ValueError, r"'blocks\.0\.mix\.weight' is .*Muon, frozen on rank 1 and .*Muon in block blocks\.0 on rank 0",
    ),
    "other policy": (
        lambda _: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        ValueError, "option mp_policy is param_dtype=torch.bfloat16.* on rank 1",
    ),
    "other costs": (
        lambda _: {"costs": None}, ValueError, "option costs is NoneType on rank 1 and flops on rank 0",
    ),
    "wrapped": (
        lambda m: m.blocks.__setitem__(0, nn.DataParallel(m.blocks[0])),
        ValueError, r"module 'blocks\.0' is wrapped in DataParallel",
    ),
    "select raises its own type": (lambda _: {"select": lambda *_: _raise(Fault("mine"))}, Fault, "mine"),
    "sharded": (
        sharded_alone,
        ValueError, r"parameter 'embed\.weight' is a DTensor",
    ),
    "on the meta device": (
        lambda m: m.to("meta") and None,
        ValueError, r"parameter 'embed\.weight'.*on the meta device",
    ),
}  # fmt: skip


@pytest.mark.pitfall("P21", "P48", "P49")
@on_ranks(2, timeout=110)
def test_a_fault_on_one_rank_ends_all_of_them(rank: int, world: int) -> None:
    """The rank at fault raises the original, the other one says which rank it was."""

    def fault(kind: str) -> None:
        model = build()
        change = ONE_RANK[kind][0](model) if rank == 1 else None
        options = change if isinstance(change, dict) else {}
        if kind == "sharded":  # comparing DTensors would communicate
            dedicate(model)
        refused(model, **options)

    default_mesh()
    for kind, (_, error, match) in ONE_RANK.items():
        raised = raised_by(partial(fault, kind))
        assert raised.matches(error if rank == 1 else ValueError, match), (kind, raised)
        if rank == 0:
            assert "rank 1" in raised.message or kind == "other order", (kind, raised)
            assert says_what_to_do(raised.message) or "mine" in match, f"without a remedy: {raised.message}"
    assert len(dmuon.owned_parameters(dedicated())) == 9, "the ranks are still in step"


# -- a fault in one data-parallel group of several ----------------------------------------------------------------


IN_ONE_GROUP = {
    "option": (Exception, "reshard_after_forward must be True or False, got 'yes'"),
    "policy": (ValueError, "option mp_policy is .* on rank 1 and .*bfloat16.* on rank 0"),
    "model": (ValueError, r"module 'blocks\.1' is wrapped in DataParallel"),
}


@pytest.mark.pitfall("P21", "P48")
@on_ranks(4)
def test_a_fault_in_one_data_parallel_group_ends_all_of_them(rank: int, world: int) -> None:
    """Two data-parallel ranks times two tensor-parallel ones; ranks 0 and 2 or rank 3 alone are wrong."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def fault(kind: str) -> None:
        options: dict[str, Any] = {}
        model = build()
        if kind == "option" and rank in (0, 2):
            options["reshard_after_forward"] = "yes"
        if kind == "policy" and rank in (0, 2):
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        tensor_parallel(model, whole["tp"])
        if kind == "model" and rank == 3:
            model.blocks[1] = nn.DataParallel(model.blocks[1])
        dedicate(model, whole["dp"], **options)

    for kind, told in IN_ONE_GROUP.items():
        raised = raised_by(partial(fault, kind))
        assert raised.matches(*told), raised


# -- options, and what is no mistake -----------------------------------------------------------------------------------


@pytest.mark.pitfall("P24")
@on_ranks(2, expect=ValueError, match="mesh.*process group.*build", timeout=30, fresh=True)
def test_a_mesh_that_outlived_its_group_is_refused(rank: int, world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    sub = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))["b"]
    store = default_store()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="torn down"):
        dedicate(build(), mesh)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    dedicated()
    refused(build(), sub)


BAD_COMM: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hierarchical": True}, ValueError, "comm.hierarchical=True is gone; shard within a node and replicate"),
    ({"transport": "ring"}, ValueError, "comm.transport must be one of auto, broadcast, single, got 'ring'"),
    ({"prefetch": -1}, ValueError, "comm.prefetch must be at least 0, got -1"),
    ({"outstanding_reductions": 2}, ValueError, "comm.outstanding_reductions=2 is gone; gradients of two blocks"),
    ({"merge_bytes": "auto"}, TypeError, "comm.merge_bytes='auto' is no number; write a number of bytes"),
]


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize(("options", "error", "match"), BAD_COMM, ids=[str(o) for o, _, _ in BAD_COMM])
def test_comm_options_name_the_value(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        dmuon.CommOptions(**options)


@pytest.mark.pitfall("P55")
@on_ranks(2)
def test_an_optimizer_that_nobody_can_reach_any_more_is_no_obstacle(rank: int, world: int) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.cycle = optimizer  # type: ignore[attr-defined]
    del optimizer
    dedicate(model)
