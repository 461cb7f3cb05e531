"""What graphs of owned weights cannot do is refused with what to do instead; what they can do, random programs do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from harness.on_ranks import on_ranks
from harness.toy import batch, build
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import dmuon


def names_inputs(model: nn.Module) -> None:
    optimizer = dmuon.Muon(model)
    model(batch(0)[0]).sum().backward(inputs=list(model.parameters()))
    optimizer.step()


def computes_owned_weights(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.0.up.weight") * 2
    functional_call(model, {"blocks.0.up.weight": weight}, (torch.zeros(2, 5, dtype=torch.long),))


REFUSED: dict[Callable[[nn.Module], None], str] = {
    names_inputs: r"no parameter that dmuon owns has a gradient: backward\(inputs=…\)",
    computes_owned_weights: r"'blocks\.0\.up\.weight' was replaced in its module after dedicate_params",
}


@on_ranks(2)
def test_what_graphs_of_owned_weights_cannot_do_is_refused(rank: int, world: int) -> None:
    for program, message in REFUSED.items():
        model = build()
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
        with pytest.raises(RuntimeError, match=message):
            program(model)
