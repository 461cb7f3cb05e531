"""Groups as torch's optimizers have them: names, keys of the user's, groups and matrices without anything in them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.heard import heard
from harness.network import is_matrix, weights
from harness.oracle import Reference, reference_weights
from harness.toy import OPTIONS, build, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import dmuon


def of_routes(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Named parameters: matrices of blocks, other matrices, vectors."""
    named = list(model.named_parameters())
    return [
        [(n, p) for n, p in named if is_matrix(n)],
        [(n, p) for n, p in named if not is_matrix(n) and p.ndim >= 2],
        [(n, p) for n, p in named if not is_matrix(n) and p.ndim < 2],
    ]


@pytest.mark.pitfall("P75")
def test_named_groups_keep_their_names_as_torchs_do() -> None:
    model, other = build(), build()
    matrices, tables, vectors = of_routes(model)
    groups = [
        {"params": matrices, "use_muon": True},
        {"params": iter(tables), "use_muon": False},
        {"params": vectors, "use_muon": False, "weight_decay": 0.0},
    ]
    optimizer = dmuon.Muon(groups, **OPTIONS)
    stock = torch.optim.AdamW([{"params": named} for named in of_routes(other)])
    saved = optimizer.state_dict()
    assert [g["param_names"] for g in saved["param_groups"]] == [
        g["param_names"] for g in stock.state_dict()["param_groups"]
    ]
    train(model, optimizer, range(5))
    assert_equal_weights(weights(model), reference_weights())
    nameless = dmuon.Muon(
        [{**g, "params": [p for _, p in named]} for g, named in zip(groups, of_routes(model), strict=True)]
    )
    nameless.load_state_dict(optimizer.state_dict())
    assert nameless.param_groups[0]["param_names"] == [n for n, _ in matrices], "those of the state dict"
    del saved["param_groups"][0]["param_names"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in matrices], "or its own"


@pytest.mark.pitfall("P75")
def test_named_parameters_are_routed_by_dimension_under_their_names() -> None:
    layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = dmuon.Muon(layers.named_parameters(), **OPTIONS)
    assert [g["param_names"] for g in optimizer.param_groups] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    for param in layers.parameters():
        param.grad = torch.full_like(param, float("nan") if param is layers[1].weight else 1.0)
    optimizer.step()
    assert optimizer.last_step.nonfinite == ("1.weight",)
    with pytest.raises(ValueError, match="others without"):
        dmuon.Muon([("a", layers[0].weight), layers[1].weight])
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(2, 2)))]})
    assert optimizer.param_groups[2]["param_names"] == ["late"] and optimizer.param_groups[2]["use_muon"]


@pytest.mark.pitfall("P75")
def test_keys_of_the_user_stay_in_groups_through_save_and_load() -> None:
    model = build()
    matrices, tables, vectors = ([p for _, p in named] for named in of_routes(model))
    optimizer = dmuon.Muon(
        [
            {"params": matrices, "use_muon": True, "name": "matrices", "lr_scale": 0.5, 7: [1, 2]},
            {"params": tables, "use_muon": False, "name": "tables", "foreach": None},
            {"params": vectors, "use_muon": False, "weight_decay": 0.0},
        ],
        **OPTIONS,
    )
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["name"] == "matrices" and saved["param_groups"][0][7] == [1, 2]
    other = dmuon.Muon(model)
    other.load_state_dict(saved)
    assert [g.get("name") for g in other.param_groups] == ["matrices", "tables", None]
    assert other.param_groups[0]["lr_scale"] == 0.5
    train(model, other, range(3, 5))
    assert_equal_weights(weights(model), reference_weights())


