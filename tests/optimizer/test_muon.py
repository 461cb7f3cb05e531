"""The optimizer itself: plain Muon + AdamW in one process, its options, schedulers, groups and counters."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.network import is_matrix, loss_of, weights
from harness.oracle import Reference, reference_weights
from harness.toy import OPTIONS, batch, build, train

import dmuon
from dmuon.optimizer import wrapping


def matrices(count: int = 2, shape: tuple[int, int] = (6, 4)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(shape, generator=generator)
    return params


# -- equal to torch ------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P01", "P03", "P56")
@pytest.mark.parametrize("nesterov", [True, False])
def test_five_steps_equal_torch(nesterov: bool) -> None:
    assert not torch.distributed.is_initialized()
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS, nesterov=nesterov)
    train(model, optimizer, range(5))
    assert_equal_weights(dict(model.state_dict()), reference_weights(nesterov=nesterov))
    assert optimizer.last_step.ns_matrices == 9
    assert optimizer.last_step.ns_batches == 3, "one per shape"
    assert set(optimizer.last_step.seconds) == {"momentum", "ns", "apply", "publish", "adamw"}


@pytest.mark.pitfall("P38", "P47")
def test_the_last_step_tells_how_it_ran_and_which_matrices_are_not_finite() -> None:
    params = [*matrices(2, (8, 8)), *matrices(1, (8, 40))]
    params[1].grad[3, 4] = float("nan")
    kept = [p.detach().clone() for p in params]
    optimizer = dmuon.Muon([{"params": params, "use_muon": True}], lr=0.01)
    optimizer.step()
    stats = optimizer.last_step
    assert stats.nonfinite == ("parameter 1 of group 0",)
    assert stats.variants == {(8, 8): "standard torch by1024", (8, 40): "standard torch by204"}
    assert params[1].isnan().all(), "NaN is not hidden"
    for index in (0, 2):
        assert params[index].isfinite().all() and not torch.equal(params[index], kept[index])
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].detach().zero_()
    optimizer.state[params[1]]["momentum_buffer"].zero_()
    optimizer.step()
    assert optimizer.last_step.nonfinite == ()


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P08")
@pytest.mark.parametrize(
    ("given", "shrinks"),  # by which part matrices of each route do
    [
        ({"weight_decay": 0.0}, (0.0, 0.0)),
        ({"weight_decay": 0.5}, (0.05, 0.1)),
        ({"weight_decay": 0.0, "adamw_weight_decay": 0.5}, (0.0, 0.1)),
        ({"weight_decay": 0.5, "adamw_weight_decay": 0.0}, (0.05, 0.0)),
        ({"weight_decay": 0.5, "lr": 0.0}, (0.0, 0.1)),
        ({"weight_decay": 0.5, "adamw_lr": 0.0}, (0.05, 0.0)),
        ({"weight_decay": 0.5, "lr": 0.0, "adamw_lr": None}, (0.0, 0.0)),
    ],
)
def test_lr_and_weight_decay_of_each_route_are_respected(given: dict[str, Any], shrinks: tuple[float, float]) -> None:
    """Zeros too. With zero gradients decay is all that is left; vectors are never decayed."""
    model = build()
    optimizer = dmuon.Muon(model, **{"lr": 0.1, "adamw_lr": 0.2, **given})
    before = weights(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        part = shrinks[0] if is_matrix(name) else shrinks[1] if param.ndim >= 2 else 0.0
        torch.testing.assert_close(param.detach(), before[name] * (1 - part), rtol=1e-6, atol=0.0, msg=name)


@pytest.mark.pitfall("P10")
def test_options_of_a_group_are_its_own() -> None:
    first, second = matrices(2)
    second.data.copy_(first)
    second.grad = first.grad.clone()  # type: ignore[union-attr]
    before = first.detach().clone()
    groups = [
        {"params": [first], "use_muon": True},
        {"params": [second], "use_muon": True, "lr": 5e-3, "weight_decay": 0.0, "ns_steps": 3},
    ]
    optimizer = dmuon.Muon(groups, lr=1e-3, weight_decay=0.2)
    optimizer.step()
    alone = matrices(2)[:1]
    dmuon.Muon(alone, lr=5e-3, weight_decay=0.0, ns_steps=3).step()
    assert torch.equal(second, alone[0]) and not torch.equal(first, second)
    assert optimizer.last_step.ns_batches == 2
    assert not torch.equal(first, before)


# -- routing and groups --------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P03")
def test_bare_tensors_are_routed_by_dimensions_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with caplog.at_level(logging.INFO, logger="dmuon"):
        optimizer = dmuon.Muon(model.parameters(), **OPTIONS)
        train(model, optimizer, range(2))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2 and "14 tensors of fewer than two dimensions go to AdamW" in said[0]
    assert "'embed.weight' is an embedding" in said[1]
    routes = [(g["use_muon"], sorted({p.ndim for p in g["params"]})) for g in optimizer.param_groups]
    assert routes == [(True, [2]), (False, [1])]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    caplog.clear()
    dmuon.Muon(matrices())
    assert not caplog.records, "nothing to say about matrices only"


WIDER = ("master_weights", "bf16_stochastic_round")  # what weights in half precision may have
BY_NAME = ("select", "exclude")
SPHERE = {"weight_decay_mode": "hyperball"}
FITS_NONE = r"fits no .*, such as '\w+"


def half() -> nn.Module:
    return build().bfloat16()


def named() -> list[tuple[str, nn.Parameter]]:
    return [*build().named_parameters()]


def groups() -> list[dict[str, Any]]:
    return dmuon.param_groups(build())


def expanded(use_muon: bool) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.zeros(1, 8).expand(8, 8))], "use_muon": bool(use_muon)}]


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize(
    ("params", "options", "error", "message"),
    [
        (build, {"ns_dtype": torch.bfloat16, "ns_coefficients": "squares"}, ValueError, "not safe in torch.bfloat16"),
        (lambda: [{"params": matrices()}], {}, ValueError, "use_muon"),
        (lambda: [{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}], {}, ValueError, "1 dim"),
        (lambda: [*matrices(), {"params": matrices(), "use_muon": True}], {}, TypeError, "mixes"),
        (build, {"weight_decay_mode": "hyperball", "adjust_lr_fn": "spectral"}, ValueError, "='spectral' with weight"),
        (build, {"momentum_dtype": torch.float16}, ValueError, r"momentum_dtype must be torch\.bfloat16 or None"),
        *((build, {name: True}, ValueError, r"=True, and no parameter is .*'blocks.0.* out$") for name in WIDER),
        (half, {WIDER[1]: True, **SPHERE}, ValueError, r"would let their norm grow\. Keep .* master_weights=True"),
        (half, dict.fromkeys(WIDER, True), ValueError, "for weights without masters: leave it or master_weights out"),
        (half, SPHERE, ValueError, r"torch\.bfloat16: rounding would let their norm grow\. Keep"),
        *((matrices, {name: list}, ValueError, rf"{name} needs the model: call Muon\(model") for name in BY_NAME),
        *((lambda use=use: expanded(use), {}, ValueError, r"shape \(8, 8\) is expanded.*clone\(\)") for use in (0, 1)),
        (build, {"lr_multipliers": {"blocks.*": 2.0, "blocks.0.*": 3.0}}, ValueError, "'blocks.0.[*]' is the first to"),
        (groups, {"lr_multipliers": {"*": 2.0}}, ValueError, "write lr_multiplier=… into your groups"),
        (lambda: [*build().parameters()], {"lr_multipliers": {"*.up.*": 2.0}}, ValueError, "fit no parameter's name"),
        *((matrices, {"strategy": f"sharded:{n}"}, ValueError, "use .*'sharded:2'") for n in (1, -2, "two")),
        (build, {"strategy": {"*.up.*": "owner", "block.0.*": "owner"}}, ValueError, rf"'block\.0\.[*]' {FITS_NONE}"),
        (named, {"strategy": {"*.upp.*": "owner"}}, ValueError, rf"'[*]\.upp\.[*]' {FITS_NONE}"),
        (groups, {"strategy": {"*.up.*": "owner"}}, ValueError, rf"'[*]\.up\.[*]' {FITS_NONE}"),
    ],
)
def test_unusable_options_and_parameters_are_refused(
    params: Callable[[], Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dmuon.Muon(params(), **options)


NONSENSE = [
    (0, "lr", math.nan), (0, "lr", torch.tensor([1.0, 2.0])), (0, "lr", True), (1, "lr", math.inf),
    (2, "weight_decay", math.nan), (0, "momentum", 1.0), (1, "betas", (0.9,)), (1, "amsgrad", True),
    (0, "adjust_lr_fn", lambda shape: math.nan), (0, "weight_decay_mode", "wild"), (0, "ns_steps", 21),
]  # fmt: skip
IDS = [f"{name}={str(value)[:12]} of group {group}" for group, name, value in NONSENSE]


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize(("group", "name", "value"), NONSENSE, ids=IDS)
def test_nonsense_is_refused_however_it_comes_and_changes_nothing(group: int, name: str, value: Any) -> None:
    if group < 2 and value is not True:  # which the constructor has
        with pytest.raises((TypeError, ValueError), match=name.removeprefix("ns_")):
            dmuon.Muon(build(), **{"lr": 1e-3, name if group == 0 else f"adamw_{name}": value})
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
    with pytest.raises((TypeError, ValueError), match=rf"group {group} .* was edited: .*{name.removeprefix('ns_')}"):
        optimizer.step()
    assert_equal_weights(weights(model), before, 0.0)
    optimizer.param_groups[group].pop(name)
    optimizer.param_groups[group].update(kept)
    train(model, optimizer, range(2, 5))
    assert_equal_weights(weights(model), reference_weights())


@pytest.mark.pitfall("P94")
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("mu", "momentum="), ("num_heads", "MatrixSpec"), ("beta1", "betas="),
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


@pytest.mark.parametrize("lr", [numpy.float32(2e-3), numpy.float64(2e-3), torch.tensor(2e-3, dtype=torch.float64)])
def test_numbers_of_other_libraries_are_numbers(lr: Any) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **{**OPTIONS, "lr": lr})
    train(model, optimizer, range(3))
    expected = build()
    train(expected, dmuon.Muon(expected, **{**OPTIONS, "lr": float(lr)}), range(3))
    assert_equal_weights(weights(model), weights(expected), 1e-6)


# -- gradients, closures, counters ---------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Any:
    """Two equal models, one with our optimizer and one with torch's."""
    ours, theirs = build(), build()
    return (ours, dmuon.Muon(ours, **OPTIONS)), (theirs, Reference(theirs))


