"""Parameters that only some ranks use, and compiled blocks, as in a single process; other programs in tests/parity/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.oracle import Reference, reference_weights
from harness.topologies import Laid, lay
from harness.toy import WIDTH, build, train
from programs.unusual import Optional, accumulate
from torch import Tensor

import dmuon

MERGED = 10**6  # bytes: all blocks of a toy model together

Options = dict[str, Any]


def laid_out(name: str, model: Any, comm: Options, keep: bool = False) -> tuple[Laid, dmuon.Muon]:
    laid = lay(name, model, keep=keep, comm=dmuon.CommOptions(**comm))
    return laid, laid.optimizer()


# -- ranks that differ --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_rank_alone_may_run_a_kept_block_without_gradients_inside_a_forward(rank: int, world: int) -> None:
    """As for statistics: the others run on, and nothing is compared that they do not compare."""
    model = build()
    laid, optimizer = laid_out("1d", model, {}, keep=True)

    def look(model: Any, args: tuple[Tensor, ...]) -> None:
        if rank == 0 and torch.is_grad_enabled():
            with torch.no_grad():
                model.blocks[0](model.embed(*args))

    model.register_forward_pre_hook(look)
    laid.train(optimizer, range(4))
    assert_equal_weights(full_state(model), reference_weights(steps=4))


# Which rank uses the optional matrices in which micro-batch of a step; the kind of each micro-batch.
USES = [
    [((False, True, False, False), "replica"), ((False, False, False, False), "full")],
    [((False, False, False, True), "none"), ((True, False, False, False), "replica"), ((False,) * 4, "full")],
    [((False,) * 4, "replica"), ((False,) * 4, "full")],
    [((True, False, False, False), "replica"), ((False, False, True, False), "full")],
]


# Which of two ranks uses them in each step.
USES_OF_TWO = [
    [(uses, "full")] for uses in ((True, True), (True, False), (False, False), (False, True), (False, False))
]


def optional_batch(step: int, micro: int, world: int) -> Tensor:
    return torch.randn(world, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))


@pytest.mark.pitfall("P12", "P19", "P48")
@pytest.mark.parametrize(
    ("layout", "keep", "comm", "steps", "unused"),
    [
        ("1d-two-lines", False, {}, USES_OF_TWO, [0, 0, 5, 0, 5]),
        ("1d-two-lines", True, {}, USES_OF_TWO, [0, 0, 5, 0, 5]),
        ("hsdp-two-lines", False, {}, USES, [0, 0, 5, 0]),
        ("hsdp-two-lines", False, {"merge_bytes": MERGED}, USES, [0, 0, 5, 0]),
        ("ddp-4", False, {}, USES, [0, 0, 5, 0]),
    ],
)
@on_ranks("layout")
def test_parameters_that_only_some_ranks_use(
    rank: int, world: int, layout: str, keep: bool, comm: Options, steps: Any, unused: list[int]
) -> None:
    """No hang; a parameter that no rank used keeps ``grad is None`` and is skipped, as in a single process."""
    laid, optimizer = laid_out(layout, Optional(), comm, keep)
    model = Optional()
    reference = Reference(model, matrix=lambda n: n.startswith("blocks.") and n.endswith("weight"))
    for step, micro in enumerate(steps):
        optimizer.zero_grad()
        reference.zero_grad()
        for i, (uses, kind) in enumerate(micro):
            x = optional_batch(step, i, world)
            accumulate(laid.model, kind)
            laid.model(x[rank], uses[rank]).square().mean().backward()
            sum(model(x[r], uses[r]).square().mean() / world for r in range(world)).backward()
        found, expected = ([n for n, p in m.named_parameters() if p.grad is None] for m in (laid.model, model))
        assert found == expected and len(found) == unused[step]
        optimizer.step()
        reference.step()
    assert_equal_weights(full_state(laid.model), full_state(model))


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
    laid, optimizer = laid_out(layout, model, {})
    if afterwards:
        compile_blocks()
    laid.train(optimizer, range(1))
    graphs = counters["stats"]["unique_graphs"]
    laid.train(optimizer, range(3))
    assert graphs >= 1 and counters["stats"]["unique_graphs"] == graphs, "compiled again in a later step"
    assert not counters["graph_break"]
    train(alone, Reference(alone), (0, 0, 1, 2))
    assert_equal_weights(full_state(laid.model), full_state(alone))
