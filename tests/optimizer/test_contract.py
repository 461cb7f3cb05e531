"""What users of ``torch.optim.Optimizer`` rely on: hooks, steps inside backward, states, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.checkpoints import start
from harness.network import Network, full_state, loss_of, weights
from harness.on_ranks import on_ranks
from harness.oracle import Reference, reference_weights
from harness.topologies import lay
from harness.toy import OPTIONS, VOCAB, WIDTH, batch, build, train
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dmuon

# -- hooks ---------------------------------------------------------------------------------------------------------


def test_hooks_run_around_steps_and_state_dicts_and_end_when_removed() -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    log: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: log.append("before any")),
        register_optimizer_step_post_hook(lambda *_: log.append("after any")),
        optimizer.register_step_pre_hook(lambda *_: log.append("before")),
        optimizer.register_step_post_hook(lambda *_: log.append("after")),
        optimizer.register_state_dict_pre_hook(lambda _: log.append("save")),
        optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "mine": len(saved["state"])}),
        optimizer.register_load_state_dict_pre_hook(lambda _, saved: log.append(f"load {saved.pop('mine')}")),
        optimizer.register_load_state_dict_post_hook(lambda loaded: log.append(f"loaded {len(loaded.state)}")),
    ]
    train(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    around = ["before any", "before", "after", "after any"]
    assert log == [*around, *around, "save", "load 25", "loaded 25"]
    for handle in handles:
        handle.remove()
    train(model, optimizer, range(2, 5))
    assert len(log) == 11
    assert_equal_weights(weights(model), reference_weights())


def test_a_hook_may_adapt_what_is_loaded_momentum_included() -> None:
    """As torch's documentation has it for parameters that come under other names, in another order."""
    model, again = build(), build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    count = len(saved["state"])
    reverse = {key: count - 1 - key for key in range(count)}
    strange = {
        "param_groups": [
            {**g, "params": [reverse[key] for key in g["params"]], "lr": -1.0} for g in saved["param_groups"]
        ],
        "state": {key: saved["state"][reverse[key]] for key in range(count)} | {reverse[0]: saved["state"][1]},
    }
    other = dmuon.Muon(again, **OPTIONS)
    other.register_load_state_dict_pre_hook(lambda _, given: saved if given is not saved else None)
    other.load_state_dict(strange)
    again.load_state_dict(model.state_dict())
    train(again, other, range(2, 5))
    assert_equal_weights(weights(again), reference_weights())


# -- a step inside backward -------------------------------------------------------------------------------------------


