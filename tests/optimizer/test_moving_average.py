"""The moving average of docs/guide.md on every residency: what is averaged, evaluated and trained on afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_close, assert_equal_weights
from harness.network import Network, full_state, loss_of
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.topologies import lay
from harness.toy import batch, build
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS, DECAY, HIDDEN = 4, 0.8, 28
LAYOUTS = [
    ("1d", 2, False),
    ("1d", 2, True),
    ("1d-two-lines", 2, True),
    ("ddp-2", 2, False),
    ("hsdp", 4, True),
    ("tp-two-lines", 4, False),
    ("fsdp2-2", 2, False),
    ("ddp", 2, False),
]  # name, ranks, whether whole weights stay after forward


@contextmanager
def averaged(model: nn.Module, average: dict[str, Tensor]) -> Iterator[None]:
    """As in docs/guide.md."""
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(average[name])
    yield
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(own[name])


def reference() -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[Tensor]]:
    """By torch's ``AveragedModel`` in one process: weights at the end, averages and their losses after every step."""
    model = build(hidden=HIDDEN)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # the first time it copies
    optimizer = Reference(model)
    averages, losses = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        average.update_parameters(model)
        averages.append({name: p.detach().clone() for name, p in average.module.named_parameters()})
        network = average.module
        assert isinstance(network, Network)
        with torch.no_grad():
            losses.append(loss_of(network, *batch(9)))
    return {n: p.detach() for n, p in model.named_parameters()}, averages, losses


@pytest.mark.slow
@pytest.mark.pitfall("P74")
@pytest.mark.parametrize(("layout", "world", "keep"), LAYOUTS)
@on_ranks()
def test_averages_equal_those_of_one_process_and_training_goes_on(
    rank: int, world: int, layout: str, keep: bool
) -> None:
    laid = lay(layout, build(hidden=HIDDEN), keep=keep)
    optimizer = laid.optimizer()
    average = {name: p.detach().clone() for name, p in laid.network.named_parameters()}
    final, averages, losses = reference()
    for step in range(STEPS):
        optimizer.zero_grad()
        laid.backward(step)
        optimizer.step()
        with torch.no_grad():
            for name, p in laid.network.named_parameters():
                average[name].lerp_(p.detach(), 1 - DECAY)
        with averaged(laid.network, average):
            with torch.no_grad():
                assert_close(loss_of(laid.network, *batch(9)), losses[step], f"loss after step {step}")
            assert_equal_weights(full_state(laid.network), averages[step])
    assert_equal_weights(full_state(laid.network), final)


@on_ranks(2)
def test_a_dedicated_model_is_not_copied_for_an_average(rank: int, world: int) -> None:
    laid = lay("1d-two-lines", build(hidden=HIDDEN))
    with pytest.raises(RuntimeError, match="is owned by dmuon and cannot be copied"):
        AveragedModel(laid.model)
