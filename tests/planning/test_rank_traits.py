"""A slower or fuller rank owns less, and ranks that differ by noise count as alike."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights, assert_same_tensors, raised_by
from harness.network import full_state, tensor_parallel
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS, build, train
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.planning import rank_traits
from dmuon.planning.rank_traits import Limits, RankTraits, is_wanted, limits_of
from dmuon.report import stragglers
from dmuon.solver import CostTable, Matrix, Rank, plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MATRICES = [Matrix(f"m{i}", 64, 64, "b") for i in range(24)]
COSTS = CostTable({(64, 64): {1: 1000}})


def owned(traits: list[RankTraits]) -> list[int]:
    """Matrices of each rank in the plan that the solver makes of what ranks measured."""
    limits = limits_of(traits, MATRICES)
    ranks = [Rank(i, 0, one.speed, one.memory) for i, one in enumerate(limits)]
    found = plan(MATRICES, ranks, COSTS).owners
    return [[*found.values()].count(rank) for rank in range(len(traits))]


def test_a_rank_of_half_the_speed_owns_half_as_much() -> None:
    fast, other, slow = owned([RankTraits(100, None), RankTraits(100, None), RankTraits(200, None)])
    assert slow == 5 and {fast, other} == {9, 10}, "of 24"


def test_a_fuller_rank_owns_no_more_than_its_part_of_an_even_share() -> None:
    counts = owned([RankTraits(100, 80 << 30), RankTraits(100, 80 << 30), RankTraits(100, 20 << 30)])
    assert counts[2] == 2 and sum(counts) == 24, "a quarter of eight"


@given(st.lists(st.integers(960, 1040), min_size=1, max_size=9), st.integers(1, 2**40))
def test_noise_leaves_ranks_alike(times: list[int], free: int) -> None:
    assert limits_of([RankTraits(ns, free) for ns in times], MATRICES) == [Limits()] * len(times)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 2**40)), min_size=1, max_size=9))
def test_whatever_ranks_measure_there_is_a_plan(measured: list[tuple[int, int]]) -> None:
    limits = limits_of([RankTraits(*one) for one in measured], MATRICES)
    assert any(one.memory is None for one in limits), "what is typical bounds nobody"
    ranks = [Rank(i, 0, one.speed, one.memory) for i, one in enumerate(limits)]
    assert len(plan(MATRICES, ranks, COSTS).owners) == len(MATRICES)


@pytest.mark.parametrize(
    ("choice", "costs", "device", "wanted"),
    [
        (None, None, CUDA, True),
        (None, None, CPU, False),
        (None, "flops", CUDA, False),
        ("alike", None, CUDA, False),
        ("measured", "flops", CPU, True),
    ],
)
def test_devices_are_measured_by_default_where_costs_are(
    choice: rank_traits.RankChoice, costs: object, device: torch.device, wanted: bool
) -> None:
    assert is_wanted(choice, costs, device) is wanted


def test_where_there_is_no_memory_to_measure_a_rank_counts_as_typical(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: torch.device) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rank_traits, "_product_ns", full)
    unknown = RankTraits.here(CPU)
    assert unknown.product_ns is None
    assert limits_of([unknown, RankTraits(100, None), RankTraits(100, None)], MATRICES) == [Limits()] * 3
    assert limits_of([unknown] * 3, MATRICES) == [Limits()] * 3


def test_free_memory_limits_only_owners_that_hold_what_they_own() -> None:
    traits = [RankTraits(100, 80 << 30), RankTraits(100, 20 << 30), RankTraits(100, 80 << 30)]
    assert limits_of(traits, MATRICES)[1].memory is not None
    assert limits_of(traits, MATRICES, held=False) == [Limits()] * 3


def test_the_measurement_is_of_this_device() -> None:
    here = RankTraits.here(CPU)
    assert here.free_bytes is None and 10_000 < here.product_ns < 10**9, "256³ multiply-adds"


def test_memory_that_torch_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda device: (100, 500), memory_reserved=lambda device: 70, memory_allocated=lambda device: 50
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(rank_traits, "_product_ns", lambda device: 1)
    assert RankTraits.here(CUDA) == RankTraits(1, 120)
    del module.mem_get_info
    assert RankTraits.here(CUDA) == RankTraits(1, None)


def loads(found: dmuon.OwnerPlan) -> list[int]:
    """Of each rank, the elements that it owns."""
    elements = [0] * found.world
    for matrix in found.matrices:
        elements[found.owners[matrix.name]] += matrix.rows * matrix.cols
    return elements


@on_ranks(2)
def test_both_residencies_give_a_slow_rank_less_and_train_to_the_same_weights(rank: int, world: int) -> None:
    slow = mock.patch.object(rank_traits, "_product_ns", lambda device: 300 if rank else 100)
    mesh = init_device_mesh("cpu", (world,))
    expected = build()
    even = dmuon.dedicate_params(expected, mesh, costs="flops")
    with slow, mock.patch.object(rank_traits._log, "warning") as told:
        model = build()
        found = dmuon.dedicate_params(model, mesh, costs="flops", ranks="measured")
        sharded = build()
        for module in (*sharded.blocks, sharded):
            fully_shard(module, mesh=mesh)
        config = dmuon.create_dtensor_config(costs="flops", ranks="measured")
        optimizer = dmuon.Muon(sharded, distributed_config=config, **OPTIONS)
    assert abs(loads(even)[1] / sum(loads(even)) - 1 / 2) < 0.1
    assert abs(loads(found)[1] / sum(loads(found)) - 1 / 4) < 0.1, "100 to 300, of which the median is 200"
    (exchanged,) = optimizer._exchange.layouts.plans.values()
    assert loads(exchanged)[1] / sum(loads(exchanged)) < 0.35
    assert told.called == (rank == 0)
    train(expected, dmuon.Muon(expected, **OPTIONS), range(2), rank, world)
    train(model, dmuon.Muon(model, **OPTIONS), range(2), rank, world)
    assert_same_tensors(full_state(model), full_state(expected))


@on_ranks(2)
def test_what_ranks_cannot_measure_or_do_not_agree_on_is_told_on_all(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def broken(device: torch.device) -> int:
        if rank:
            raise OSError("the device is gone")
        return 100

    with mock.patch.object(rank_traits, "_product_ns", broken):
        raised = raised_by(lambda: dmuon.dedicate_params(build(), mesh, costs="flops", ranks="measured"))
    assert raised.matches(Exception, "the device is gone"), raised
    choice = "measured" if rank else "alike"
    raised = raised_by(lambda: dmuon.dedicate_params(build(), mesh, costs="flops", ranks=choice))
    assert raised.matches(ValueError, "option ranks"), raised
    model: nn.Module = build()
    fully_shard(model, mesh=mesh)
    config = dmuon.create_dtensor_config(costs="flops", ranks=choice)
    raised = raised_by(lambda: dmuon.Muon(model, distributed_config=config, **OPTIONS))
    assert raised.matches(ValueError, r"rank 1 was given ranks='measured', and rank 0 ranks='alike'"), raised
    raised = raised_by(lambda: dmuon.dedicate_params(build(), mesh, ranks="fast"))
    assert raised.matches(ValueError, "ranks must be 'alike', 'measured' or None, got 'fast'"), raised


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