def one_optimizer_each(model: nn.Module, config: dmuon.DistributedConfig | None = None) -> None:
    """Each parameter takes its step as soon as its gradient is there."""
    for group in dmuon.param_groups(model):
        for param in group["params"]:
            optimizer = dmuon.Muon([{**group, "params": [param]}], **OPTIONS, distributed_config=config)

            def hook(param: torch.Tensor, optimizer: dmuon.Muon = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(hook)


@pytest.mark.pitfall("P75")
def test_one_optimizer_for_each_parameter_steps_inside_backward() -> None:
    model = build(layers=2)
    one_optimizer_each(model)
    for step in range(3):
        loss_of(model, *batch(step)).backward()
        assert all(param.grad is None for param in model.parameters())
    assert_equal_weights(weights(model), reference_weights(3, layers=2))


@pytest.mark.slow
@pytest.mark.pitfall("P75")
@on_ranks(2)
def test_one_optimizer_for_each_sharded_parameter_steps_inside_backward(rank: int, world: int) -> None:
    laid = lay("fsdp2-2", build(layers=2))
    one_optimizer_each(laid.model, laid.config)
    for step in range(3):
        laid.backward(step)
    assert_equal_weights(full_state(laid.network), reference_weights(3, layers=2))


@pytest.mark.parametrize(
    ("layout", "hook", "message"),
    [
        ("ddp", "loss", r"step\(\) was called inside backward, in which DistributedDataParallel has not averaged"),
        ("1d", "loss", r"step\(\)"),
        ("1d-two-lines", "gradient", "called inside backward, in which dmuon has not averaged"),
    ],
)
@on_ranks("layout")
def test_a_step_inside_backward_is_refused_where_it_comes_too_early(
    rank: int, world: int, layout: str, hook: str, message: str
) -> None:
    laid = lay(layout, build())
    optimizer, loss = laid.optimizer(), laid.loss(0)
    if hook == "loss":
        loss.register_hook(lambda _: optimizer.step())
    else:
        laid.network.norm.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P23", "P32")
def test_loaded_state_takes_the_dtype_of_its_parameter_and_options_come_from_the_dict() -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        twin = build().to(dtype)
        other = dmuon.Muon(twin, lr=1.0, weight_decay=0.0, ns_steps=2)
        other.load_state_dict(saved)
        assert [g["lr"] for g in other.param_groups] == [OPTIONS["lr"]] * 3 and other.param_groups[0]["ns_steps"] == 5
        for (key, values), param in zip(
            saved["state"].items(), (p for g in other.param_groups for p in g["params"]), strict=True
        ):
            loaded = other.state[param]
            assert set(loaded) == set(values), key
            for name, value in values.items():
                of_name = {"momentum_buffer": wide, "step": torch.float32}.get(name, dtype)
                assert torch.equal(loaded[name], value.to(of_name)) and loaded[name].dtype == of_name
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # momentum is fp32 in whatever it was saved
        given = copy.deepcopy(saved)
        given["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].to(dtype)
        optimizer.load_state_dict(given)
        held = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
        assert held.dtype == torch.float32 and torch.equal(held, given["state"][0]["momentum_buffer"].float())
        train(model, optimizer, [3])


def with_state(key: int, state: Any) -> Any:
    """A damage: another state of the parameter ``key``; a number takes that of another parameter."""
    return lambda saved: {
        **saved,
        "state": saved["state"] | {key: saved["state"][state] if type(state) is int else state},
    }


HALF, WHOLE = {"step": torch.tensor(1.0)}, {name: torch.zeros(17, 13) for name in ("exp_avg", "exp_avg_sq")}
DAMAGE: dict[str, Any] = {
    "nothing": lambda saved: None,
    "fewer groups": lambda saved: {**saved, "param_groups": saved["param_groups"][:2]},
    "momentum of another shape": with_state(0, 2),
    "half a state": with_state(9, HALF),
    "moments of another shape": with_state(9, 12),
    "AdamW's state of a matrix": with_state(0, {**HALF, **{name: torch.zeros(13, 13) for name in WHOLE}}),
    "momentum of AdamW's": with_state(9, {"momentum_buffer": torch.zeros(17, 13)}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_dict_is_refused_and_changes_nothing(damage: str) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    with pytest.raises(ValueError, match=r"save|state|momentum"):
        optimizer.load_state_dict(DAMAGE[damage](copy.deepcopy(optimizer.state_dict())))
    train(model, optimizer, range(2, 5))
    assert_equal_weights(weights(model), reference_weights())


def test_states_of_torchs_own_optimizers_load_as_they_are() -> None:
    model, twin = build(), build()
    reference = Reference(twin)
    train(twin, reference, range(3))
    parts = [reference.muon, reference.adamw]
    counted = [0]
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for part in parts:
        saved = copy.deepcopy(part.state_dict())
        for group in saved["param_groups"]:
            merged["param_groups"].append({**group, "params": [key + counted[0] for key in group["params"]]})
        merged["state"] |= {key + counted[0]: values for key, values in saved["state"].items()}
        counted[0] += len(saved["state"])
    model.load_state_dict(twin.state_dict())
    optimizer = dmuon.Muon(model, **OPTIONS)
    optimizer.load_state_dict(merged)
    train(model, optimizer, range(3, 5))
    train(twin, reference, range(3, 5))
    assert optimizer.param_groups[1]["amsgrad"] is False, "keys of torch's are kept"
    assert optimizer.param_groups[0]["ns_coefficients"] == (3.4445, -4.7750, 2.0315), "and its options are used"
    assert_equal_weights(weights(model), weights(twin))


# -- copies -----------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda thing: torch.save(thing, io.BytesIO()),
}
REMEDY = r"an optimizer, which .*, cannot be copied or pickled: save optimizer.state_dict\(\), and load it into"


@pytest.mark.pitfall("P74")
@on_ranks(2)
def test_a_copy_is_refused_with_the_remedy(rank: int, world: int) -> None:
    run = start("1d")
    run.train(range(2))
    for name, make in COPIES.items():
        for thing in (run.optimizer, {"optimizer": run.optimizer})[: 1 + (name != "copy")]:
            with pytest.raises(RuntimeError, match=REMEDY):
                make(thing)
    run.train(range(2, 5))
    assert_equal_weights(full_state(run.inner), reference_weights())


# -- sparse gradients: where no module announces them, see tests/parity ------------------------------------------------


@pytest.mark.pitfall("P54")
@on_ranks(2)
def test_an_embedding_with_sparse_gradients_is_refused_on_every_rank(rank: int, world: int) -> None:
    """By every way to build an optimizer; not where it is frozen."""
    mesh = init_device_mesh("cpu", (world,))
    uses: list[Callable[[nn.Module], Any]] = [
        lambda m: dmuon.dedicate_params(m, mesh, costs="flops"),
        dmuon.Muon,
        lambda m: dmuon.Muon(nn.parallel.DistributedDataParallel(m)),
    ]

    def with_table(table: nn.Module) -> Network:
        model = build()
        model.embed = table  # type: ignore[assignment]
        return model

    for use in uses:
        with pytest.raises(ValueError, match=r"'embed\.weight'.*sparse=False"):
            use(with_table(nn.Embedding(VOCAB, WIDTH, sparse=True)))
    frozen = with_table(nn.Embedding(VOCAB, WIDTH, sparse=True).requires_grad_(False))
    train(frozen, dmuon.Muon(frozen, **OPTIONS), range(2))
