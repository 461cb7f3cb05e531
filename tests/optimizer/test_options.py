"""Options of groups: refused where they cannot be meant, wherever they come from, and mixed precision."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy
import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.network import weights
from harness.oracle import reference_weights
from harness.toy import OPTIONS, build, train

import dmuon

NONSENSE = [
    (0, "lr", -5.0), (0, "lr", math.inf), (0, "lr", math.nan), (0, "lr", 10**400), (0, "lr", torch.tensor(-1.0)),
    (0, "lr", torch.tensor([1.0, 2.0])), (0, "lr", "fast"), (0, "lr", True), (1, "lr", math.inf), (1, "lr", -1e-9),
    (0, "weight_decay", math.inf), (2, "weight_decay", math.nan), (0, "eps", math.inf), (1, "eps", -1.0),
    (0, "momentum", 1.0), (0, "momentum", math.nan), (1, "betas", (0.9, math.nan)), (1, "betas", (0.9,)),
    (0, "ns_steps", 10**9), (0, "ns_steps", 21), (0, "ns_steps", 0), (0, "nesterov", 1), (1, "maximize", True),
    (1, "amsgrad", True), (0, "adjust_lr_fn", lambda shape: math.nan), (0, "weight_decay_mode", "wild"),
    (1, "weight_decay", -0.1),
]  # fmt: skip
IDS = [f"{name}={str(value)[:12]} of group {group}" for group, name, value in NONSENSE]


def of_route(group: int, name: str, value: Any) -> dict[str, Any]:
    """What the constructor calls the option."""
    return {name if group == 0 else f"adamw_{name}": value}


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize(("group", "name", "value"), NONSENSE, ids=IDS)
def test_nonsense_is_refused_when_loaded_added_or_edited_and_changes_nothing(group: int, name: str, value: Any) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    before, saved = weights(model), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][group][name] = value
    with pytest.raises(ValueError, match=rf"group {group} of the saved optimizer: .*{name.removeprefix('ns_')}"):
        optimizer.load_state_dict(saved)
    with pytest.raises((TypeError, ValueError), match=name.removeprefix("ns_")):
        new = nn.Parameter(torch.ones(4, 3))
        optimizer.add_param_group({"params": [new], "use_muon": group == 0, name: value})
    kept = dict(optimizer.param_groups[group])
    optimizer.param_groups[group][name] = value
    with pytest.raises(
        (TypeError, ValueError), match=rf"group {group} of the optimizer was edited: .*{name.removeprefix('ns_')}"
    ):
        optimizer.step()
    assert_equal_weights(weights(model), before, 0.0)
    optimizer.param_groups[group].pop(name)
    optimizer.param_groups[group].update(kept)
    train(model, optimizer, range(2, 5))
    assert_equal_weights(weights(model), reference_weights())


OF_THE_CONSTRUCTOR = [row for row in NONSENSE if row[0] < 2 and row[2] is not True]


@pytest.mark.parametrize(("group", "name", "value"), OF_THE_CONSTRUCTOR)
def test_nonsense_is_refused_by_the_constructor(group: int, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name.removeprefix("ns_")):
        dmuon.Muon(build(), **{"lr": 1e-3, **of_route(group, name, value)})


@pytest.mark.pitfall("P94")
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("mu", "momentum="), ("algorithm", "use_muon="), ("num_heads", "MatrixSpec"), ("flatten", "flattened=True"),
        ("cautious_wd", "weight_decay_mode="), ("beta1", "betas="), ("num_ns_steps", "ns_steps="), ("epsilon", "eps="),
    ],
)  # fmt: skip
def test_a_key_of_another_library_is_refused_however_it_comes(name: str, instead: str) -> None:
    """Keys that are the user's own stay."""
    says = rf"option {name!r} is one of another library and means nothing here; write .*{instead}"
    own = {"name": "hidden", "lr_scale": 0.5, "initial_lr": 0.1}
    group = {"params": [nn.Parameter(torch.ones(4, 3))], "use_muon": True, **own}
    with pytest.raises(ValueError, match=says):
        dmuon.Muon([{**group, name: 1}])
    optimizer = dmuon.Muon([group])
    with pytest.raises(ValueError, match=says):
        optimizer.add_param_group({**group, "params": [nn.Parameter(torch.ones(4, 3))], name: 1})
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = 1
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0][name] = 1
    with pytest.raises(ValueError, match=says):
        optimizer.step()
    del optimizer.param_groups[0][name]
    optimizer.step()
    assert own.items() <= optimizer.param_groups[0].items()


def test_an_option_that_went_missing_is_named() -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    del optimizer.param_groups[0]["ns_steps"]
    with pytest.raises(ValueError, match="group 0 of the optimizer was edited: option 'ns_steps' is missing"):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("lr", [numpy.float32(2e-3), numpy.float64(2e-3), torch.tensor(2e-3, dtype=torch.float64)])
def test_numbers_of_other_libraries_are_numbers(lr: Any) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **{**OPTIONS, "lr": lr})
    train(model, optimizer, range(3))
    expected = build()
    train(expected, dmuon.Muon(expected, **{**OPTIONS, "lr": float(lr)}), range(3))
    assert_equal_weights(weights(model), weights(expected), 1e-6)


# -- dtypes of Newton–Schulz ---------------------------------------------------------------------------------------


def test_a_dtype_is_saved_loaded_and_edited() -> None:
    optimizer = dmuon.Muon(build(), ns_dtype=torch.bfloat16, **OPTIONS)
    twin = dmuon.Muon(build(), **OPTIONS)
    twin.load_state_dict(optimizer.state_dict())
    assert [g["ns_dtype"] for g in twin.param_groups if g["use_muon"]] == [torch.bfloat16]
    spoiled = optimizer.state_dict()
    spoiled["param_groups"][0]["ns_dtype"] = torch.int32
    with pytest.raises(ValueError, match=r"group 0 of the saved optimizer: ns_dtype=torch.int32 is not supported"):
        twin.load_state_dict(spoiled)


def test_a_dtype_that_cannot_be_is_refused_when_a_group_is_edited() -> None:
    optimizer = dmuon.Muon(build(), **OPTIONS)
    optimizer.param_groups[0]["ns_dtype"] = "mixed"
    with pytest.raises(TypeError, match=r"group 0 of the optimizer was edited: ns_dtype must be a torch\.dtype"):
        optimizer.step()
