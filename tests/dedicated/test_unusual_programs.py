"""Compiled blocks, hooks on gradients, and gradients that wait in no_sync, as in a single process.

Other programs, that hooks see what the owner gets among them, and that cleared gradients are gone: tests/parity/.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.network import full_state, loss_of
from harness.on_ranks import of_all_ranks, on_ranks
from harness.oracle import Reference
from harness.topologies import lay
from harness.toy import batch, build, train
from torch import Tensor
from torch.distributed.tensor import DTensor

import dmuon

# -- compile ------------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P57")
@pytest.mark.parametrize(
    ("layout", "afterwards"),
    [("1d", True), pytest.param("ddp-2", False, marks=pytest.mark.slow)],
)
@on_ranks("layout", timeout=110)
def test_compiled_blocks_are_exact_and_compile_once(rank: int, world: int, layout: str, afterwards: bool) -> None:
    """Blocks are compiled before the model is dedicated, or ``afterwards``."""
    from torch._dynamo.utils import counters

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)

    torch._dynamo.reset()
    counters.clear()
    model, alone = build(), build()
    if not afterwards:
        compile_blocks()
    laid = lay(layout, model)
    optimizer = laid.optimizer()
    if afterwards:
        compile_blocks()
    laid.train(optimizer, range(1))
    graphs = counters["stats"]["unique_graphs"]
    laid.train(optimizer, range(3))
    assert graphs >= 1 and counters["stats"]["unique_graphs"] == graphs, "compiled again in a later step"
    assert not counters["graph_break"]
    train(alone, Reference(alone), (0, 0, 1, 2))
    assert_equal_weights(full_state(laid.model), full_state(alone))


# -- hooks on gradients of owned parameters -----------------------------------------------------------------------


@pytest.mark.pitfall("P67")
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


# -- gradients that wait in no_sync: shown and cleared as they are, and no step passes them by ------------------------


def own_gradients(rank: int, world: int, steps: tuple[int, ...]) -> dict[str, Tensor | None]:
    """Of a single process on this rank's part of some batches."""
    model = build()
    for step in steps:
        tokens, targets = (t.chunk(world)[rank] for t in batch(step))
        loss_of(model, tokens, targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.pitfall("P67")
@on_ranks(2)
def test_no_sync_shows_the_gradient_of_this_rank(rank: int, world: int) -> None:
    """Inside of another one, too, with which it ends."""
    for name in ("1d-two-lines", "ddp-2"):
        laid = lay(name, build())
        params = sorted(dmuon.owned_parameters(laid.model), key=lambda param: param.fqn)
        with dmuon.no_sync(laid.model):
            for step in range(2):
                with dmuon.no_sync(laid.model) if step == 0 else nullcontext():
                    laid.backward(step)
                expected = own_gradients(rank, world, tuple(range(step + 1)))
                for param in params:
                    assert type(param.grad) is Tensor
                    torch.testing.assert_close(param.grad, expected[param.fqn], rtol=1e-5, atol=1e-7)
        laid.backward(2)
        assert all(isinstance(param.grad, DTensor) for param in params)


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
