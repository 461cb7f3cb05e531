"""A slower rank owns less, and ranks that differ by noise count as alike."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from unittest import mock

import torch.nn as nn
from harness.assertions import assert_equal_weights, assert_same_tensors, raised_by
from harness.network import full_state, tensor_parallel
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS, build, train
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.report import stragglers


def loads(found: dmuon.OwnerPlan) -> list[int]:
    """Of each rank, the elements that it owns."""
    elements = [0] * found.world
    for matrix in found.matrices:
        elements[found.owners[matrix.name]] += matrix.rows * matrix.cols
    return elements


@on_ranks(2)
def test_both_residencies_give_a_slow_rank_less_and_train_to_the_same_weights(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    expected = build()
    even = dmuon.dedicate_params(expected, mesh, costs="flops")
    model = build()
    found = dmuon.dedicate_params(model, mesh, costs="flops", ranks=[1.0, 1 / 3])
    sharded = build()
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=mesh)
    config = dmuon.create_dtensor_config(costs="flops", ranks=[1, 1 / 3])
    exchanged = dmuon.Muon(sharded, distributed_config=config, **OPTIONS).exchanged()
    assert abs(loads(even)[1] / sum(loads(even)) - 1 / 2) < 0.1
    assert abs(loads(found)[1] / sum(loads(found)) - 1 / 4) < 0.1
    assert sum(one.owner == 1 for one in exchanged) / len(exchanged) < 0.35
    train(expected, dmuon.Muon(expected, **OPTIONS), range(2), rank, world)
    train(model, dmuon.Muon(model, **OPTIONS), range(2), rank, world)
    assert_same_tensors(full_state(model), full_state(expected))


@on_ranks(2)
def test_speeds_that_ranks_do_not_agree_on_or_cannot_use_are_refused_on_all(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    uneven = [1.0, 0.5] if rank else None
    for ranks, kind, says in (
        (uneven, ValueError, "option ranks"),
        ("measured", TypeError, r"ranks='measured' is no list of numbers; give a list of speeds"),
        ([1.0, 0.0], ValueError, "holds what is no positive number"),
        ([1.0], ValueError, "ranks= has 1 speeds, and the job 2 ranks"),
    ):
        raised = raised_by(lambda ranks=ranks: dmuon.dedicate_params(build(), mesh, costs="flops", ranks=ranks))
        assert raised.matches(kind, says), raised
    model: nn.Module = build()
    fully_shard(model, mesh=mesh)
    config = dmuon.create_dtensor_config(costs="flops", ranks=uneven)
    raised = raised_by(lambda: dmuon.Muon(model, distributed_config=config, **OPTIONS))
    assert raised.matches(ValueError, r"rank 1 was given ranks=\[1.0, 0.5\], and rank 0 ranks=None"), raised


@on_ranks(3)
def test_a_straggler_of_a_step_is_named_with_the_plan_that_suits_it(rank: int, world: int) -> None:
    """Which trains to the same weights from the checkpoint of the first."""
    mesh = init_device_mesh("cpu", (world,))
    model = build(layers=6)
    before = dmuon.dedicate_params(model, mesh, costs="flops")
    optimizer = dmuon.Muon(model, **OPTIONS)
    raised = raised_by(lambda: dmuon.rebalanced_plan(model, optimizer))
    assert raised.matches(ValueError, "has taken no step yet"), raised
    train(model, optimizer, range(1), rank, world)
    works = before.solution.loads_ns

    def last_step(factor: float) -> mock.PropertyMock:
        took = works[rank] * 1e-9 * (factor if rank == 2 else 1.0)
        return mock.PropertyMock(return_value=replace(stats, seconds={"ns": took}))

    stats = optimizer.last_step
    with mock.patch.object(dmuon.Muon, "last_step", last_step(1.05)):
        assert dmuon.rebalanced_plan(model, optimizer) is before
    with mock.patch.object(dmuon.Muon, "last_step", last_step(2.0)), mock.patch.object(stragglers, "_log") as log:
        after = dmuon.rebalanced_plan(model, optimizer)
    assert log.warning.called == (rank == 0)
    assert after.digest != before.digest and after.owners.keys() == before.owners.keys()
    assert abs(loads(after)[2] / sum(loads(after)) - 1 / 5) < 0.08, "half of what each of the others has"
    other = build(layers=6)
    dmuon.dedicate_params(other, mesh, plan=after)
    set_model_state_dict(other, get_model_state_dict(model))
    resumed = dmuon.Muon(other, **OPTIONS)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(1, 3), rank, world)
    train(other, resumed, range(1, 3), rank, world)
    assert_equal_weights(full_state(other), full_state(model))


@on_ranks(4)
def test_with_tensor_parallelism_each_rank_is_judged_by_its_own_matrices(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = build(layers=6)
    tensor_parallel(model, mesh["tp"])
    before = dmuon.dedicate_params(model, mesh["shard"], costs="flops")
    ranks = dedications(model)[0].runtime.comm.topology.ranks
    assert len(ranks) == before.world == 4
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(1), rank // 2, 2)
    took = before.solution.loads_ns[ranks.index(rank)] * 1e-9 * (2.0 if rank == 3 else 1.0)
    slow = mock.PropertyMock(return_value=replace(optimizer.last_step, seconds={"ns": took}))
    with mock.patch.object(dmuon.Muon, "last_step", slow), mock.patch.object(stragglers, "_log") as log:
        after = dmuon.rebalanced_plan(model, optimizer)
    assert [call.args[1] for call in log.warning.call_args_list] == ([3] if rank == 0 else [])
    assert loads(after)[ranks.index(3)] < 0.7 * loads(before)[ranks.index(3)]


def test_speeds_of_ranks_without_work_are_those_of_the_others() -> None:
    assert stragglers.speeds_of([100, 0, 100, 100], [1.0, 0.0, 2.0, 1.0]) == [1.0, 1.0, 0.5, 1.0]
