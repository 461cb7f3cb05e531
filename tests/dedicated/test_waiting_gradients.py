"""Gradients that wait in no_sync are shown and cleared as they are, and no step passes them by.

That cleared gradients are gone: tests/parity/.
"""

from __future__ import annotations

import pytest
import torch
from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import build
from torch import Tensor
from torch.distributed.tensor import DTensor

import dmuon


@pytest.mark.parametrize("layout", ["1d-two-lines", "ddp-2"])
@on_ranks(2)
def test_a_gradient_in_two_parts_is_not_shown_by_one_of_them(rank: int, world: int, layout: str) -> None:
    """Of zeros that were left and what no_sync has added, an edit, or a dropped batch, would reach the zeros only."""
    laid = lay(layout, build())
    optimizer = laid.optimizer()
    param = min(dmuon.owned_parameters(laid.model), key=lambda param: param.fqn)
    laid.backward(0)
    optimizer.zero_grad(set_to_none=False)
    with dmuon.no_sync(laid.model):
        laid.backward(1)
    for use in (lambda: param.grad, lambda: laid.model.zero_grad(set_to_none=False)):
        with pytest.raises(RuntimeError, match=r"part of the gradient of 'blocks\.0\..*' is not reduced"):
            use()
    optimizer.zero_grad(set_to_none=False)
    laid.backward(2)
    dmuon.clip_grad_norm_(laid.model.parameters(), 1.0)
    found = param.grad.norm()
    optimizer.zero_grad()
    laid.backward(2)
    dmuon.clip_grad_norm_(laid.model.parameters(), 1.0)
    torch.testing.assert_close(found, param.grad.norm())


@on_ranks(2)
def test_an_optimizer_clears_no_gradient_of_another_one(rank: int, world: int) -> None:
    """What waits in no_sync stays with the optimizer that has not cleared it, as of a generator and a discriminator."""
    laid = lay("1d-two-lines", build())
    params = sorted(dmuon.owned_parameters(laid.model), key=lambda param: param.fqn)
    first = dmuon.Muon(params[::2])
    with dmuon.no_sync(laid.model):
        laid.backward(0)
    first.zero_grad()
    laid.backward(1)
    found = [param.grad.norm() for param in params]
    expected = []
    for steps in ((1,), (0, 1)):
        laid.model.zero_grad()
        for step in steps:
            laid.backward(step)
        expected.append([param.grad.norm() for param in params])
    for number, norm in enumerate(found):
        torch.testing.assert_close(norm, expected[number % 2][number])


@on_ranks(2)
def test_no_sync_inside_no_sync_ends_with_the_outer_one(rank: int, world: int) -> None:
    laid = lay("1d-two-lines", build())
    param = min(dmuon.owned_parameters(laid.model), key=lambda param: param.fqn)
    with dmuon.no_sync(laid.model):
        with dmuon.no_sync(laid.model):
            laid.backward(0)
        laid.backward(1)
        assert param.grad is not None and type(param.grad) is Tensor, "this rank's own, whole"
    laid.backward(2)
    assert isinstance(param.grad, DTensor)


@on_ranks(2)
def test_a_step_is_refused_if_what_is_replicated_alone_is_not_averaged(rank: int, world: int) -> None:
    laid = lay("1d-two-lines", build())
    laid.model.requires_grad_(False)
    laid.network.head.requires_grad_(True)
    optimizer = laid.optimizer()
    with dmuon.no_sync(laid.model):
        laid.backward(0)
    with pytest.raises(RuntimeError, match=r"gradient of 'head\.weight' is not reduced"):
        optimizer.step()
    laid.backward(1)
    optimizer.step()
    with dmuon.no_sync(laid.model):
        laid.backward(0)
    optimizer.zero_grad()
    laid.network.head.weight.grad = torch.zeros_like(laid.network.head.weight)  # a program's own, which nobody averages
    optimizer.step()
