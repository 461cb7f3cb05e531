"""Hooks on gradients of owned parameters run with what the owner gets; what waits in no_sync is shown as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.dtensors import local_tensor
from harness.network import full_state, loss_of
from harness.on_ranks import of_all_ranks, on_ranks
from harness.oracle import Reference
from harness.topologies import lay
from harness.toy import batch, build, train
from torch import Tensor

import dmuon

pytestmark = pytest.mark.pitfall("P67")

HOOKED = ("blocks.0.mix.weight", "blocks.1.up.weight", "blocks.2.down.weight")
BOUND = 1e-3


def clamp(grad: Tensor) -> Tensor:
    return grad.clamp(-BOUND, BOUND)


def double(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(-2.0)


def register(model: nn.Module) -> list[Any]:
    """Two hooks that change what is learnt, and one that comes after them."""
    params = dict(model.named_parameters())
    handles = []
    for name in HOOKED:
        handles.append(params[name].register_hook(clamp))
        handles.append(params[name].register_hook(lambda grad: grad * 0.5 + 1e-4))
        handles.append(params[name].register_post_accumulate_grad_hook(double))
    return handles


def train_until_removed(handles: list[Any], train: Callable[[range], None]) -> None:
    train(range(3))
    for handle in handles:
        handle.remove()
    train(range(3, 4))


def expected() -> dict[str, Tensor]:
    model = build()
    optimizer = Reference(model)
    train_until_removed(register(model), partial(train, model, optimizer))
    return full_state(model)


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [
        *(("1d-two-lines", False), ("ddp-2", False), ("1d-two-lines", True)),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("hsdp", "hsdp-two-lines", "tp-two-lines")),
    ],
)
@on_ranks("layout")
def test_hooks_see_what_the_owner_gets(rank: int, world: int, layout: str, overlap: bool) -> None:
    for before in (False,) if layout.startswith("tp") else (True, False):  # parallelize_module drops them
        model = build()
        handles = register(model) if before else []
        laid = lay(layout, model)
        handles = handles or register(model)
        train_until_removed(handles, partial(laid.train, laid.optimizer(overlap_backward=overlap)))
        with about(f"registered before: {before}"):
            assert_equal_weights(full_state(model), expected())


@on_ranks(2)
def test_hooks_run_in_one_order_on_all_ranks_even_if_one_rank_alone_used_a_matrix(rank: int, world: int) -> None:
    """A hook may communicate, so that the ranks must not run two of them in different orders."""
    model = build()
    order: list[str] = []
    laid = lay("1d-two-lines", model)
    for param in dmuon.owned_parameters(model):
        name = param.fqn
        param.register_hook(lambda grad, name=name: order.append(name))
    block = model.blocks[2 - rank]
    with torch.no_grad():
        x = model.embed(batch(0)[0])
    for each in model.blocks:
        y = each(x)
        (y.sum() if each is block else 0 * model.norm(y.detach()).sum() + 0 * y.sum()).backward(retain_graph=True)
    found = of_all_ranks(order)
    assert len(found[0]) == 9 and found[0] == found[1]
    assert laid is not None


@on_ranks(2)
def test_a_hook_that_returns_something_else_is_named(rank: int, world: int) -> None:
    model = build()
    laid = lay("1d-two-lines", model)
    param = next(p for p in dmuon.owned_parameters(model) if p.fqn == HOOKED[0])
    param.register_hook(lambda grad: torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"a gradient hook of 'blocks\.0\.mix\.weight' returned Tensor"):
        laid.backward(0)


# -- what no_sync shows -------------------------------------------------------------------------------------------


def own_gradients(rank: int, world: int, steps: tuple[int, ...]) -> dict[str, Tensor | None]:
    """Of a single process on this rank's part of some batches."""
    model = build()
    for step in steps:
        tokens, targets = (t.chunk(world)[rank] for t in batch(step))
        loss_of(model, tokens, targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@on_ranks(2)
def test_no_sync_shows_the_gradient_of_this_rank(rank: int, world: int) -> None:
    for name in ("1d-two-lines", "ddp-2"):
        model = build()
        laid = lay(name, model)
        with dmuon.no_sync(model):
            for step in range(2):
                laid.backward(step)
                expected = own_gradients(rank, world, tuple(range(step + 1)))
                for param in dmuon.owned_parameters(model):
                    assert param.grad is not None
                    torch.testing.assert_close(param.grad, expected[param.fqn], rtol=1e-5, atol=1e-7)


Clear = Callable[[nn.Module, dmuon.Muon], None]


def to_none_by_hand(model: nn.Module, optimizer: dmuon.Muon) -> None:
    for param in model.parameters():
        param.grad = None


def delete(model: nn.Module, optimizer: dmuon.Muon) -> None:
    for param in model.parameters():
        del param.grad


CLEARED: dict[str, Clear] = {
    "model": lambda model, optimizer: model.zero_grad(),
    "model_to_zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer_to_zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "none": to_none_by_hand,
    "del": delete,
}


@pytest.mark.parametrize(
    ("layout", "halfway"),
    [
        *(("1d-two-lines", False), ("ddp-2", False)),
        pytest.param("tp-two-lines", False, marks=pytest.mark.slow),
        pytest.param("hsdp-two-lines", True, marks=pytest.mark.slow),
    ],
)
@on_ranks("layout")
def test_cleared_gradients_are_gone(rank: int, world: int, layout: str, halfway: bool) -> None:
    """Those of an accumulation that was given up reach no step, however they were cleared."""
    twin = build()
    reference = Reference(twin)
    loss_of(twin, *batch(1)).backward()
    reference.step()
    for how, clear in CLEARED.items():
        model = build()
        laid = lay(layout, model)
        optimizer = laid.optimizer()
        if halfway:
            dmuon.set_requires_all_reduce(model, False)
            laid.backward(0)
            dmuon.set_requires_all_reduce(model, True)
        else:
            with dmuon.no_sync(model):
                laid.backward(0)
        clear(model, optimizer)
        assert all(p.grad is None or not bool(local_tensor(p.grad).any()) for p in model.parameters()), how
        laid.backward(1)
        optimizer.step()
        with about(how):
            assert_equal_weights(full_state(model), dict(twin.state_dict()))
