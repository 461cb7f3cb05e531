"""The network with odd sizes, its data, and the options with which tests train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import dmuon
from harness import network
from harness.network import Block, Network, Size, full_state, loss_of, shard

VOCAB, WIDTH, HIDDEN = 17, 13, 29
SIZE = Size(WIDTH, HIDDEN, layers=3, vocabulary=VOCAB)
LR, DECAY = 2e-3, 0.1
OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "ns_coefficients": "classic"}  # of dmuon.Muon
CPU = torch.device("cpu")


def build(
    seed: int = 0,
    layers: int = 3,
    hidden: int = HIDDEN,
    tied: bool = False,
    block: Callable[[Size], nn.Module] = Block,
) -> Network:
    model = network.build(Size(WIDTH, hidden, layers, VOCAB), CPU, seed, block)
    if tied:
        model.head.weight = model.embed.weight
    return model


def batch(step: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one global step, the same in every process."""
    return network.batch(SIZE, rows, 5, step, CPU)


def trained(model: nn.Module, rank: int, world: int, steps: int = 2) -> dict[str, Tensor]:
    """Whole weights after some steps by ``dmuon.Muon``. Collective."""
    train(model, dmuon.Muon(model, **OPTIONS), range(steps), rank, world)
    return full_state(model)


def train(model: nn.Module, optimizer: Any, steps: Iterable[int], rank: int = 0, world: int = 1) -> None:
    """Step on this rank's part of each of these global batches."""
    device = next(model.parameters()).device

    def loss(step: int) -> Tensor:
        tokens, targets = shard(batch(step), rank, world)
        return loss_of(model, tokens.to(device), targets.to(device))

    take_steps(optimizer, loss, steps)


def take_steps(optimizer: Any, loss: Callable[[int], Tensor], steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
