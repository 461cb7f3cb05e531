"""Gradients of what nobody shards are averaged: however they come, and whatever the model holds by now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.dedicated_toy import dedicate, dedicated
from harness.inside import buckets_of
from harness.network import Network, full_state, is_matrix, loss_of, shard
from harness.on_ranks import assert_same_over_ranks, on_ranks
from harness.oracle import Reference
from harness.toy import OPTIONS, SIZE, batch, build, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dmuon

STEPS = 5
UNTIL = 3  # steps in which every rank has all gradients, once each


class Changing(Network):
    """From step ``UNTIL`` on the last norm is used in a checkpointed segment too, or the rest stays unused."""

    def __init__(self, change: str) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(SIZE)
        self.change = change
        self.step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        changed = self.step >= UNTIL
        here = changed and self.change == "elsewhere on one rank" and dist.is_initialized() and dist.get_rank() > 0
        x = self.embed(tokens)
        if here:
            x = self.norm(x)
        first, *others = self.blocks
        if changed and self.change == "checkpointed":
            x = checkpoint(lambda y: self.norm(first(y)), x, use_reentrant=True)
        else:
            x = first(x)
        for block in others:
            x = block(x)
        if here or (changed and self.change == "unused"):
            return self.head(x)
        return self.head(self.norm(x))


def train_changing(model: Changing, optimizer: Any, rank: int = 0, world: int = 1) -> None:
    for step in range(STEPS):
        model.step = step
        train(model, optimizer, [step], rank, world)


@on_ranks(2)
@pytest.mark.parametrize("change", ["unused", "checkpointed"])
def test_averages_are_right_when_gradients_begin_to_come_otherwise(rank: int, world: int, change: str) -> None:
    alone = Changing(change)
    train_changing(alone, Reference(alone))
    with buckets_of(64):
        model = dedicate(Changing(change))
        train_changing(model, dmuon.Muon(model, **OPTIONS), rank, world)
    assert_equal_weights(full_state(model), full_state(alone))


@on_ranks(2)
def test_ranks_may_use_parameters_in_different_places(rank: int, world: int) -> None:
    with buckets_of(64):
        model = dedicate(Changing("elsewhere on one rank"), comm=dmuon.CommOptions(asynchronous=False))
        for step in range(UNTIL + 2):
            model.step = step
            model.zero_grad()
            loss_of(model, *shard(batch(step), rank, world)).backward()
            others = [(name, param.grad) for name, param in model.named_parameters() if not is_matrix(name)]
            assert all(grad is not None for _, grad in others), "some rank has used it"
            assert_same_over_ranks({name: grad for name, grad in others if grad is not None})


# -- parameters that come, go, freeze and thaw -------------------------------------------------------------------------


def seeded(make: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def new_head(model: Network, seed: int = 5) -> None:
    model.head = seeded(lambda: nn.Linear(SIZE.width, SIZE.vocabulary, bias=False), seed)  # type: ignore[assignment]


def adapter(model: Network) -> None:
    model.head = nn.Sequential(model.head, seeded(lambda: nn.Linear(SIZE.vocabulary, 3)))  # type: ignore[assignment]
    model.head.append(seeded(lambda: nn.Linear(3, SIZE.vocabulary)))


def new_norm_in_a_block(model: Network) -> None:
    model.blocks[1].norm = nn.LayerNorm(SIZE.width)


def thaw(model: Network) -> None:
    model.head.requires_grad_(not model.head.weight.requires_grad)


def no_norm(model: Network) -> None:
    model.norm = nn.Identity()  # type: ignore[assignment]


def nothing(model: Network) -> None:
    pass


CHANGES: list[
    tuple[Callable[[Network], None], Callable[[Network], None]]
] = [  # at the beginning, and between backwards
    (nothing, adapter),
    (new_head, new_norm_in_a_block),
    (thaw, thaw),
    (nothing, no_norm),
]


@pytest.mark.pitfall("P86")
@pytest.mark.parametrize(("first", "then"), CHANGES, ids=lambda change: change.__name__)
@on_ranks(2)
def test_whatever_a_model_trains_is_averaged(
    rank: int, world: int, first: Callable[[Network], None], then: Callable[[Network], None]
) -> None:
    alone, model = build(), build()
    for one in (alone, model):
        first(one)
    dedicate(model)
    for backward in range(4):
        if backward in (1, 3):
            for one in (alone, model):
                then(one)
        alone.zero_grad()
        model.zero_grad()
        loss_of(alone, *batch(backward)).backward()
        with torch.no_grad():
            model(batch(backward)[0])
        loss_of(model, *shard(batch(backward), rank, world)).backward()
        expected = {name: param.grad for name, param in alone.named_parameters() if not is_matrix(name)}
        found = {name: param.grad for name, param in model.named_parameters() if not is_matrix(name)}
        assert expected.keys() == found.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_what_freezes_while_its_gradient_waits_is_averaged(rank: int, world: int) -> None:
    alone, model = build(), build()
    dedicate(model)
    with dmuon.no_sync(model):
        loss_of(alone, *batch(0)).backward()
        loss_of(model, *shard(batch(0), rank, world)).backward()
    for one in (alone, model):
        one.head.requires_grad_(False)
    loss_of(alone, *batch(1)).backward()
    loss_of(model, *shard(batch(1), rank, world)).backward()
    torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad)


@pytest.mark.pitfall("P86")
@on_ranks(2)
def test_what_thaws_is_averaged_though_nobody_calls_the_model_itself(rank: int, world: int) -> None:
    """As of a model with several encoders, of which programs call methods."""
    model = build()
    model.head.requires_grad_(False)
    dedicate(model)
    for backward in range(3):
        model.zero_grad()
        loss_of(model.forward, *shard(batch(backward), rank, world)).backward()  # type: ignore[arg-type]
        model.head.requires_grad_(True)
    alone = build()
    loss_of(alone, *batch(2)).backward()
    torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad)


@pytest.mark.pitfall("P97")
@on_ranks(2)
def test_gradients_that_fsdp2_is_told_to_sum_are_refused(rank: int, world: int) -> None:
    model = dedicated()
    dmuon.fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"set_gradient_divide_factor\(1\.0\) of FSDP2"):
        model(batch(0)[0])
    model.set_gradient_divide_factor(float(world))  # type: ignore[operator]
    loss_of(model, *shard(batch(0), rank, world)).backward()


@pytest.mark.pitfall("P86")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((nothing, adapter), r"requires_grad of 'head\.0\.weight'=True"),
        ((new_head, partial(new_head, seed=7)), r"parameter 'head\.weight' has other values on other ranks"),
    ],
)
@on_ranks(2)
def test_ranks_whose_models_change_otherwise_all_raise(
    rank: int, world: int, changes: Sequence[Callable[[Network], None]], message: str
) -> None:
    model = dedicated()
    loss_of(model, *shard(batch(0), rank, world)).backward()
    changes[rank](model)
    with pytest.raises((dmuon.CollectiveError, ValueError), match=message):
        loss_of(model, *shard(batch(0), rank, world)).backward()
