"""Generated configurations train sharded and replicated models as one process does: the documents' examples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.checkpoints import is_2d
from harness.hand_laid import Cut, Weights
from harness.inside import default_store, exchange_of
from harness.network import full_state, loss_of
from harness.on_ranks import on_ranks, over_ranks
from harness.oracle import Reference
from harness.topologies import lay, orthogonalized
from harness.toy import batch, build, train
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import dmuon
from dmuon import (
    DistributedConfig,
    create_auto_config,
    create_devicemesh_config,
    create_dtensor_config,
    create_processgroup_config,
)

# As the documents call Muon; "classic" coefficients are those of torch.optim.Muon.
CALL: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_coefficients": "classic"}
STEPS = 3
MATRICES = 11  # of the toy model, the embedding and the head included


@cache
def expected_weights(steps: int = STEPS) -> dict[str, Tensor]:
    """Of ``torch.optim.Muon`` and ``AdamW`` in one process, given ``model.parameters()``."""
    model = build()
    reference = Reference(model, matrix=is_2d, lr=CALL["lr"])
    train(model, reference, range(steps))
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


# -- the documents' examples ----------------------------------------------------------------------------------------


def trained(
    model: nn.Module, config: DistributedConfig | None, mine: Callable[..., Any] = lambda tensors: tensors
) -> tuple[dict[str, Tensor], int]:
    """Whole weights after ``STEPS``, and how many matrices this rank orthogonalized."""
    optimizer = dmuon.Muon(model.parameters(), **CALL, distributed_config=config)
    calls = orthogonalized(optimizer, lambda step: loss_of(model, *mine(batch(step))).backward(), STEPS)
    return full_state(getattr(model, "module", model)), sum(calls)


@pytest.mark.pitfall("P56")
@pytest.mark.parametrize("make", [None, create_dtensor_config, create_processgroup_config, create_auto_config])
def test_one_process_needs_no_torch_distributed(make: Callable[..., DistributedConfig] | None) -> None:
    """Example 4 is that of no configuration: plain Muon."""
    assert not dist.is_initialized()
    weights, count = trained(build(), make and make(costs="flops"))
    assert count == STEPS * MATRICES
    assert_equal_weights(weights, expected_weights())


# -- plain shards ---------------------------------------------------------------------------------------------------


def dims_by_shape(param: Tensor) -> dict[str, int | None]:
    """As a user would say it: wide matrices by columns, tall ones by rows."""
    return {"tp": 1 if param.shape[0] == 6 else 0}


Sizes = dict[str, int]
PLAIN: dict[str, tuple[Sizes, str, Any, list[Cut]]] = {
    "tp of 4, uneven, one empty": (
        {"tp": 4},
        "pg",
        {"shard_dims": {"tp": 0}},
        [Cut((7, 5), tp=(0, [3, 0, 2, 2])), Cut((4, 9), tp=0), Cut((1, 6), tp=(0, [0, 0, 1, 0]))],
    ),
    "tp by a function": ({"tp": 2}, "pg", {"shard_dims": dims_by_shape}, [Cut((6, 8), tp=1), Cut((9, 4), tp=0)]),
    "fsdp and tp": (
        {"fsdp": 2, "tp": 2},
        "pg",
        {"shard_dims": {"fsdp": 0, "tp": 1}},
        [Cut((7, 6), fsdp=(0, [5, 2]), tp=1), Cut((2, 2), fsdp=0, tp=1)],
    ),
    "fsdp and tp of one dimension": (
        {"fsdp": 2, "tp": 2},
        "pg",
        {"shard_dims": {"fsdp": 0, "tp": 0}},
        [Cut((11, 4), fsdp=0, tp=(0, [5, 6]))],
    ),
    "tp and copies": ({"dp": 2, "tp": 2}, "pg", {"shard_dims": {"tp": 1}}, [Cut((6, 8), tp=1), Cut((3, 3), tp=1)]),
    "cp copies": ({"cp": 2}, "pg", {}, [Cut((6, 8)), Cut((3, 5)), Cut((2, 4, 3))]),
    "ep apart, tp": (
        {"ep": 2, "tp": 2},
        "pg",
        {"shard_dims": {"tp": -1}},
        [Cut((6, 8), ("ep",), tp=1), Cut((3, 4, 6), ("ep",), tp=2)],
    ),
    "ep cuts stacks": ({"ep": 2}, "auto", {"ep_shard_dim": 0}, [Cut((5, 4, 3), ep=0), Cut((2, 6, 6), ep=0)]),
    "auto, stages apart": (
        {"pp": 2, "fsdp": 2},
        "auto",
        {"pp_num_stages": 2},
        [Cut((7, 6), ("pp",), fsdp=0), Cut((4, 4), ("pp",), fsdp=0)],
    ),
    "mesh whose dp shards": (
        {"dp": 2, "tp": 2},
        "mesh",
        {"shard_dims": {"tp": 1, "dp": 0}},
        [Cut((6, 8), tp=1, fsdp=0)],
    ),
}


def plain_config(mesh: DeviceMesh, sizes: Sizes, kind: str, options: dict[str, Any], stage: int) -> DistributedConfig:
    options = {**options, "costs": "flops"}
    if kind == "mesh":
        return create_devicemesh_config(mesh, list(sizes), **options)
    if kind == "pg":
        return create_processgroup_config(**{f"{role}_pg": mesh.get_group(role) for role in sizes}, **options)
    if "pp" in sizes:
        options["pp_stage_id"] = stage
    return create_auto_config(**{f"{role}_process_group": mesh.get_group(role) for role in sizes}, **options)


@pytest.mark.pitfall("P04", "P06", "P14")
@pytest.mark.parametrize("world", [2, 4])
@on_ranks(timeout=180.0)
def test_plain_shards_are_updated_as_the_whole(rank: int, world: int) -> None:
    for name, (sizes, kind, options, cuts) in PLAIN.items():
        if prod(sizes.values()) == world:
            with about(name):
                check_plain(name, dict(sizes), kind, options, cuts)


def check_plain(name: str, sizes: Sizes, kind: str, options: dict[str, Any], cuts: list[Cut]) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    at = {role: mesh.get_local_rank(role) for role in sizes}
    config = plain_config(mesh, sizes, kind, options, at.get("pp", 0))
    if name == "mesh whose dp shards":
        at, sizes = {"fsdp": at["dp"], "tp": at["tp"]}, {"fsdp": 2, "tp": 2}
    weights = Weights().cut(cuts, sizes, at)
    count = weights.train(weights.optimizer(config), STEPS)
    weights.check()
    wholes = sum(cut.matrices() * prod(sizes[role] for role in cut.apart) for cut in cuts)
    assert over_ranks(count) == STEPS * wholes


# -- validation -----------------------------------------------------------------------------------------------------


AUTO, DTENSOR = create_auto_config, create_dtensor_config


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (AUTO, {"pp_stage_id": 2, "pp_num_stages": 2}, ValueError, "pp_stage_id must be from 0 to .* = 1, got 2"),
        (AUTO, {"pp_stage_id": 0}, ValueError, "belong together"),
        (DTENSOR, {"chunk_bytes": 0}, ValueError, "chunk_bytes must be at least 1"),
        (DTENSOR, {"prefetch_count": -1}, ValueError, "prefetch_count must be at least 0"),
    ],
)
def test_a_wrong_option_is_named(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


@on_ranks(1)
def test_a_mesh_that_says_nothing_is_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("rows",))
    with pytest.raises(ValueError, match="mesh dimension 'rows' has no known role"):
        create_devicemesh_config(mesh, ["rows"])


# -- process groups that come and go --------------------------------------------------------------------------------


@pytest.mark.pitfall("P24")
@on_ranks(2, fresh=True)
def test_configs_outlive_their_process_groups(rank: int, world: int) -> None:
    """The same ones, and a new one, after all process groups were destroyed and made again."""
    store = default_store()
    configs = [create_dtensor_config(costs="flops")]
    for made_anew in (False, True):
        if made_anew:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
            torch.distributed.tensor.debug._clear_sharding_prop_cache()
            configs.append(create_dtensor_config(costs="flops"))
        for config in configs:
            laid = lay("fsdp2-2", build())
            assert_equal_weights(trained(laid.model, config, laid.mine)[0], expected_weights())


# -- one configuration, several optimizers ----------------------------------------------------------------------------


def of_dtensors(mesh: DeviceMesh) -> DistributedConfig:
    return create_dtensor_config(costs="flops")


def of_group(mesh: DeviceMesh) -> DistributedConfig:
    return create_processgroup_config(fsdp_pg=mesh.get_group(), costs="flops")


def of_own_functions(mesh: DeviceMesh) -> DistributedConfig:
    """A user's configuration that calls generated functions inside of its own."""
    generated = of_group(mesh)
    return DistributedConfig(
        lambda params, state: generated.assign_fn(params, state),
        lambda update, rank, state: generated.gather_fn(update, rank, state),
        lambda update, rank, state: generated.redistribute_fn(update, rank, state),
        {},
        prefetch_count=0,
    )


