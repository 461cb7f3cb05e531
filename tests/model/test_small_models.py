"""Which matrices of models without stacks are hidden, and which blocks such models have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from harness.small_convnets import CONVNETS
from harness.small_models import CASES, Case, Model, build, chain, tied_layers
from harness.trees import D, H, linear, node
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dmuon.model.routing import route_parameters, route_to_blocks


@pytest.mark.parametrize("case", [*CASES.values(), *CONVNETS.values()], ids=[*CASES, *CONVNETS])
def test_muon_takes_the_hidden_matrices_of_models_without_stacks_and_blocks_are_their_layers(case: Case) -> None:
    taken = [f"{name}.weight" for name in case.hidden]
    assert [r.fqn for r in route_parameters(case.make()) if r.muon] == taken
    found = {r.fqn: r.block for r in route_to_blocks(case.make()) if r.muon}
    assert list(found) == taken
    assert tuple(dict.fromkeys(found.values())) == (case.blocks or case.hidden)


def test_a_weight_that_layers_share_needs_a_model_that_is_called() -> None:
    model = tied_layers()
    parts = nn.ModuleDict(dict(model.named_children()))
    with pytest.raises(ValueError, match=r"'fc2.weight' is shared by blocks fc2, fc3; untie it, .*blocks=\[model\]"):
        route_to_blocks(parts)
    assert [r.fqn for r in route_parameters(parts) if r.muon] == ["fc2.weight"], "without blocks nothing is asked for"
    assert {r.block for r in route_to_blocks(Model(chain("body"), body=model)) if r.muon} == {"(model)"}


def test_blocks_may_be_the_whole_model_which_hides_nothing() -> None:
    for case in CASES.values():
        model = case.make()
        found = {r.fqn: r.block for r in route_to_blocks(model, blocks=[model]) if r.muon}
        assert found == {f"{name}.weight": "(model)" for name in case.hidden}


@pytest.mark.parametrize(
    ("holder", "block"),
    [
        (lambda: nn.ParameterList([nn.Parameter(torch.ones(3, 3))]), "part"),
        (lambda: nn.TransformerDecoderLayer(D, 2, H), "part.holder"),  # evaluation reads its children's weights
        (lambda: nn.MultiheadAttention(D, 2, kdim=3, vdim=4), "part.holder"),
        (lambda: checkpoint_wrapper(linear()), "part.holder"),  # recomputation happens inside of it
        (linear, "part.holder"),
    ],
)
def test_a_block_is_what_is_called_when_its_weights_are_used(holder: Callable[[], nn.Module], block: str) -> None:
    model = node(part=node(holder=holder()), head=linear())

    def inside(fqn: str, module: nn.Module, param: nn.Parameter) -> bool:
        return "holder" in fqn and param.ndim == 2

    found = [r for r in route_to_blocks(model, select=inside) if r.muon]
    assert found and {r.block for r in found} == {block}
    assert {r.block_module for r in found} == {model.get_submodule(block)}


def test_reasons_say_what_is_an_input_or_an_output_layer() -> None:
    found = {r.fqn: r.reason for r in route_parameters(build("actor and critic")) if r.param.ndim == 2}
    ends = {
        f"{part}.{i}.weight": f"{end} layer" for part in ("actor", "critic") for i, end in ((0, "input"), (4, "output"))
    }
    assert found == ends | {f"{part}.2.weight": "matrix of a hidden layer" for part in ("actor", "critic")}
    found = {r.fqn: r.reason for r in route_parameters(build("input and output layer only")) if r.param.ndim == 2}
    assert found == {"fc1.weight": "input layer of a model without hidden layers", "fc2.weight": "output layer"}
