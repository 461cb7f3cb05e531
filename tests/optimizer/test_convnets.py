"""Convolutional networks: their kernels are matrices of Muon but the first one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.network import full_state
from harness.oracle import Reference
from harness.small_convnets import CONVNETS, images
from harness.small_models import loss_of
from harness.toy import OPTIONS
from torch import Tensor

import dmuon
from dmuon.model.routing import route_parameters, route_to_blocks

STEPS = 3


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CONVNETS[name].make()


def train(model: nn.Module, optimizer: dmuon.Muon | Reference) -> dict[str, Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, images(step)).backward()
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
