"""Stacks of matrices, such as experts, and tensors that are several: each matrix is one of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import raised_by
from harness.dtensors import no_whole_tensors, noise, parameter
from harness.hand_laid import SPLITS, Weights, be_made_of
from harness.inside import exchange_of
from harness.on_ranks import on_ranks, over_ranks
from harness.toy import OPTIONS
from harness.traffic import Traffic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dmuon
from dmuon import MatrixSpec, create_dtensor_config, create_processgroup_config

SHAPES = [(5, 6, 4), (3, 4, 9), (1, 7, 7), (4, 1, 8)]
MATRICES = [(12, 8), (1, 9), (7, 1), (9, 5), (2, 11), (1, 1), (3, 13)]
STEPS = 2


@pytest.mark.pitfall("P04", "P06", "P14", "P53")
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (3, {"prefetch_count": 3, "chunk_bytes": 500}),
        pytest.param(
            4, {"prefetch_count": 2, "chunk_bytes": 500, "small_param_numel_threshold": 0}, marks=pytest.mark.slow
        ),
    ],
    ids=["2", "3-small-chunks", "4-unpacked"],
)
@on_ranks()
def test_all_matrices_on_any_placement_equal_those_of_their_own(rank: int, world: int, options: dict[str, Any]) -> None:
    """Every stack, matrix and tensor that is several matrices on every placement, in one optimizer."""
    weights = Weights()
    tensors = [*((shape, None) for shape in (*SHAPES, *MATRICES)), *((split.shape, split) for split in SPLITS)]
    weights.shard_everywhere(world, tensors)
    optimizer = weights.optimizer(create_dtensor_config(costs="flops", **options))
    calls = 0
    for _ in range(STEPS):
        grads = weights.give()
        with no_whole_tensors():
            calls += weights.step(optimizer, grads)
    weights.check(optimizer)
    assert over_ranks(calls) == STEPS * sum(map(len, weights.twin.params))


@pytest.mark.pitfall("P13")
@pytest.mark.parametrize(("world", "kind"), [(3, "line"), (4, "square"), (3, "plain")])
@on_ranks()
def test_experts_that_a_rank_has_whole_cost_no_communication(rank: int, world: int, kind: str) -> None:
    """Ranks agree on which gradients there are of a DTensor; of plain shards nobody else knows."""
    stacks = [noise(i, *shape) for i, shape in enumerate([(5, 6, 4), (4, 3, 3)])]
    if kind == "line":
        mesh = init_device_mesh("cpu", (world,))
        params = [parameter(stack, mesh, [Shard(0)]) for stack in stacks]
        config = create_dtensor_config(costs="flops")
    elif kind == "square":
        mesh = init_device_mesh("cpu", (2, 2))
        params = [parameter(stack, mesh, [_StridedShard(0, split_factor=2), Shard(0)]) for stack in stacks]
        config = create_dtensor_config(costs="flops")
    else:
        params = [nn.Parameter(stack.tensor_split(world)[rank]) for stack in stacks]
        config = create_processgroup_config(ep_pg=dist.group.WORLD, costs="flops")
    optimizer = dmuon.Muon([{"params": params, "use_muon": True}], distributed_config=config, **OPTIONS)
    for param in params:
        param.grad = torch.ones_like(param)
    with no_whole_tensors(), Traffic() as traffic:
        optimizer.step()
    assert [optimizer.state[p]["momentum_buffer"].shape for p in params] == [p.shape for p in params]
    assert traffic.operations() == ({} if kind == "plain" else {"allreduce_": 1})
    assert over_ranks(optimizer.last_step.ns_matrices) == 5 + 4


def groups_of_experts() -> tuple[Any, Any]:
    """Expert parallelism over two pairs of ranks, whose experts are sharded within the pair."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    return mesh, [Shard(0), Shard(1)]