@pytest.mark.pitfall("P19")
def test_parameters_without_gradients_are_skipped_as_in_torch(pair: Any) -> None:
    """Also in the middle of a batch of one shape, and with another set missing at every step."""
    (ours, optimizer), (theirs, _) = pair
    for step in range(6):
        for model, either in pair:
            model.zero_grad()
            loss_of(model, *batch(step)).backward()
            counted = 0
            for index, (name, param) in enumerate(model.named_parameters()):
                if index % 4 == step % 4:
                    param.grad = None
                counted += param.grad is not None and is_matrix(name)
            either.step()
        assert optimizer.last_step.ns_matrices == counted < 9
    assert_equal_weights(dict(ours.state_dict()), dict(theirs.state_dict()))
    ours.zero_grad()
    before = copy.deepcopy(ours.state_dict())
    optimizer.step()
    assert optimizer.last_step.ns_matrices == optimizer.last_step.ns_batches == 0
    assert all(torch.equal(t, before[n]) for n, t in ours.state_dict().items())


@pytest.mark.pitfall("P55")
def test_closure_is_called_once_with_gradients_enabled() -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    losses = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, *batch(len(losses)))
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    with torch.no_grad():
        returned = [optimizer.step(closure) for _ in range(5)]
    assert returned == losses and len(losses) == 5
    assert_equal_weights(dict(model.state_dict()), reference_weights(5))
    assert optimizer.step() is None


def test_a_step_inside_autocast_is_the_same_step() -> None:
    found = []
    for enabled in (False, True):
        model = build()
        optimizer = dmuon.Muon(model, **OPTIONS)
        loss_of(model, *batch(0)).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step()
        found.append(weights(model))
    assert_equal_weights(found[1], found[0], 0.0)


def test_a_step_in_a_graph_of_the_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    loss_of(model, *batch(0)).backward()
    before = weights(model)
    monkeypatch.setattr(wrapping, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"while a CUDA graph is being captured.*call step\(\) outside"):
        optimizer.step()
    assert_equal_weights(weights(model), before, 0.0)
