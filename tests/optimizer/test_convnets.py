"""Convolutional networks: their kernels are matrices of Muon but the first one, in both residencies."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.small_convnets import CONVNETS, images
from harness.small_models import loss_of
from harness.toy import OPTIONS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.model.routing import route_parameters, route_to_blocks

STEPS = 3
QUICK = ["ResNet"]
OTHERS = [name for name in CONVNETS if name not in QUICK]
NAMES = pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CONVNETS[name].make()


def train(model: nn.Module, optimizer: dmuon.Muon | Reference, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, images(step).chunk(world)[rank]).backward()
        optimizer.step()
    return full_state(model)


@cache
def expected(name: str) -> dict[str, Tensor]:
    model = build(name)
    kernels = {f"{n}.weight" for n in CONVNETS[name].hidden}
    return train(model, Reference(model, matrix=kernels.__contains__))


@pytest.mark.parametrize("name", CONVNETS)
def test_muon_takes_all_kernels_but_the_first_and_what_gives_the_output(name: str) -> None:
    case, model = CONVNETS[name], build(name)
    taken = [f"{n}.weight" for n in case.hidden]
    assert [r.fqn for r in route_parameters(model) if r.muon] == taken
    found = [r for r in route_to_blocks(model) if r.muon]
    assert [r.fqn for r in found] == taken
    assert tuple(dict.fromkeys(r.block for r in found)) == (case.blocks or case.hidden)


@pytest.mark.parametrize("name", CONVNETS)
def test_one_process_equals_torch_on_convolutional_networks(name: str) -> None:
    model = build(name)
    assert_equal_weights(train(model, dmuon.Muon(model, **OPTIONS)), expected(name))


@NAMES
@on_ranks(2)
def test_convolutional_networks_on_ranks_equal_a_single_process(rank: int, world: int, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for name, residency in product(names, ("dedicated", "FSDP2", "DDP")):
        model = build(name)
        if residency == "dedicated":
            dmuon.dedicate_params(model, mesh, costs="flops")
        elif residency == "FSDP2":
            fully_shard(model, mesh=mesh)
        trained = nn.parallel.DistributedDataParallel(model) if residency == "DDP" else model
        train(trained, dmuon.Muon(trained, **OPTIONS), rank, world)
        with about((name, residency)):
            assert_equal_weights(full_state(model), expected(name))
