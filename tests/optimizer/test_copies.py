"""Copies of an optimizer: they go on as the original does, with its momentum and its options, and leave it alone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.network import full_state, loss_of, weights
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.topologies import lay
from harness.toy import OPTIONS, batch, build, train

import dmuon


def saved_and_loaded(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_model_and_optimizer_goes_on_as_the_original(how: str, overlap: bool) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS, overlap_backward=overlap)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["name"] = "matrices"
    model2, optimizer2 = COPIES[how]((model, optimizer))
    assert type(optimizer2) is dmuon.Muon and optimizer2.param_groups[0]["name"] == "matrices"
    assert optimizer2.param_groups[0]["params"][0] is model2.blocks[0].mix.weight
    kept = weights(model)
    train(model2, optimizer2, range(2, 5))
    assert_equal_weights(weights(model), kept, 0.0)
    assert_equal_weights(weights(model2), reference_weights())
    train(model, optimizer, range(2, 5))
    assert_equal_weights(weights(model), weights(model2), 0.0)
    assert optimizer2.last_step.ns_matrices == 9 and optimizer2.last_step.ns_batches == 3
    optimizer2.param_groups[1]["momentum"] = 0.5
    assert optimizer2.param_groups[1]["betas"] == (0.5, 0.95)


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_optimizer_alone_has_parameters_of_its_own(how: str) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    other = COPIES[how](optimizer)
    expected, copied = optimizer.state_dict(), other.state_dict()  # before its first step
    assert copied["param_groups"] == expected["param_groups"]
    for key, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(copied["state"][key][name], value)
            assert copied["state"][key][name].untyped_storage().nbytes() == value.numel() * value.element_size()
    loss_of(model, *batch(2)).backward()
    before = weights(model)
    pairs = [
        (p, q)
        for g, h in zip(optimizer.param_groups, other.param_groups, strict=True)
        for p, q in zip(g["params"], h["params"], strict=True)
    ]
    for param, twin in pairs:
        twin.grad = param.grad.clone()
    other.step()
    assert_equal_weights(weights(model), before, 0.0)
    optimizer.step()
    assert all(torch.equal(param, twin) for param, twin in pairs)
    twin = other.param_groups[0]["params"][3]
    twin.grad.fill_(float("nan"))
    other.step()
    assert other.last_step.nonfinite == ("blocks.1.mix.weight",), "names are copied"


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize(("layout", "config"), [("1d", False), ("ddp", False), ("fsdp2-2", False), ("fsdp2-2", True)])
@on_ranks("layout")
def test_copies_of_an_optimizer_that_communicates_are_refused_with_the_remedy(
    rank: int, world: int, layout: str, config: bool
) -> None:
    laid = lay(layout, build())
    optimizer = laid.optimizer() if config else dmuon.Muon(laid.model, **OPTIONS)
    for make in COPIES.values():
        with pytest.raises(RuntimeError, match=r"'blocks.*cannot be copied or pickled: save optimizer.state_dict\(\)"):
            make(optimizer)
    laid.train(optimizer, range(5))
    assert_equal_weights(full_state(laid.network), reference_weights())
