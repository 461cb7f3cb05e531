"""Models in which no layer repeats, trained in both residencies: equal to a single process with torch's optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.small_models import batch, build, computed_by_hand, loss_of
from harness.toy import OPTIONS, take_steps
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon

STEPS = 3


def train(model: nn.Module, optimizer: dmuon.Muon | Reference, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    take_steps(optimizer, lambda step: loss_of(model, batch(step).chunk(world)[rank]), range(STEPS))
    return full_state(model)


@on_ranks(2)
def test_parts_of_a_container_that_nobody_calls_are_dedicated(rank: int, world: int) -> None:
    def build_parts() -> nn.ModuleDict:
        return nn.ModuleDict(dict(build("actor and critic").named_children()))

    def train_parts(model: nn.ModuleDict, optimizer: dmuon.Muon | Reference, part: int, parts: int) -> None:
        def loss(step: int) -> Tensor:
            x = batch(step).chunk(parts)[part]
            return sum(((one(x) - 1).square().mean() for one in model.values()), torch.zeros(()))

        take_steps(optimizer, loss, range(STEPS))

    model, reference = build_parts(), build_parts()
    plan = dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    assert [m.block for m in plan.matrices] == ["actor.2", "critic.2"]
    train_parts(model, dmuon.Muon(model, **OPTIONS), rank, world)
    train_parts(reference, Reference(reference, matrix=lambda n: n.endswith(".2.weight")), 0, 1)
    assert_equal_weights(full_state(model), full_state(reference))


@on_ranks(2)
def test_a_weight_that_another_forward_uses_is_refused_until_its_block_is_named(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = computed_by_hand()
    dmuon.dedicate_params(model, mesh, costs="flops")
    with pytest.raises(RuntimeError, match=r"'fc2\.weight'.*name its module, or the model, in .*blocks="):
        model(batch(0).chunk(world)[rank])
    torch.manual_seed(0)
    reference, model = computed_by_hand(), computed_by_hand()
    model.load_state_dict(reference.state_dict())
    dmuon.dedicate_params(model, mesh, costs="flops", blocks=[model])
    found = train(model, dmuon.Muon(model, **OPTIONS), rank, world)
    assert_equal_weights(found, train(reference, Reference(reference, matrix=lambda n: n == "fc2.weight")))
