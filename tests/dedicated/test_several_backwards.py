"""Backwards one after the other add up as in one process, however blocks are merged and recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn as nn
from harness.assertions import about
from harness.on_ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import dmuon


class Block(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(checkpoint(self.inner, x, use_reentrant=True) if self.reentrant else self.inner(x))


class Net(nn.Module):
    def __init__(self, reentrant: tuple[bool, ...]) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(map(Block, reentrant))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(10 * number + rank)
    return model(torch.randn(4, 8, generator=draw)).square().mean()


def once(model: nn.Module, rank: int, scale: float) -> None:
    (loss_of(model, rank) * scale).backward()


def same_graph_twice(model: nn.Module, rank: int, scale: float) -> None:
    loss = loss_of(model, rank) * scale
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards_first(model: nn.Module, rank: int, scale: float) -> None:
    losses = [loss_of(model, rank, number) * scale for number in range(2)]
    for loss in losses:
        loss.backward()


def without_synchronization_first(model: nn.Module, rank: int, scale: float) -> None:
    if dmuon.owned_parameters(model):
        with dmuon.no_sync(model):
            (loss_of(model, rank) * scale).backward()
    else:
        (loss_of(model, rank) * scale).backward()
    (loss_of(model, rank, 1) * scale).backward()


PROGRAMS = (once, same_graph_twice, two_forwards_first, without_synchronization_first)


def norms_of(model: nn.Module) -> dict[str, float]:
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.pitfall("P12", "P58")
@on_ranks(2)
@pytest.mark.parametrize("merge_bytes", [0, 10**6])
def test_several_backwards_add_up(rank: int, world: int, merge_bytes: int) -> None:
    for names, pattern in product((None, ("replicate",)), ((True, True), (False, True, False, False))):
        for program in PROGRAMS:
            torch.manual_seed(0)
            model = Net(pattern)
            twin = copy.deepcopy(model)
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=names)
            dmuon.dedicate_params(model, mesh, costs="flops", comm=dmuon.CommOptions(merge_bytes=merge_bytes))
            program(model, rank, 1.0)
            for other in range(world):
                program(twin, other, 1 / world)
            with about((names, pattern, program.__name__)):
                assert norms_of(model) == pytest.approx(norms_of(twin), rel=1e-5)


def names_inputs(model: nn.Module) -> None:
    optimizer = dmuon.Muon(model)
    loss_of(model, 0).backward(inputs=list(model.parameters()))
    optimizer.step()


def computes_owned_weights(model: nn.Module) -> None:
    functional_call(model, {"blocks.0.up.weight": model.blocks[0].up.weight * 2}, (torch.ones(2, 8),))


REFUSED: dict[Callable[[nn.Module], None], str] = {
    names_inputs: r"no parameter that dmuon owns has a gradient: backward\(inputs=…\)",
    computes_owned_weights: r"'blocks\.0\.up\.weight' was replaced in its module after dedicate_params",
}


@on_ranks(2)
def test_what_graphs_of_owned_weights_cannot_do_is_refused(rank: int, world: int) -> None:
    for program, message in REFUSED.items():
        model = Net((False, False))
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
        with pytest.raises(RuntimeError, match=message):
            program(model)