@pytest.mark.parametrize("make", [of_dtensors, of_own_functions])
@on_ranks(2)
def test_a_configuration_serves_several_optimizers(
    rank: int, world: int, make: Callable[[DeviceMesh], DistributedConfig]
) -> None:
    """Two optimizers step in turn, one of them twice as often, and one gets another group in between."""
    mesh = init_device_mesh("cpu", (world,))
    config = make(mesh)
    every = []
    for seed, shapes in enumerate([[(6, 4), (5, 7), (9, 3)], [(8, 5), (3, 3)]]):
        every.append(Weights())
        for i, shape in enumerate(shapes):
            every[-1].shard(10 * seed + i, shape, mesh, [Shard(i % 2)])
    optimizers = [w.optimizer(config, [{"params": w.params[:-1], "use_muon": True}]) for w in every]
    for k in (0, 1, 1, "group", 0, 1, 1):
        if k == "group":
            for weights, optimizer in zip(every, optimizers, strict=True):
                optimizer.add_param_group({"params": weights.params[-1:], "use_muon": True})
            continue
        assert isinstance(k, int)
        grads = every[k].give()
        if len(optimizers[k].param_groups) == 1:
            grads[-1] = None
        every[k].step(optimizers[k], grads)
    for weights, optimizer in zip(every, optimizers, strict=True):
        weights.check(optimizer)
    first, second = (exchange_of(optimizer).domains for optimizer in optimizers)
    assert not {id(domain) for domain, _ in first} & {id(domain) for domain, _ in second}
