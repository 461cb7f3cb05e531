"""An optimizer beside DDP that was not given the wrapper, and what is told when a model is wrapped late."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.heard import heard
from harness.network import Network, full_state, is_matrix
from harness.on_ranks import on_ranks, over_ranks
from harness.oracle import reference_weights
from harness.toy import OPTIONS, build, train
from torch.nn.parallel import DistributedDataParallel

import dmuon

STEPS = 3
Built = tuple[nn.Module, dmuon.Muon]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if is_matrix(n)], "use_muon": True},
        {"params": [p for n, p in named if not is_matrix(n) and p.ndim >= 2], "use_muon": False},
        {"params": [p for n, p in named if p.ndim < 2], "use_muon": False, "weight_decay": 0.0},
    ]


def optimizer_then_ddp(model: Network) -> Built:
    optimizer = dmuon.Muon(model, **OPTIONS)
    return DistributedDataParallel(model), optimizer


def ddp_then_inner(model: Network) -> Built:
    wrapped = DistributedDataParallel(model)
    return wrapped, dmuon.Muon(model, **OPTIONS)


def ddp_then_groups(model: Network) -> Built:
    wrapped = DistributedDataParallel(model)
    return wrapped, dmuon.Muon(groups(wrapped.module), **OPTIONS)


ORDERS: list[Callable[[Network], Built]] = [
    optimizer_then_ddp,
    ddp_then_inner,
    ddp_then_groups,
]


@pytest.mark.pitfall("P76")
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@on_ranks(2)
def test_each_matrix_has_one_owner_in_any_order(rank: int, world: int, order: Callable[[Network], Built]) -> None:
    model = build()
    program, optimizer = order(model)
    calls = 0
    for step in range(STEPS):
        train(program, optimizer, [step], rank, world)
        calls += optimizer.last_step.ns_matrices
    assert_equal_weights(full_state(model), reference_weights(STEPS))
    assert over_ranks(calls) == 9 * STEPS, "no rank repeats what another one does"
    assert len(optimizer.exchanged()) == 9
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()} == {id(p) for p in optimizer.state}


@on_ranks(2)
def test_what_was_found_is_logged_once(rank: int, world: int) -> None:
    with heard(logging.INFO) as records:
        program, optimizer = optimizer_then_ddp(build())
        train(program, optimizer, range(2), rank, world)
    told = [text for text in records if "DistributedDataParallel" in text]
    assert told == (
        []
        if rank
        else [
            "rank 0: Muon: since it was built, 9 of its matrices were wrapped in DistributedDataParallel; from now on "
            "each matrix that several ranks hold has one owner"
        ]
    )
