"""Ranks whose options or evaluations differ are told, and ranks that may differ are left in peace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.network import Size
from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import OPTIONS, batch, build
from torch import Tensor

import dmuon

# -- options ------------------------------------------------------------------------------------------------------

Edit = Callable[[dmuon.Muon], None]


def set_option(name: str, value: Any, group: int = 0) -> Edit:
    def edit(optimizer: dmuon.Muon) -> None:
        optimizer.param_groups[group][name] = value

    return edit


EDITS: dict[str, tuple[Edit, str]] = {
    "lr of Muon": (set_option("lr", 0.5), r"'lr of group 0=0\.5'"),
    "lr of AdamW": (set_option("lr", 0.5, 1), r"'lr of group 1=0\.5'"),
    "lr in its last bit": (set_option("lr", OPTIONS["lr"] * (1 + 2**-52)), r"lr of group 0=0\.002"),
    "lr as a tensor": (set_option("lr", torch.tensor(0.25)), r"'lr of group 0=0\.25'"),
    "ns_steps": (set_option("ns_steps", 6), r"'ns_steps of group 0=6"),
}


@pytest.mark.pitfall("P73")
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("1d-two-lines", ["lr of Muon", "lr of AdamW"]),
        ("fsdp2-2", ["lr in its last bit"]),
        pytest.param("ddp", ["lr as a tensor", "ns_steps"], marks=pytest.mark.slow),
    ],
)
@on_ranks("layout")
def test_options_that_differ_end_all_ranks_before_the_step(
    rank: int, world: int, layout: str, names: list[str]
) -> None:
    for name in names:
        edit, told = EDITS[name]
        laid = lay(layout, build())
        optimizer = laid.optimizer()
        laid.backward(0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            edit(optimizer)
        with pytest.raises(dmuon.CollectiveError, match="the ranks have different options") as caught:
            laid.backward(1)  # the vote of the dedicated residency
            optimizer.step()  # that of the exchanged one
        assert re.search(told, str(caught.value)), (name, str(caught.value))


@pytest.mark.pitfall("P73")
@on_ranks(2)
def test_options_that_differ_from_the_start_are_told_in_the_first_backward(rank: int, world: int) -> None:
    laid = lay("1d-two-lines", build())
    optimizer = laid.optimizer(momentum=0.9 + 0.05 * rank)
    with pytest.raises(dmuon.CollectiveError, match=r"momentum of group 0=0\.9"):
        laid.backward(0)
    assert optimizer is not None


@on_ranks(2)
def test_products_that_ranks_compute_otherwise_are_told(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dmuon.optimizer.muon, "tell_products", lambda groups, *_: [["quack", "triton"][rank]] * len(groups)
        )
        laid = lay("fsdp2-2", build())
        optimizer = laid.optimizer()
        with pytest.raises(dmuon.CollectiveError, match=r"products of group 0=triton"):
            laid.backward(0)
            optimizer.step()


@pytest.mark.parametrize("layout", ["1d-two-lines", pytest.param("tp-two-lines", marks=pytest.mark.slow)])
@on_ranks("layout")
def test_a_parameter_that_one_rank_alone_freezes_is_named(rank: int, world: int, layout: str) -> None:
    for name in ("blocks.1.up.weight", "blocks.0.norm.weight", "head.weight"):
        laid = lay(layout, build())
        optimizer = laid.optimizer()
        params = dict(laid.model.named_parameters())
        for step in range(2):  # frozen on all ranks, and trained again: no difference
            laid.backward(step)
            optimizer.step()
            optimizer.zero_grad()
            params[name].requires_grad_(step == 1)
        laid.backward(2)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            params[name].requires_grad_(False)
        with pytest.raises(dmuon.CollectiveError, match=rf"requires_grad of '{name}'=False"):
            laid.backward(3)
            dmuon.clip_grad_norm_(laid.model.parameters(), 1.0)


@on_ranks(2)
def test_options_that_change_alike_are_no_difference(rank: int, world: int) -> None:
    """Also with two optimizers of one model, and with groups that only one rank has."""
    laid = lay("1d-two-lines", build())
    owned = sorted(dmuon.owned_parameters(laid.model), key=lambda p: p.fqn)
    alone = torch.nn.Parameter(torch.randn(3, 3))
    first = dmuon.Muon([{"params": owned[:4], "use_muon": True}], **OPTIONS)
    rest = [p for p in laid.model.parameters() if p not in dmuon.owned_parameters(laid.model)]
    groups = [{"params": owned[4:], "use_muon": True}, {"params": rest, "use_muon": False}]
    if rank == 1:
        groups.insert(0, {"params": [alone], "use_muon": True, "lr": 0.3})
    second = dmuon.Muon(groups, **{**OPTIONS, "lr": 1e-3})
    for step in range(3):
        for optimizer in (first, second):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        laid.backward(step)
        first.step()
        second.step()
    assert first.param_groups[0]["lr"] == pytest.approx(OPTIONS["lr"] * 0.9**3)


# -- evaluation ---------------------------------------------------------------------------------------------------


class Even(nn.Module):
    """Two matrices alike, one for each of two ranks: gloo does not notice whose weights a fill brings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.a = nn.Linear(size.width, size.width)
        self.b = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def by_order(model: Any, tokens: Tensor, order: list[int]) -> Tensor:
    """A forward of blocks in some order, past the root."""
    x = model.embed(tokens)
    for index in order:
        x = model.blocks[index](x)
    return model.head(model.norm(x))


@pytest.mark.pitfall("P70")
@pytest.mark.parametrize("root", [True, False])
@on_ranks(2)
def test_evaluation_in_another_order_is_told(rank: int, world: int, root: bool) -> None:
    """At its end, or, past the root, when a block runs again."""
    laid = lay("1d-two-lines", build(block=Even), comm=dmuon.CommOptions(prefetch=0))
    model, tokens, order = laid.model, batch(0)[0], [0, 1, 2] if rank == 0 else [0, 2, 1]
    with torch.no_grad():
        if root:
            model(tokens)
        model.forward = lambda tokens: by_order(model, tokens, order)
        with pytest.raises(dmuon.CollectiveError, match=r"fill of block 'blocks\.[12]'.* on rank [01] where rank"):
            for _ in range(1 if root else 2):
                (model if root else model.forward)(tokens)


@pytest.mark.pitfall("P70")
@on_ranks(2)
def test_tensor_parallel_ranks_compare_in_which_order_a_backward_came(rank: int, world: int) -> None:
    """Nothing of dmuon's travels there, and sums of different blocks are mixed."""
    laid = lay("tp", build())
    laid.model.forward = lambda tokens: by_order(laid.model, tokens, [0, 1, 2] if rank == 0 else [0, 2, 1])
    with pytest.raises(dmuon.CollectiveError, match=r"gradients of block 'blocks\.\d'.* on rank [01] where rank [01]"):
        laid.model(batch(0)[0]).sum().backward()
