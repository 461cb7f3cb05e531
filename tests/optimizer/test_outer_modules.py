"""An optimizer of a module around a dedicated model, with further parameters: a head, a copy for averages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.network import Block, Size, full_state, is_matrix, loss_of
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from harness.toy import OPTIONS, SIZE, batch, build, take_steps, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor

STEPS = 3
INNER = sum(is_matrix(name) for name, _ in build().named_parameters())
TAIL = 2 * 3


class Outer(nn.Module):
    """The toy, blocks of its own that follow it, a temperature, and a copy that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.average = copy.deepcopy(self.inner).requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.tail = nn.ModuleList(Block(Size(SIZE.vocabulary, 24, 0, 0)) for _ in range(2))
            self.temperature = nn.Parameter(torch.ones(SIZE.vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(tokens)
        for block in self.tail:
            x = block(x)
        scaled: Tensor = x * self.temperature
        return scaled


def reference(*, temperature: bool) -> dict[str, Tensor]:
    model = Outer()
    model.temperature.requires_grad_(temperature)
    train(model, dmuon.Muon(model, **OPTIONS), range(STEPS))
    return {name: value.clone() for name, value in model.state_dict().items()}


def laid(kind: str, world: int) -> Outer:
    model = Outer()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model.inner, mesh, costs="flops")
    if kind == "fully_shard":
        for block in (*model.inner.blocks, *model.tail):
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model.temperature.requires_grad_(False)
        model.tail = nn.ModuleList(DistributedDataParallel(block) for block in model.tail)
    return model


def plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".module.", "."): value for name, value in weights.items()}


@pytest.mark.parametrize(("world", "kind"), [(2, "fully_shard"), (2, "ddp")])
@on_ranks(timeout=90.0)
def test_training_equals_one_process(rank: int, world: int, kind: str) -> None:
    model = laid(kind, world)
    optimizer = dmuon.Muon(model, **OPTIONS)
    owned = [p for g in optimizer.param_groups if g["use_muon"] for p in g["params"] if p.requires_grad]
    assert len(owned) == INNER + TAIL and sum(isinstance(p, OwnedTensor) for p in owned) == INNER
    assert not any(p in optimizer.state for p in model.average.parameters())
    train(model, optimizer, range(STEPS), rank, world)
    expected = reference(temperature=kind != "ddp")
    weights = plain_names(full_state(model))
    assert_equal_weights(weights, expected)
    assert_same_over_ranks(weights)
    assert over_ranks(optimizer.last_step.ns_matrices) == INNER + TAIL, "each has one owner"
    table = dmuon.explain(model, optimizer)
    assert "put there by a group" not in table, "what lies outside has the policy's reasons"
    assert "bare parameter" in table or "1-D" in table
    if kind == "fully_shard":  # a mixture of residencies is told in one table
        names = {f"tail.{i}.{name}.weight" for i in range(2) for name in ("mix", "up", "down")}
        assert {one.name for one in optimizer.exchanged()} == names and "ranks 0 1: plan" in table
        for name in names | {f"inner.blocks.{i}.up.weight" for i in range(3)}:
            [line] = [line for line in table.splitlines() if line.split()[:1] == [name]]
            assert line.endswith("matrix inside a block"), line


@on_ranks(2, timeout=60.0)
def test_parameters_that_nobody_averages_are_refused_and_the_remedy_works(rank: int, world: int) -> None:
    model = laid("neither", world)
    with pytest.raises(ValueError, match=r"15 parameters \('temperature', .*nobody averages .*: call "):
        dmuon.Muon(model, **OPTIONS)
    for block in model.tail:
        block.requires_grad_(False)
    with pytest.raises(ValueError, match=r"1 parameters \('temperature'\) lie outside"):
        dmuon.Muon(model, **OPTIONS)
    dmuon.fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    dmuon.Muon(model, **OPTIONS)


@on_ranks(1, timeout=60.0)
def test_two_dedicated_models_have_one_optimizer(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    pair = nn.ModuleDict({"generator": build(), "critic": build(seed=1)})
    before = {name: value.clone() for name, value in pair.state_dict().items()}
    for part in pair.values():
        dmuon.dedicate_params(part, mesh, costs="flops")
    optimizer = dmuon.Muon(pair, **OPTIONS)
    take_steps(optimizer, lambda step: sum(loss_of(part, *batch(step)) for part in pair.values()), range(STEPS))  # type: ignore[arg-type, return-value]
    expected = {}
    for name, seed in (("generator", 0), ("critic", 1)):
        alone = build(seed=seed)
        train(alone, dmuon.Muon(alone, **OPTIONS), range(STEPS))
        expected |= {f"{name}.{key}": value for key, value in alone.state_dict().items()}
    assert before.keys() == expected.keys()
    assert_equal_weights(full_state(pair), expected)