@pytest.mark.pitfall("P75")
def test_a_group_that_does_not_say_its_route_is_routed_by_dimension() -> None:
    model = build()
    matrices, tables, vectors = of_routes(model)
    optimizer = dmuon.Muon([{"params": [p for _, p in tables], "use_muon": False}], **OPTIONS)
    optimizer.add_param_group({"params": [p for _, p in vectors] + [p for _, p in matrices], "momentum_of_mine": 1})
    assert [(g["use_muon"], len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [
        (False, len(tables), 0.1), (True, len(matrices), 0.1), (False, len(vectors), 0.0)
    ]  # fmt: skip
    train(model, optimizer, range(5))
    assert_equal_weights(weights(model), reference_weights())
    for bad, message in (
        ({"params": [nn.Parameter(torch.ones(2, 3, 4))]}, "stack of matrices"),
        ({"params": [nn.Parameter(torch.ones(2, 2)), matrices[0][1]]}, "more than one parameter group"),
        ({"params": [nn.Parameter(torch.ones(2, 2)), vectors[0][1]]}, "more than one parameter group"),
        ({"params": [torch.ones(2, 2, requires_grad=True) * 2]}, "non-leaf"),
        ({"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": None}, "use_muon"),
        ({}, "lacks params"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == 3, "a refused group leaves nothing behind"
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([nn.Parameter(torch.ones(2, 2))])  # type: ignore[arg-type]


@pytest.mark.pitfall("P75")
def test_groups_without_parameters_stand_by_until_some_are_added() -> None:
    model, reference_model = build(), build()
    matrices, tables, vectors = ([p for _, p in named] for named in of_routes(model))
    optimizer = dmuon.Muon([{"params": [], "use_muon": True}, {"params": iter(()), "use_muon": False}], **OPTIONS)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.last_step.ns_matrices == 0
    for params, use_muon in ((matrices, True), (tables, False)):
        optimizer.add_param_group({"params": params, "use_muon": use_muon})
    optimizer.add_param_group({"params": vectors, "use_muon": False, "weight_decay": 0.0})
    optimizer.add_param_group({"params": []})
    reference = Reference(reference_model)
    train(model, optimizer, range(3))
    train(reference_model, reference, range(3))
    assert_equal_weights(weights(model), weights(reference_model))
    for nothing in ([], iter(()), (p for p in ())):
        with pytest.raises(ValueError, match="empty"):
            dmuon.Muon(nothing)


def test_a_flattened_state_goes_on_in_other_groups() -> None:
    """As ``docs/how-to/checkpoints.md`` says: it has options by names of parameters."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def built(model: nn.Module, order: int, lr: float) -> dmuon.Muon:
        matrices, tables, vectors = ([p for _, p in named] for named in of_routes(model))
        parts = [matrices] if order == 1 else [matrices[:2], matrices[2:]]
        groups = [{"params": part, "use_muon": True, "lr": lr} for part in parts]
        return dmuon.Muon([*groups, {"params": [*tables, *vectors], "use_muon": False, "lr": lr}][::order], **OPTIONS)

    model, again = build(), build(seed=1)
    optimizer, resumed = built(model, 1, 0.01), built(again, -1, 0.5)
    train(model, optimizer, range(2))
    weights_of, state = get_state_dict(model, optimizer, options=flat)
    saved = copy.deepcopy([weights_of, state])
    set_state_dict(again, resumed, model_state_dict=saved[0], optim_state_dict=saved[1], options=flat)
    for some, owner in ((model, optimizer), (again, resumed)):
        train(some, owner, range(2, 4))
    assert_equal_weights(weights(again), weights(model), 0.0)


@pytest.mark.parametrize("given", ["a model", "groups of it"])
def test_what_a_model_gets_after_its_optimizer_was_built_is_told_once(given: str) -> None:
    """Groups are the user's, who may have another optimizer for the rest."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = dmuon.Muon(model if given == "a model" else dmuon.param_groups(model))
    with heard() as told:
        for step in range(200):
            if step == 1:
                model.append(nn.Linear(4, 4))
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert len(told) == (given == "a model")
    assert all("the model got '3.weight', '3.bias' after the optimizer was built" in line for line in told)


@pytest.mark.pitfall("P75")
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_a_matrix_without_elements_disturbs_nobody(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    full, alone = (nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    empty, bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(0))
    groups: list[dict[str, Any]] = [{"params": [empty, full], "use_muon": True}, {"params": [bias], "use_muon": False}]
    optimizers = [dmuon.Muon(groups), dmuon.Muon([alone])]
    for _ in range(3):
        full.grad = torch.randn(4, 3, generator=generator)
        alone.grad = full.grad.clone()
        empty.grad, bias.grad = torch.zeros_like(empty), torch.zeros_like(bias)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(full, alone)
    assert optimizers[0].last_step.ns_matrices == 1 and optimizers[0].last_step.nonfinite == ()
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert optimizers[0].state[empty]["momentum_buffer"].shape == shape


def test_a_lazy_module_is_refused_by_name_until_it_has_shapes() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(6), nn.ReLU()) for _ in range(2)), nn.Linear(6, 6))
    for params in (model, list(model.parameters())):
        with pytest.raises(ValueError, match="lazy module has no shape yet; run one forward"):
            dmuon.Muon(params)
    with pytest.raises(ValueError, match=r"'0.0.weight' of a lazy module"):
        dmuon.param_groups(model)
    model(torch.ones(2, 5)).sum().backward()
    optimizer = dmuon.Muon(model)
    optimizer.step()
    assert optimizer.last_step.ns_matrices == 2
