"""Each trained parameter has one known averager of gradients; copies, groups and dedicated siblings are compared."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.dtensors import local_tensor
from harness.heard import heard
from harness.network import Network, full_state, loss_of, shard, shard_blocks
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dmuon

pytestmark = pytest.mark.pitfall("P86")
WARNS = "nobody is known to average the gradients of "
RAISES = "DistributedDataParallel does not average the gradients of "
Built = tuple[nn.Module, dmuon.Muon]  # what is called


def tail(model: Network) -> list[nn.Parameter]:
    return list(model.blocks[2].parameters())


def plain(model: Network, world: int) -> Built:
    return model, dmuon.Muon(model, **OPTIONS)


def ddp(model: Network, world: int) -> Built:
    wrapped = DistributedDataParallel(model)
    return wrapped, dmuon.Muon(wrapped, **OPTIONS)


def ddp_later(model: Network, world: int) -> Built:
    optimizer = dmuon.Muon(model, **OPTIONS)
    return DistributedDataParallel(model), optimizer


def ddp_ignores(model: Network, world: int) -> Built:
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.2.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return ddp(model, world)


def ddp_frozen_then_thawed(model: Network, world: int) -> Built:
    model.blocks[2].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    model.blocks[2].requires_grad_(True)
    return wrapped, dmuon.Muon(wrapped, **OPTIONS)


def fsdp(model: Network, world: int, **options: Any) -> Built:
    shard_blocks(model, init_device_mesh("cpu", (world,)), **options)
    return model, dmuon.Muon(model, **OPTIONS)


def fsdp_ignores(model: Network, world: int) -> Built:
    return fsdp(model, world, ignored_params=set(tail(model)))


def tensor_parallel(model: Network, world: int) -> Built:
    for block in model.blocks:
        plan = {"mix": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(block, init_device_mesh("cpu", (world,)), plan)
    return model, dmuon.Muon(model, **OPTIONS)


def dedicated(model: Network, world: int) -> Built:
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    return model, dmuon.Muon(model, **OPTIONS)


def dedicated_in_groups_beside_another(model: Network, world: int) -> Built:
    dedicated(model, world)
    other = nn.Linear(3, 3)
    other.weight.grad = torch.ones(3, 3)
    groups = dmuon.param_groups(model)
    return model, dmuon.Muon([*groups, {"params": [other.weight], "use_muon": False}], **OPTIONS)


def dedicated_and_sharded(model: Network, world: int) -> Built:
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops")
    shard_blocks(model, mesh, dmuon.fully_shard, ignored_params={model.norm.weight})
    return model, dmuon.Muon(model, **OPTIONS)


# What a parameter's gradient comes to: averaged exactly (None), a warning, an error.
WAYS: list[tuple[Callable[[Network, int], Built], str | None]] = [
    (plain, WARNS),
    (ddp, None),
    (ddp_ignores, WARNS),
    (ddp_frozen_then_thawed, RAISES),
    (fsdp, None),
    (fsdp_ignores, WARNS),
    (tensor_parallel, None),
    (dedicated, None),
    (dedicated_in_groups_beside_another, WARNS),
    (dedicated_and_sharded, None),
]
AVERAGED = (ddp, fsdp, dedicated, dedicated_and_sharded)


def backward(program: nn.Module, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    optimizer.zero_grad()
    loss_of(program, *shard(batch(0), rank, world)).backward()


@on_ranks(2)
def test_each_parameter_has_one_known_averager_or_the_user_is_told(rank: int, world: int) -> None:
    for way, expected in WAYS:
        with about(way.__name__):
            check(rank, world, way, expected)


def check(rank: int, world: int, way: Callable[[Network, int], Built], expected: str | None) -> None:
    model = build()
    with heard() as told:
        program, optimizer = way(model, world)
        backward(program, optimizer, rank, world)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if expected == RAISES:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=RAISES + r"'(blocks\.2|head\.1)\.\w+.*Wrap it"):
                    optimizer.step()
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            return
        optimizer.step()
        if way in AVERAGED:
            assert_equal_weights(full_state(model), reference_weights(1))
        backward(program, optimizer, rank, world)
        optimizer.step()
    told = [text for text in told if "average" in text]
    assert (len(told) == 1 and expected in told[0]) if expected else not told, told


@pytest.mark.pitfall("P96")
@on_ranks(2)
def test_modules_that_the_program_hides_from_the_collector_are_found(rank: int, world: int) -> None:
    model = build()
    program, optimizer = ddp_later(model, world)
    gc.freeze()
    try:
        backward(program, optimizer, rank, world)
        optimizer.step()
    finally:
        gc.unfreeze()
    assert_equal_weights(full_state(model), reference_weights(1))


# -- copies ------------------------------------------------------------------------------------------------------------


def hsdp(model: Network, world: int) -> Built:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    shard_blocks(model, mesh)
    return model, dmuon.Muon(model, **OPTIONS)


def local(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return local_tensor(param.grad)


def drop(param: nn.Parameter) -> None:
    param.grad = None


def grow(param: nn.Parameter) -> None:
    local(param).mul_(1.01)


def poison(param: nn.Parameter) -> None:
    local(param).view(-1)[0] = float("nan")


def round_off(param: nn.Parameter) -> None:
    local(param).mul_(1 + 1e-5)


@pytest.mark.parametrize(
    ("world", "way", "name", "lacking", "told"),  # which ranks have no gradient, and of which pair that is told
    [
        (2, ddp, "norm.bias", [1], (1, 0)),
        (4, hsdp, "blocks.1.up.weight", [1], (1, 3)),  # one shard of one replica
    ],
)
@on_ranks()
def test_copies_that_differ_are_named_on_all_ranks_before_anything_changes(
    rank: int,
    world: int,
    way: Callable[[Network, int], Built],
    name: str,
    lacking: list[int],
    told: tuple[int, int],
) -> None:
    """One copy is gathered: what another one has would be dropped, and momentum would drift apart."""
    model = build()
    program, optimizer = way(model, world)
    param = model.get_parameter(name)
    begin = {key: value.clone() for key, value in full_state(model).items()}
    about = rf"rank {rank}: the gradient of '{name}'"
    lacks, has = told
    first = 1 if way is hsdp and world == 4 else 0  # of the ranks that have a copy of what rank 1, or 3, has
    for change, ranks, message in (
        (drop, lacking, f"{about} is missing on rank {lacks}, and rank {has}, which has a copy of the same part"),
        (grow, [world - 1], rf"its norm is \S+ on rank {first} and \S+ on rank {world - 1}"),
        (poison, [world - 1], f"{about} differs between copies of the same part"),
    ):
        backward(program, optimizer, rank, world)
        if rank in ranks:
            change(param)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    assert_equal_weights(full_state(model), begin)
    backward(program, optimizer, rank, world)
    if rank == 1:
        round_off(param)
    optimizer.step()
    assert_equal_weights(full_state(model), reference_weights(1))
    backward(program, optimizer, rank, world)
    poison(param)  # on all copies alike
    optimizer.step()


@pytest.mark.parametrize("name", ["norm.bias", "blocks.1.mix.weight"])
@on_ranks(2)
def test_a_gradient_that_one_rank_drops_in_a_dedicated_model_is_told(rank: int, world: int, name: str) -> None:
    model = build()
    program, optimizer = dedicated(model, world)
    backward(program, optimizer, rank, world)
    if rank == 1:
        model.get_parameter(name).grad = None
    optimizer.step()
    with pytest.raises(dmuon.CollectiveError, match=rf"parameters without a gradient in a step=1: '{name}'"):
        backward(program, optimizer, rank, world)


# -- groups, siblings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change"),
    [("ddp", "in another order"), ("dedicated", "left out")],
)
@on_ranks(2)
def test_ranks_whose_groups_hold_other_parameters_all_raise(rank: int, world: int, kind: str, change: str) -> None:
    model = build()
    program: nn.Module = model
    if kind == "ddp":
        program = DistributedDataParallel(model)
    else:
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    groups = dmuon.param_groups(model)
    names = {id(param): name for name, param in model.named_parameters()}
    for group in groups:
        group["params"] = [(names[id(param)], param) for param in group["params"]]
    if rank == 1:
        last = groups[2]["params"].pop()
        if change != "left out":
            groups[2]["params"].insert(0, last)
    with pytest.raises(dmuon.CollectiveError, match=r"different options: .*parameter '.*(norm|bias).*' *="):
        optimizer = dmuon.Muon(groups, **OPTIONS)
        backward(program, optimizer, rank, world)
        optimizer.step()


@pytest.mark.parametrize("tied", ["head.weight", "blocks.0.up.weight"])
@on_ranks(2)
def test_siblings_that_share_a_weight_are_not_dedicated_apart(rank: int, world: int, tied: str) -> None:
    mesh, one, other = init_device_mesh("cpu", (world,)), build(), build()
    path, _, _ = tied.rpartition(".")
    other.get_submodule(path).weight = one.get_parameter(tied)  # type: ignore[assignment]
    dmuon.dedicate_params(one, mesh, costs="flops")
    with pytest.raises(ValueError, match=rf"parameter '{tied}' is one of a module that was dedicated before"):
        dmuon.dedicate_params(other, mesh, costs="flops")
