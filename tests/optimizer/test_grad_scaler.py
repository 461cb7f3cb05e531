"""``torch.amp.GradScaler``: unscaled gradients are exact, and ranks skip a step together, whoever found an infinity."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights
from harness.network import Network, full_state, is_matrix, loss_of
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.topologies import lay
from harness.toy import batch, build
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from dmuon.dedicated.owned_tensor import OwnedTensor

STEPS, POISONED = 4, 1
SCALE = 2.0**10
LAYOUTS = [
    ("1d", 2),
    ("1d-two-lines", 2),
    ("fsdp2-2", 2),
    pytest.param("ddp-2", 2, marks=pytest.mark.slow),
    pytest.param("hsdp", 4, marks=pytest.mark.slow),
    pytest.param("tp-fsdp", 4, marks=pytest.mark.slow),
]


def single_process() -> dict[str, Tensor]:
    """Trained without the step that finds an infinity."""
    model = build(hidden=28)
    optimizer = Reference(model)
    for step in range(STEPS):
        if step != POISONED:
            optimizer.zero_grad()
            loss_of(model, *batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return dict(model.state_dict())


def poison(model: Network) -> None:
    """Put an infinity into a matrix's gradient where one rank alone sees it."""
    grad = next(p.grad for n, p in model.named_parameters() if is_matrix(n))
    assert isinstance(grad, DTensor)
    at = grad.device_mesh.get_coordinate()
    held = grad._local_tensor
    if held.numel() and (isinstance(grad, OwnedTensor) or not any(at or ())):
        held[0, 0] = math.inf


@pytest.mark.pitfall("P34", "P36", "P48")
@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks()
def test_scaled_training_equals_single_process_and_all_ranks_skip_together(
    rank: int, world: int, layout: str, overlap: bool
) -> None:
    laid = lay(layout, build(hidden=28))
    optimizer = laid.optimizer(overlap_backward=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    if layout == "hsdp":  # its default group is that of the moment when torch was imported
        scaler = ShardedGradScaler("cpu", init_scale=SCALE, growth_interval=2, process_group=dist.group.WORLD)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(laid.loss(step)).backward()
        if step == POISONED:
            before = full_state(laid.network)
            poison(laid.network)
        scaler.unscale_(optimizer)
        if step != POISONED:
            torch.nn.utils.clip_grad_norm_(laid.network.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == POISONED:
            after = full_state(laid.network)
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "the step was skipped"
    assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE], "the same on all ranks"
    assert_equal_weights(full_state(laid.network), single_process())
