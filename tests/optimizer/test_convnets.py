"""Convolutional networks: their kernels are matrices of Muon but the first one."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from harness.small_convnets import CONVNETS

from dmuon.model.routing import route_parameters, route_to_blocks


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CONVNETS[name].make()


@pytest.mark.parametrize("name", CONVNETS)
def test_muon_takes_all_kernels_but_the_first_and_what_gives_the_output(name: str) -> None:
    case, model = CONVNETS[name], build(name)
    taken = [f"{n}.weight" for n in case.hidden]
    assert [r.fqn for r in route_parameters(model) if r.muon] == taken
    found = [r for r in route_to_blocks(model) if r.muon]
    assert [r.fqn for r in found] == taken
    assert tuple(dict.fromkeys(r.block for r in found)) == (case.blocks or case.hidden)
