"""``dmuon.Muon`` on models that torch sharded or replicated: what travels, missing gradients, groups that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.dtensors import local_tensor, no_whole_tensors
from harness.hand_laid import Weights
from harness.network import Network, full_state
from harness.on_ranks import on_ranks, over_ranks
from harness.topologies import lay
from harness.toy import build
from harness.traffic import Traffic
from programs.unusual import ThinBlock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dmuon import create_dtensor_config


def toy(name: str) -> Network:
    """With thin matrices, except where tensor parallelism leaves them whole on every rank."""
    return build() if "tp" in name else build(block=ThinBlock)


# -- traffic --------------------------------------------------------------------------------------------------------


TRAFFIC = {
    2: ["fsdp2-2", "tp-alone", "ddp", "replicate-fsdp"],
    3: ["fsdp2-3"],
    4: ["fsdp2-hsdp", "fsdp2-tp", "cp-groups"],
}
COPIED = ("ddp", "replicate-fsdp", "fsdp2-hsdp", "cp-groups")  # what one copy has goes on to the others


@pytest.mark.pitfall("P13")
@pytest.mark.parametrize(
    ("world", "packed"),
    [(2, False), (3, True), (4, True), *(pytest.param(w, w == 2, marks=pytest.mark.slow) for w in (2, 4))],
)
@on_ranks()
def test_a_step_is_one_vote_and_the_exchanges_that_the_layout_needs(rank: int, world: int, packed: bool) -> None:
    """Of the second one."""
    options = {} if packed else {"small_param_numel_threshold": 0, "chunk_bytes": 2000}
    for name in TRAFFIC[world]:
        if name == "ddp" and not packed:
            continue
        laid = lay(name, toy(name), **options)
        optimizer = laid.optimizer()
        for step in range(2):
            optimizer.zero_grad()
            laid.backward(step)
            with no_whole_tensors(), Traffic() as traffic:
                optimizer.step()
        found, table = traffic.operations(), optimizer.exchanged()
        assert found.pop("allreduce_") == 1, name
        exchanges, copies = found.pop("alltoall_base_", 0), found.pop("broadcast_", 0)
        if name in ("ddp", "replicate-fsdp"):
            assert exchanges == 0, "owners have whole matrices there"
        else:
            assert exchanges == 2 if packed else exchanges > 2, f"{name}: {exchanges} all-to-alls"
        assert not found and copies <= (len(table) if name in COPIED else 0), f"{name}: {copies} broadcasts, {found}"
        assert optimizer.last_step.ns_matrices == sum(one.owner == rank for one in table), name
        assert len({one.owner for one in table}) > 1, f"{name}: one rank owns everything"
        if laid.config is not None:
            planned = laid.config.state["assignments"]
            assert [one.owner for one in table] == [planned[i] for i in range(len(table))], f"{name}: not as planned"
        if name not in COPIED:  # of those tests/report/test_exchange_accounting.py counts the bytes
            params = dict(laid.network.named_parameters())
            sizes = [(params[one.name].numel(), local_tensor(params[one.name]).numel(), one.owner) for one in table]
            expected = 4 * sum(whole - mine if owner == rank else mine for whole, mine, owner in sizes)
            assert traffic.by_operator()["alltoall_base_"].nbytes == expected, name


# -- ranks that share some --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["owner", "fused"])
@on_ranks(2)
def test_a_step_in_inference_mode_is_the_same_step(rank: int, world: int, strategy: str) -> None:
    found = []
    for mode in (False, True):
        laid = lay("fsdp2-2", build())
        optimizer = laid.optimizer(strategy=strategy)
        for step in range(3):
            optimizer.zero_grad()
            laid.backward(step)
            with torch.inference_mode(mode and step != 1):
                optimizer.step()
        optimizer.flush()
        found.append(full_state(laid.network))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@on_ranks(3)
def test_ranks_that_share_some_matrices_with_some_ranks(rank: int, world: int) -> None:
    """Two groups over ranks 0 to 2, and between them matrices that only ranks 0 and 1 share."""
    everyone, two = (DeviceMesh("cpu", list(range(n))) for n in (3, 2))
    shapes = {"a": (9, 5), "b": (5, 5), "c": (7, 4), "d": (8, 3), "e": (6, 6)}
    meshes = {"a": everyone, "b": two, "c": two, "d": everyone, "e": everyone}
    weights = Weights()
    groups: list[dict[str, Any]] = []
    for names in ("ab", "c", "d", "e"):
        mine = [name for name in names if rank < 2 or meshes[name] is everyone]
        params = [weights.shard(ord(n), shapes[n], meshes[n], [Shard(0)]) for n in mine]
        groups.append({"params": params, "use_muon": True})
    if rank == 2:
        groups[1]["params"] = [nn.Parameter(torch.zeros(2, 2))]  # groups are counted alike on all ranks
    optimizer = weights.optimizer(create_dtensor_config(costs="flops", prefetch_count=3), groups)
    weights.train(optimizer, 3)
    weights.check(optimizer)
    assert over_ranks(optimizer.last_step.ns_matrices) == 5


# -- groups and placements that change -----------------------------------------------------------------------------

CHANGING = [(9, 5), (9, 5), (4, 7), (6, 6), (3, 8)]


@on_ranks(3)
def test_changed_groups_are_assigned_anew_and_momentum_stays(rank: int, world: int) -> None:
    """Begin with parameters 0 and 1, add 2 in a group and 3 to a list, then put 4 in the place of 0."""
    mesh = init_device_mesh("cpu", (world,))
    weights = Weights()
    params = [weights.shard(i, shape, mesh, [Shard(i % 2)]) for i, shape in enumerate(CHANGING)]
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"), params[:2])
    alive = {0, 1}
    for step in range(8):
        if step == 2:
            optimizer.add_param_group({"params": [params[2]], "use_muon": True})
            alive = {0, 1, 2}
        if step == 4:
            optimizer.param_groups[1]["params"].append(params[3])
            alive = {0, 1, 2, 3}
        if step == 6:
            optimizer.param_groups[0]["params"][0] = params[4]
            alive = {1, 2, 3, 4}
        grads = weights.give()
        calls = weights.step(optimizer, [grad if i in alive else None for i, grad in enumerate(grads)])
        assert over_ranks(calls) == len(alive)
    weights.check()


@on_ranks(2)
def test_another_placement_is_planned_anew_and_momentum_follows(rank: int, world: int) -> None:
    """Parameters take other placements between steps, in place."""
    mesh = init_device_mesh("cpu", (world,))
    weights = Weights()
    for i in range(3):
        weights.shard(i, (7, 5), mesh, [Shard(0)])
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"))
    for step, placement in enumerate((Shard(0), Shard(1), Replicate(), Shard(0))):
        for param in weights.params[: 2 if step else 0]:
            param.grad = None
            torch.utils.swap_tensors(param, nn.Parameter(param.detach().redistribute(placements=[placement])))
        weights.train(optimizer, 1)
        weights.check(optimizer)
