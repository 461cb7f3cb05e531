"""The optimizer itself: plain Muon + AdamW in one process, its options, schedulers, groups and counters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.network import is_matrix, loss_of, weights
from harness.oracle import Reference, reference_weights
from harness.toy import OPTIONS, batch, build, train

import dmuon
from dmuon.optimizer import wrapping


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.named_parameters())
    return [p for n, p in named if is_matrix(n)], [p for n, p in named if not is_matrix(n)]


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
    ("given", "frozen"),
    [
        ({"lr": 0.0, "adamw_lr": 1e-3}, "muon"),
        ({"lr": 1e-3, "adamw_lr": 0.0}, "adamw"),
        ({"lr": 0.0}, "both"),
    ],
)
def test_zero_lr_is_respected(given: dict[str, float], frozen: str) -> None:
    model = build()
    muon, rest = split(model)
    before = [[p.detach().clone() for p in some] for some in (muon, rest)]
    train(model, dmuon.Muon(model, **given), range(1))
    for some, old, route in zip((muon, rest), before, ("muon", "adamw"), strict=True):
        moved = [not torch.equal(p, o) for p, o in zip(some, old, strict=True)]
        assert (not any(moved)) if frozen in (route, "both") else all(moved), route


@pytest.mark.pitfall("P08")
@pytest.mark.parametrize(
    ("given", "decays"),
    [
        ({"weight_decay": 0.0}, (0.0, 0.0)),
        ({"weight_decay": 0.5}, (0.5, 0.5)),
        ({"weight_decay": 0.0, "adamw_weight_decay": 0.5}, (0.0, 0.5)),
        ({"weight_decay": 0.5, "adamw_weight_decay": 0.0}, (0.5, 0.0)),
    ],
)
def test_weight_decay_of_each_route_is_respected(given: dict[str, float], decays: tuple[float, float]) -> None:
    """With zero gradients decay is all that is left; vectors are never decayed."""
    model = build()
    optimizer = dmuon.Muon(model, lr=0.1, adamw_lr=0.2, **given)
    before = weights(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        decay = 0.1 * decays[0] if is_matrix(name) else 0.2 * decays[1] if param.ndim >= 2 else 0.0
        torch.testing.assert_close(param.detach(), before[name] * (1 - decay), rtol=1e-6, atol=0.0, msg=name)


CHANGES: dict[str, Any] = {
    "lr": 3e-3, "weight_decay": 0.4, "momentum": 0.5, "nesterov": False, "ns_coefficients": "you", "ns_steps": 2,
    "eps": 100.0, "ns_dtype": torch.bfloat16, "adjust_lr_fn": "spectral",
    "adamw_lr": 3e-3, "adamw_betas": (0.5, 0.6), "adamw_eps": 1e-2, "adamw_weight_decay": 0.4,
}  # fmt: skip


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize("option", CHANGES)
def test_each_option_changes_its_route_and_no_other(option: str) -> None:
    base: dict[str, Any] = {"adamw_lr": 1e-3, "adamw_weight_decay": 0.1}
    results = []
    for options in (base, {**base, option: CHANGES[option]}):
        model = build()
        optimizer = dmuon.Muon(model, **options)
        for step in range(3):  # the same gradients, whatever the weights are
            for index, param in enumerate(model.parameters()):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))
            optimizer.step()
        results.append(split(model))
    routes = [any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(*results, strict=True)]
    assert routes == [not option.startswith("adamw_"), option.startswith("adamw_")]


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


@pytest.mark.pitfall("P03")
def test_module_groups_follow_the_policy() -> None:
    model = build()
    groups = dmuon.param_groups(model)
    names = {p: n for n, p in model.named_parameters()}
    assert [g["use_muon"] for g in groups] == [True, False, False]
    assert {names[p] for p in groups[0]["params"]} == {n for n in names.values() if is_matrix(n)}
    assert {names[p] for p in groups[1]["params"]} == {"embed.weight", "head.weight"}
    assert all(p.ndim == 1 for p in groups[2]["params"]) and groups[2]["weight_decay"] == 0.0
    chosen = dmuon.param_groups(model, select=lambda fqn, module, param: fqn.endswith("mix.weight"))
    assert {names[p] for p in chosen[0]["params"]} == {f"blocks.{i}.mix.weight" for i in range(3)}


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize(
    ("params", "options", "error", "message"),
    [
        (build, {"ns_coefficients": "fancy"}, ValueError, "fancy"),
        (build, {"ns_steps": -1}, ValueError, "steps"),
        (build, {"ns_dtype": "mixed"}, TypeError, "ns_dtype must be a torch.dtype, such as torch.bfloat16, or None"),
        (build, {"ns_dtype": torch.int8}, TypeError, "ns_dtype=torch.int8 is not supported"),
        (build, {"ns_dtype": torch.bfloat16, "ns_coefficients": "squares"}, ValueError, "not safe in torch.bfloat16"),
        (build, {"adjust_lr_fn": "wide"}, ValueError, "wide"),
        (build, {"adamw_betas": (0.9, 1.0)}, ValueError, r"betas\[1\]"),
        (lambda: [{"params": matrices()}], {}, ValueError, "use_muon"),
        (lambda: [{"params": matrices(), "use_muon": 1}], {}, ValueError, "use_muon"),
        (lambda: [{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}], {}, ValueError, "1 dim"),
        (lambda: [{"params": [nn.Parameter(torch.ones(2, 3, 4, 5))], "use_muon": True}], {}, ValueError, "4 dim"),
        (lambda: [{"params": matrices(), "use_muon": True, "beta": 0.9}], {}, ValueError, "'beta'"),
        (lambda: [{"params": matrices(), "use_muon": True, "betas": (0.9, 0.9)}], {}, ValueError, "'betas'"),
        (lambda: [{"params": matrices(), "use_muon": False, "momentum": 0.9}], {}, ValueError, "'momentum'"),
        (lambda: [], {}, ValueError, "empty"),
        (lambda: set(matrices()), {}, TypeError, "set"),
        (lambda: matrices()[0], {}, TypeError, "one tensor"),
        (lambda: [*matrices(), {"params": matrices(), "use_muon": True}], {}, TypeError, "mixes"),
        (
            build,
            {"second_moment": "column"},
            ValueError,
            r"be 'row' \(NorMuon\), 'element' \(AdaMuon\) or None, got 'c",
        ),
        (build, {"second_moment": "row", "second_moment_beta": 1.0}, ValueError, r"_beta must be in \[0, 1\), got 1.0"),
        (
            build,
            {"weight_decay_mode": "hyperball", "adjust_lr_fn": "spectral"},
            ValueError,
            "adjust_lr_fn='spectral' with weight_decay_mode='hyperball', by",
        ),
        (build, {"momentum_dtype": torch.float16}, ValueError, r"momentum_dtype must be torch\.bfloat16 or None"),
        (build, {"momentum_device": "cuda"}, ValueError, r"momentum_device must be 'cpu' or None .*, got 'cuda'"),
        (build, {"orthogonalize": "svd"}, TypeError, "orthogonalize must be a function or None, got 'svd'"),
        (build, {"master_weights": "fp32"}, TypeError, "master_weights must be True, False or 'cpu', got 'fp32'"),
    ],
)
def test_unusable_options_and_parameters_are_refused(
    params: Callable[[], Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dmuon.Muon(params(), **options)


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
