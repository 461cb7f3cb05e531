"""Which matrices of models without stacks are hidden, and which blocks such models have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from harness.small_convnets import CONVNETS
from harness.small_models import CASES, Case, Model, build, chain, tied_layers
from harness.trees import Called, D, H, linear, node, stack
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


# -- what is a stack ----------------------------------------------------------------------------------------------


class Residual(Called):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()


def stages(*depths: int) -> nn.Module:
    """As ResNets: stages of layers of one class, a stem and a head."""
    parts = {f"layer{i}": nn.Sequential(*(Residual() for _ in range(depth))) for i, depth in enumerate(depths)}
    return node(stem=linear(3), **parts, head=linear(D, 2))


def names(*found: str) -> list[str]:
    return [f"{name}.{part}.weight" for name in found for part in "ab"]


MIXED: dict[str, tuple[Callable[[], nn.Module], list[str], list[str]]] = {
    # by name: a model, what Muon takes, and the blocks
    "stages of different depth": (
        lambda: stages(1, 2, 1), names("layer0.0", "layer1.0", "layer1.1", "layer2.0"),
        ["layer0.0", "layer1.0", "layer1.1", "layer2.0"],
    ),
    "stages of one layer": (lambda: stages(1, 1), names("layer0.0", "layer1.0"), ["layer0.0", "layer1.0"]),
    "layers of the same class elsewhere": (
        lambda: node(stem=linear(3), first=Residual(), down=nn.Sequential(nn.ReLU(), Residual()), head=linear(D, 2)),
        names("first", "down.1"), ["first.a", "first.b", "down.1.a", "down.1.b"],
    ),
    "the same, where they repeat": (
        lambda: node(
            stem=linear(3), first=Residual(), down=nn.Sequential(Residual(), Residual()), head=linear(D, 2)
        ),
        names("first", "down.0", "down.1"), ["first.a", "first.b", "down.0.a", "down.0.b", "down.1.a", "down.1.b"],
    ),
    "one Sequential of plain layers in another": (
        lambda: nn.Sequential(nn.Flatten(), nn.Sequential(linear(3), nn.ReLU(), linear(), nn.ReLU(), linear(D, 2))),
        ["1.2.weight"], ["1.2"],
    ),
    "a stack without matrices": (
        lambda: node(norms=stack(lambda: node(norm=nn.LayerNorm(D))), a=linear(3), b=linear(), c=linear(D, 2)),
        ["b.weight"], ["b"],
    ),
    "a frozen stack and a head of several layers": (
        lambda: node(
            h=stack(lambda: node(a=linear().requires_grad_(False))),
            fc1=linear(D, 6), fc2=linear(6, 4), out=linear(4, 2),
        ),
        ["h.0.a.weight", "h.1.a.weight"], [None],
    ),
    "a stack beside layers that are attributes": (
        lambda: node(encoder=stack(Residual, 1), fc1=linear(), fc2=linear(), out=linear(D, 2)),
        names("encoder.0"), ["encoder.0"],
    ),
    "elements of single layers and groups": (
        lambda: nn.Sequential(*(nn.Sequential(linear(), Residual()) for _ in range(2)), linear(D, 2)),
        [f"{i}.{name}.weight" for i in range(2) for name in ("0", "1.a", "1.b")], ["0", "1"],
    ),
    "stages that begin otherwise": (
        lambda: nn.Sequential(*(nn.Sequential(node(down=linear()), Residual(), Residual()) for _ in range(2))),
        [f"{i}.{name}.weight" for i in range(2) for name in ("0.down", "1.a", "1.b", "2.a", "2.b")],
        [f"{i}.{j}" for i in range(2) for j in range(3)],
    ),
    "a layer of the same class as a list's": (
        lambda: node(first=nn.Sequential(Residual()), others=stack(Residual), head=nn.Sequential(linear(D, 2))),
        names("first.0", "others.0", "others.1"), ["first.0", "others.0", "others.1"],
    ),
    "as many outputs as inputs, and joined layers": (
        lambda: node(
            enter=linear(3, D), middle=linear(), joint=linear(3 + 2 * D, D), last=linear(D, D), leave=linear(D, 3)
        ),
        [f"{n}.weight" for n in ("middle", "joint", "last")], ["middle", "joint", "last"],
    ),
    "a list of bare layers": (
        lambda: node(layers=nn.ModuleList([linear(3), linear(), linear(), linear(D, 2)])),
        ["layers.1.weight", "layers.2.weight"], ["layers.1", "layers.2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_what_repeats_is_a_stack_and_what_has_no_stack_has_layers(name: str) -> None:
    make, taken, blocks = MIXED[name]
    found = [r for r in route_to_blocks(make()) if r.muon]
    assert [r.fqn for r in found] == taken
    assert list(dict.fromkeys(r.block for r in found)) == blocks
    assert [r.fqn for r in route_parameters(make()) if r.muon] == taken


def test_reasons_say_what_is_an_input_or_an_output_layer() -> None:
    found = {r.fqn: r.reason for r in route_parameters(build("actor and critic")) if r.param.ndim == 2}
    ends = {
        f"{part}.{i}.weight": f"{end} layer" for part in ("actor", "critic") for i, end in ((0, "input"), (4, "output"))
    }
    assert found == ends | {f"{part}.2.weight": "matrix of a hidden layer" for part in ("actor", "critic")}
    found = {r.fqn: r.reason for r in route_parameters(build("input and output layer only")) if r.param.ndim == 2}
    assert found == {"fc1.weight": "input layer of a model without hidden layers", "fc2.weight": "output layer"}
