"""Tensors that are several matrices: each is updated as one of its own; for placements see test_exchanged_stacks.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from harness.dtensors import functions_of_whole_tensors
from harness.hand_laid import SPLITS, Weights, be_made_of
from harness.on_ranks import on_ranks, over_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dmuon
from dmuon import DistributedConfig, MatrixSpec, create_dtensor_config

STEPS = 3


def test_parts_of_many_layers_are_orthogonalized_together() -> None:
    """Of layers that lie alike, part by part."""
    weights = Weights()
    for i in range(4):
        weights.add(i, SPLITS[0].shape, split=SPLITS[0])
    optimizer = weights.optimizer(None)
    weights.train(optimizer, STEPS)
    assert (optimizer.last_step.ns_matrices, optimizer.last_step.ns_batches) == (12, 3)
    weights.check(optimizer)


@on_ranks(2)
def test_parts_of_what_a_user_gathers_equal_matrices_of_their_own(rank: int, world: int) -> None:
    """By functions that know nothing of parts."""
    weights = Weights()
    for i, split in enumerate(SPLITS):
        weights.shard(i, split.shape, init_device_mesh("cpu", (world,)), [Shard(0)], split=split)
    gather, redistribute = functions_of_whole_tensors()

    def assign(params: list[Any], _: dict[str, Any]) -> dict[int, int]:
        return {i: i % world for i in range(len(params))}

    optimizer = weights.optimizer(DistributedConfig(assign, gather, redistribute, {}))
    calls = over_ranks(weights.train(optimizer, STEPS))
    weights.check(optimizer)
    assert calls == STEPS * sum(map(len, weights.twin.params))


@on_ranks(2)
def test_one_fused_tensor_has_several_owners(rank: int, world: int) -> None:
    """Queries, keys and values of one layer are shared out as three layers would be."""
    weights = Weights()
    weights.shard(0, SPLITS[0].shape, init_device_mesh("cpu", (world,)), [Shard(0)], split=SPLITS[0])
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"))
    calls = weights.train(optimizer, 1)
    weights.check(optimizer)
    assert {over_ranks(calls), calls} in ({3, 1}, {3, 2})


def test_parameters_that_take_the_place_of_others_are_split_as_they_were() -> None:
    weights = Weights()
    for i, split in enumerate(SPLITS):
        weights.add(i, split.shape, split=split)
    optimizer = weights.optimizer(None)
    weights.params = [nn.Parameter(param.detach()) for param in weights.params]
    optimizer.param_groups[0]["params"] = list(weights.params)
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
