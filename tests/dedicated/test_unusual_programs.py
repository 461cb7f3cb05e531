"""What one rank alone may do, compiled blocks, and hooks on gradients, as in a single process.

Other programs, that hooks see what the owner gets among them, and that cleared gradients are gone: tests/parity/.
"""

from __future__ import annotations

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.network import full_state, loss_of
from harness.on_ranks import of_all_ranks, on_ranks
from harness.oracle import Reference
from harness.topologies import lay
from harness.toy import batch, build, train
from torch import Tensor

import dmuon

# -- compile ------------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P57")
@pytest.mark.parametrize(
    ("layout", "afterwards"),
    [("1d", True), pytest.param("hsdp", False, marks=pytest.mark.slow)],
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


@pytest.mark.pitfall("P67")
@on_ranks(2)
def test_a_hook_that_returns_something_else_is_named(rank: int, world: int) -> None:
    model = build()
    laid = lay("1d-two-lines", model)
    param = next(p for p in dmuon.owned_parameters(model) if p.fqn == "blocks.0.mix.weight")
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


@pytest.mark.pitfall("P67")
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
