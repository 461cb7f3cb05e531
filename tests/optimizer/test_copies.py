"""Copies of an optimizer are refused, with what to do instead, and leave it as it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.network import full_state, weights
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.topologies import lay
from harness.toy import OPTIONS, build, train

import dmuon

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda thing: torch.save(thing, io.BytesIO()),
}
REMEDY = r"an optimizer, which .*, cannot be copied or pickled: save optimizer.state_dict\(\), and load it into"


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_refused_with_the_remedy(how: str) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    for thing in (optimizer, {"optimizer": optimizer})[: 1 + (how != "copy")]:
        with pytest.raises(RuntimeError, match=REMEDY):
            COPIES[how](thing)
    other = build()
    twin = dmuon.Muon(other, **OPTIONS)
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(optimizer.state_dict())
    train(other, twin, range(2, 5))
    train(model, optimizer, range(2, 5))
    assert_equal_weights(weights(model), reference_weights())
    assert_equal_weights(weights(model), weights(other), 0.0)


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize("layout", ["1d", "ddp", "fsdp2-2"])
@on_ranks("layout")
def test_copies_of_an_optimizer_that_communicates_are_refused(rank: int, world: int, layout: str) -> None:
    laid = lay(layout, build())
    optimizer = dmuon.Muon(laid.model, **OPTIONS)
    for make in COPIES.values():
        with pytest.raises(RuntimeError, match=REMEDY):
            make(optimizer)
    laid.train(optimizer, range(5))
    assert_equal_weights(full_state(laid.network), reference_weights())
