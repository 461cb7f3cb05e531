"""What cannot be exchanged is refused on all ranks, by name, also where one rank alone finds it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import says_what_to_do
from harness.dtensors import give, noise, parameter
from harness.on_ranks import attempt
from harness.pool import Outcome, RankPool
from harness.toy import build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import dmuon
from dmuon import DistributedConfig, create_auto_config, create_dtensor_config, create_processgroup_config

# -- the same on all ranks ------------------------------------------------------------------------------------------


def partial_sum(_rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = build()
    weight = DTensor.from_local(model.blocks[1].up.weight.detach(), mesh, [Partial()], run_check=False)
    model.blocks[1].up.weight = nn.Parameter(weight)
    dmuon.Muon(model, distributed_config=create_dtensor_config(costs="flops"))


def four_dimensions(_rank: int, world: int) -> None:
    param = parameter(noise(0, 4, 3, 2, 2), init_device_mesh("cpu", (world,)), [Shard(0)])
    dmuon.Muon([{"params": [param], "use_muon": True}], distributed_config=create_dtensor_config(costs="flops"))


def plain_shards(rank: int, _world: int, options: dict[str, Any]) -> None:
    group: Any = dist.group.WORLD
    config = create_processgroup_config(tp_pg=group, costs="flops", **options)
    model = nn.Sequential()
    model.add_module("layers", nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(3, 4 + rank, bias=False)]))
    dmuon.Muon(model, select=lambda name, *_: True, distributed_config=config)


def pairs_of_ranks(rank: int) -> Any:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


def crossing_groups(rank: int, _world: int) -> None:
    create_processgroup_config(fsdp_pg=dist.group.WORLD, tp_pg=pairs_of_ranks(rank))


# -- wrong owners ---------------------------------------------------------------------------------------------------


def own(update: Tensor | None, rank: int, state: dict[str, Any]) -> Tensor | None:
    return update


def assigned(owners: Any, **state: Any) -> DistributedConfig:
    """An exception is raised."""

    def assign(params: list[Tensor], state: dict[str, Any]) -> Any:
        if isinstance(owners, Exception):
            raise owners
        return owners

    return DistributedConfig(assign, own, own, state, prefetch_count=0)


def wrong_owners(rank: int, _world: int, owners: Any) -> None:
    """``owners`` by rank, or those that all ranks say."""
    config = assigned(owners[rank] if isinstance(owners, list) else owners)
    dmuon.Muon([nn.Parameter(torch.ones(4, 3)) for _ in range(2)], distributed_config=config)


def owner_of_another_stage(rank: int, _world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    config = create_auto_config(
        pp_process_group=mesh.get_group("pp"), fsdp_process_group=mesh.get_group("fsdp"), costs="flops"
    )
    config = replace(config, assign_fn=lambda params, state: {0: 2 if rank < 2 else 1})
    dmuon.Muon([nn.Parameter(torch.ones(4, 3))], distributed_config=config)


def owner_outside_of_the_group(rank: int, _world: int) -> None:
    config = assigned({0: 1}, process_group=pairs_of_ranks(rank))
    dmuon.Muon([nn.Parameter(torch.ones(4, 3))], distributed_config=config)


# -- what one rank alone finds --------------------------------------------------------------------------------------


def cut_otherwise(rank: int, world: int, fault: str) -> None:
    """Rank 1 goes wrong where it looks for the places of its parameters."""
    mesh = init_device_mesh("cpu", (world,))
    group: Any = mesh.get_group()

    def dims(param: Tensor) -> dict[str, int | None]:
        if fault == "raises" and rank == 1:
            raise LookupError("no such layer")
        return {"fsdp": rank if fault == "another dimension" else 0}

    params = [nn.Parameter(torch.ones(3 - rank, 4))]
    if fault == "a DTensor":
        local = torch.ones(2 + rank, 4)
        whole = torch.Size((4, 4))
        params = [nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=whole, stride=(4, 1)))]
    config = create_processgroup_config(fsdp_pg=group, shard_dims=dims, costs="flops")
    if fault == "apart":
        independent = {"ep": None} if rank == 0 else {}
        config = create_processgroup_config(ep_pg=group, shard_dims=lambda _: independent, costs="flops")
    is_empty = fault == "no parameters" and rank == 1
    dmuon.Muon([{"params": params, "use_muon": not is_empty}], distributed_config=config)


def nothing_on_one_rank(rank: int, _world: int) -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    dmuon.Muon([{"params": [weight], "use_muon": rank == 0}], distributed_config=assigned({0: 0} if rank == 0 else {}))


def sharded(world: int, count: int = 4) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (world,))
    return [parameter(torch.ones(4 + i, 4), mesh, [Shard(0)]) for i in range(count)]


def stepped(params: list[nn.Parameter], **options: Any) -> dmuon.Muon:
    """An optimizer after a step."""
    optimizer = dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops", **options))
    for i, param in enumerate(params):
        give(param, noise(i, *param.shape))
    optimizer.step()
    return optimizer


def other_layouts(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    params = [parameter(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, int(rank == 1))]
    dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"))


def other_plan(rank: int, world: int) -> None:
    """An owner was changed after the ranks agreed."""
    config = create_dtensor_config(costs="flops")
    assign = config.assign_fn

    def tampered(params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        owners: Any = assign(params, state)
        return {i: 1 - owner if rank == 1 and i == 2 else owner for i, owner in owners.items()}

    config.assign_fn = tampered
    dmuon.Muon(sharded(world), distributed_config=config)


def other_schedule(rank: int, world: int) -> None:
    params = sharded(world)
    before = [p.to_local().clone() for p in params]  # type: ignore[attr-defined]
    try:
        stepped(params, prefetch_count=1 + rank, small_param_numel_threshold=0)
    finally:
        for param, old in zip(params, before, strict=True):
            assert torch.equal(param.to_local(), old), "nothing travels before the schedules are compared"  # type: ignore[attr-defined]


def changed_groups(rank: int, world: int) -> None:
    *params, late = sharded(world)
    optimizer = stepped(params)
    if rank == 1:
        optimizer.param_groups[0]["params"].append(late)
    optimizer.step()


def changed_in_one_domain(rank: int, _world: int) -> None:
    """Ranks 0 and 1 find a fault in what they share; rank 2 shares with rank 1 only."""
    meshes = [(pair, DeviceMesh("cpu", pair)) for pair in ([0, 1], [1, 2])]
    optimizer = stepped([parameter(torch.ones(4, 3), mesh, [Shard(0)]) for pair, mesh in meshes if rank in pair])
    if rank == 0:
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2, 2)))
    optimizer.step()


# -- all of them ----------------------------------------------------------------------------------------------------

# World, program and its arguments, and of all ranks or of each an error and what it says; no error where it is None.
Errors = type[BaseException] | tuple[type[BaseException] | None, ...]
Refusal = tuple[int, Callable[..., None], tuple[Any, ...], Errors, str | tuple[str, ...]]
FINE = {0: 0, 1: 0}
OF_THE_USER = "no such layer|layers.7"  # exceptions of his own functions
HELD = r"of those that ranks 0 1 hold together' is "
CHANGED = "have changed on (this|another) rank.*change them on all"
THE_OTHER_DOMAIN = "rank 2: rank 1, one of ranks 1 2, cannot take this step"
REFUSALS: list[Refusal] = [
    (2, partial_sum, (), ValueError, r"'blocks\.1\.up\.weight'.*Partial"),
    (2, four_dimensions, (), ValueError, r"\(4, 3, 2, 2\) has 4 dimensions"),
    (2, plain_shards, ({},), ValueError, r"'layers\.0\.weight' is a plain tensor.*tp_pg=… shards it.*\{'tp': 0\}"),
    (2, plain_shards, ({"shard_dims": {"tp": 2}},), ValueError, r"parameter 'layers\.0\.weight' .*'tp': 2.* lacks"),
    (2, plain_shards, ({"shard_dims": {"tp": 1}},), ValueError, r"'layers\.1\.weight' .*plain .*over ranks \[0, 1\]"),
    (4, crossing_groups, (), ValueError, r"fsdp_pg .*both hold|both hold.*any two groups"),
    (2, wrong_owners, ([FINE, {0: 0, 1: 2}],), ValueError, "Invalid rank 2 for parameter 1"),
    (2, wrong_owners, ([FINE, {0: 0, 1: 1}],), ValueError, "'parameter 1 of group 0' is 1 on rank 1 and 0 on rank 0"),
    (2, wrong_owners, ([FINE, KeyError("layers.7")],), (ValueError, KeyError), ("rank 1.*layers.7", "layers.7")),
    (4, owner_of_another_stage, (), ValueError, r"Invalid rank \d .* 'parameter 0 of group 0': it lies .*\[\d, \d\]"),
    (
        4,
        owner_outside_of_the_group,
        (),
        (None, None, ValueError, ValueError),
        r"Invalid rank 1 for parameter.*state\['process_group'\] has ranks \[2, 3\]",
    ),
    (2, cut_otherwise, ("raises",), (ValueError, LookupError), "no such layer"),
    (2, cut_otherwise, ("another dimension",), ValueError, r"rank [01] has sharded parameters .*\{0: 1\}"),
    (2, cut_otherwise, ("a DTensor",), ValueError, "the local tensor of rank 1 has shape"),
    (
        2,
        cut_otherwise,
        ("apart",),
        ValueError,
        "rank 0 holds .* ranks .0, 1., and rank 1 holds none with exactly these",
    ),
    (2, cut_otherwise, ("no parameters",), ValueError, "rank [01] has sharded parameters"),
    (2, nothing_on_one_rank, (), ValueError, "owner of parameter 'parameter 0 of group 0' is .*absent"),
    (2, other_layouts, (), ValueError, rf"parameter '1 {HELD}.* on rank 1 and .* on rank 0"),
    (2, other_plan, (), ValueError, rf"owner of parameter '2 {HELD}\d on rank 1 and \d on rank 0"),
    (2, other_schedule, (), dmuon.CollectiveError, "prefetch_count=[12]"),
    (2, changed_groups, (), RuntimeError, CHANGED),
    (3, changed_in_one_domain, (), RuntimeError, ("have changed on", "have changed on", THE_OTHER_DOMAIN)),
]


@pytest.fixture(scope="module")
def said(ranks: RankPool) -> Callable[[int], dict[int, tuple[Outcome, ...]]]:
    """By number of a case, what each rank of a world came to; in one call."""

    @cache
    def of_world(world: int) -> dict[int, tuple[Outcome, ...]]:
        cases = {number: case[1:3] for number, case in enumerate(REFUSALS) if case[0] == world}
        return dict(zip(cases, zip(*ranks(world, attempt, list(cases.values())), strict=True), strict=True))

    return of_world


@pytest.mark.pitfall("P10", "P21", "P49")
@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[f"{c[1].__name__}-{c[2]}" for c in REFUSALS])
def test_a_fault_is_told_on_every_rank(said: Callable[[int], dict[int, tuple[Outcome, ...]]], number: int) -> None:
    world, _, _, errors, messages = REFUSALS[number]
    errors = errors if isinstance(errors, tuple) else (errors,) * world
    messages = messages if isinstance(messages, tuple) else (messages,) * world
    for outcome, error, message in zip(said(world)[number], errors, messages, strict=True):
        told = outcome.ok if error is None else outcome.raised(error) and re.search(message, outcome.message)
        assert told, outcome
        if not outcome.ok and not re.search(OF_THE_USER, outcome.message):
            assert says_what_to_do(outcome.message), f"without a remedy: {outcome.message}"