@pytest.mark.pitfall("P79")
@pytest.mark.parametrize("experts", [3, 1])
@on_ranks(4)
def test_experts_are_exchanged_by_the_ranks_that_hold_them_and_no_others(rank: int, world: int, experts: int) -> None:
    """Beside a matrix of all ranks. Three experts are two and one; of one expert a pair of ranks has nothing."""
    mesh, placements = groups_of_experts()
    weights = Weights()
    stack = weights.shard(0, (experts, 6, 4), mesh, placements)
    weights.shard(1, (7, 5), mesh, [Shard(0), Shard(1)])
    optimizer = weights.optimizer(create_dtensor_config(costs="flops", prefetch_count=2))
    pair = (0, 1) if rank < 2 else (2, 3)
    first, count = (0, -(-experts // 2)) if rank < 2 else (-(-experts // 2), experts // 2)
    exchange = exchange_of(optimizer)
    tasks = [task for task in exchange.tasks() if task.param is stack]
    assert {task.domain.ranks for task in tasks if task.domain} == ({pair} if count else set())
    assert sorted(number for task in tasks for number in task.numbers) == [*range(first, first + count)]
    if count:
        owners = exchange.layouts.plans[pair].owners
        assert {name.rpartition("[")[2] for name in owners} == {f"{n}]" for n in range(first, first + count)}
    group = next((domain.group for domain, _ in exchange.domains if domain.ranks == pair), None)
    calls = 0
    for step in range(STEPS):
        grads = weights.give()
        with no_whole_tensors(), Traffic() as traffic:
            calls += weights.step(optimizer, grads)
        if step and group is not None and count:
            assert traffic.over(group, votes=False).operations == 2, "to the owners and back"
            whole = 4 * 6 * 4 * count
            assert traffic.over(group, votes=False).nbytes <= 2 * whole
    weights.check(optimizer)
    assert over_ranks(calls) == STEPS * (experts + 1)
    assert optimizer.state[stack]["momentum_buffer"].shape == stack.shape


@pytest.mark.pitfall("P19", "P48", "P79")
@on_ranks(4)
def test_experts_of_ranks_without_a_gradient_are_updated_if_other_experts_have_one(rank: int, world: int) -> None:
    mesh, placements = groups_of_experts()
    weights = Weights()
    stack = weights.shard(0, (4, 6, 4), mesh, placements)
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"))
    for idle in ([], [2, 3], [0, 1, 2], [0, 1, 2, 3]):
        (grad,) = weights.give()
        assert grad is not None
        if idle == [2, 3]:
            grad[2:] = 0.0
        elif idle == [0, 1, 2]:
            grad[:2], grad[2:, :3] = 0.0, 0.0
        if rank in idle:
            stack.grad = None
        weights.step(optimizer, [None if len(idle) == world else grad])
    weights.check(optimizer)


@pytest.mark.pitfall("P79")
@on_ranks(4)
def test_a_fault_in_one_group_of_experts_ends_all_ranks(rank: int, world: int) -> None:
    """Also where a rank has none of the experts, before their group connects."""
    mesh, placements = groups_of_experts()
    stack = parameter(noise(0, 4, 6, 4), mesh, placements)
    matrix = parameter(noise(1, 6, 4), mesh, [Shard(0), Replicate()])
    local = torch.zeros(2, 1, 4)
    wrong = nn.Parameter(DTensor.from_local(local, mesh, placements, shape=stack.shape, stride=stack.stride()))
    says = r"the local tensor of rank 3 has shape \(2, 1, 4\), torch's chunks have \(2, 3, 4\)"
    for of_rank_3, message in (([wrong, matrix], says), ([matrix], "parameter")):
        params = of_rank_3 if rank == 3 else [stack, matrix]
        raised = raised_by(lambda params=params: dmuon.Muon([{"params": params, "use_muon": True}], **OPTIONS))
        assert raised.matches(ValueError, message), raised


# -- tensors that are several matrices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True])
def test_parameters_in_another_order_or_in_the_place_of_others_are_split_as_they_were(replaced: bool) -> None:
    weights = Weights()
    for i, split in enumerate(SPLITS):
        weights.add(i, split.shape, split=split)
    optimizer = weights.optimizer(None)
    if replaced:
        weights.params = [nn.Parameter(param.detach()) for param in weights.params]
        optimizer.param_groups[0]["params"] = list(weights.params)
    else:
        optimizer.param_groups[0]["params"].reverse()
    weights.train(optimizer, STEPS)
    weights.check(optimizer)


def test_matrices_of_one_shape_that_are_stored_otherwise_have_rates_of_their_own() -> None:
    """``(in, out)`` beside ``(out, in)``: a rate that depends on which side is the output."""
    plain, stored = nn.Parameter(torch.ones(4, 9)), nn.Parameter(torch.ones(4, 9))
    be_made_of(stored, MatrixSpec(transposed=True))
    optimizer = dmuon.Muon(
        [{"params": [plain, stored], "use_muon": True}], lr=1.0, weight_decay=0.0, adjust_lr_fn="original"
    )
    gradient = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    plain.grad, stored.grad = gradient.clone(), gradient.clone()
    optimizer.step()
    assert torch.allclose(1 - stored.detach(), (9 / 4) ** 0.5 * (1 - plain.detach()), atol=1e-6)
