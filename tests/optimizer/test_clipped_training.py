"""Training with clipping, in every step, equals training on one process."""

from __future__ import annotations

import math

import pytest
from harness.assertions import assert_equal_weights
from harness.clipping import MIXED, laid_out, whole
from harness.network import full_state, is_matrix, loss_of
from harness.oracle import Reference
from harness.pool import RankPool
from harness.topologies import lay
from harness.toy import batch, build
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip

import dmuon

STEPS = 4
MAX_NORM = 0.5  # below the norm of every step, so that each one is clipped


def clipped_run(rank: int, world: int, layout: str, stock: bool) -> tuple[dict[str, Tensor], list[float]]:
    laid = laid_out(layout, build())
    optimizer, clip = laid.optimizer(), torch_clip if stock else dmuon.clip_grad_norm_
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        laid.backward(step)
        norms.append(float(whole(clip(laid.model.parameters(), MAX_NORM))))
        assert float(whole(clip(laid.model.parameters(), math.inf))) == pytest.approx(MAX_NORM, rel=1e-5)
        optimizer.step()
    return full_state(laid.model), norms


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Tensor], list[float]]:
    model = build()
    optimizer = Reference(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        norms.append(float(torch_clip(model.parameters(), MAX_NORM)))
        optimizer.step()
    assert min(norms) > 1.2 * MAX_NORM
    return dict(model.state_dict()), norms


@pytest.mark.pitfall("P34", "P36", "P37")
@pytest.mark.parametrize(
    ("layout", "world", "stock"),
    [
        ("1d", 2, True),
        ("1d-3", 3, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((MIXED, 3, False), ("1d-1", 1, True), ("1d-3", 3, True), ("1d-4", 4, True)),
                *(("1d-two-lines", 2, False), ("1d-4-two-lines", 4, False)),
            )
        ),
    ],
)
def test_clipped_training_equals_single_process(
    ranks: RankPool, reference: tuple[dict[str, Tensor], list[float]], layout: str, world: int, stock: bool
) -> None:
    """By torch's function where it is exact, and by ours."""
    results = ranks(world, clipped_run, layout, stock)
    for weights, norms in results:
        assert norms == pytest.approx(reference[1], rel=1e-5)
        assert stock or norms == results[0][1], "the same number on all ranks"
        assert_equal_weights(weights, reference[0])


def scaled_gradients(rank: int, world: int, factor: float) -> dict[str, Tensor]:
    laid = lay("1d", build())
    optimizer = laid.optimizer()
    laid.backward(0)
    total = dmuon.clip_grad_norm_(laid.model.parameters(), math.inf)
    dmuon.clip_grad_norm_(laid.model.parameters(), factor * float(total))
    optimizer.step()
    return full_state(laid.model)


@pytest.mark.pitfall("P34")
def test_clipping_scales_gradients_and_not_the_update(ranks: RankPool) -> None:
    """The first update of either route does not depend on the scale of the gradient, so clipping must not change it."""
    plain, clipped = ranks(2, scaled_gradients, 2.0)[0], ranks(2, scaled_gradients, 0.25)[0]
    start = build().state_dict()
    moved = {n: plain[n] - start[n] for n in plain if is_matrix(n)}
    assert_equal_weights({n: clipped[n] - start[n] for n in moved}, moved, 1e-4)
