"""What one rank alone may do, and compiled blocks, as in a single process; other programs in tests/parity/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.oracle import Reference, reference_weights
from harness.topologies import lay
from harness.toy import build, train
from torch import Tensor

# -- ranks that differ --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_rank_alone_may_run_a_kept_block_without_gradients_inside_a_forward(rank: int, world: int) -> None:
    """As for statistics: the others run on, and nothing is compared that they do not compare."""
    model = build()
    laid = lay("1d", model, keep=True)

    def look(model: Any, args: tuple[Tensor, ...]) -> None:
        if rank == 0 and torch.is_grad_enabled():
            with torch.no_grad():
                model.blocks[0](model.embed(*args))

    model.register_forward_pre_hook(look)
    laid.train(laid.optimizer(), range(4))
    assert_equal_weights(full_state(model), reference_weights(steps=4))


@pytest.mark.parametrize("layout", ["1d-two-lines", "ddp-2"])
@on_ranks(2)
def test_one_rank_alone_may_run_forwards_that_no_backward_follows(rank: int, world: int, layout: str) -> None:
    """To look at a loss, or since one failed and is tried again: reductions come in one order all the same."""
    model = build()
    laid = lay(layout, model, keep=True)
    optimizer = laid.optimizer()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    for step in range(4):
        optimizer.zero_grad()
        if rank == 0 and step == 1:
            laid.loss(step)
        if rank == 0 and step == 2:
            handle = model.blocks[1].up.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                laid.loss(step)
            handle.remove()
        laid.backward(step)
        optimizer.step()
    assert_equal_weights(full_state(model), reference_weights(steps=4))


# -- compile ------------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P57")
@pytest.mark.parametrize(
    ("layout", "afterwards"),
    [("1d", True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in ("ddp-2", "hsdp"))],
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
