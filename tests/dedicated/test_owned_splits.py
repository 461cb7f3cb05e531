"""Owned tensors that are several matrices: each has an owner, and everything else is as with one matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.fused import FusedModel, fused, fused_loss, fused_reference
from harness.hand_laid import SPLITS
from harness.network import full_state
from harness.on_ranks import on_ranks, over_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import dmuon

STEPS = 3


def train(model: nn.Module, optimizer: dmuon.Muon, steps: Any, mesh: DeviceMesh) -> int:
    """How many matrices this rank orthogonalized."""
    rank = mesh.get_rank() if mesh.ndim > 1 else mesh.get_local_rank()
    calls = 0
    for step in steps:
        optimizer.zero_grad()
        fused_loss(model, step, rank, mesh.size()).backward()
        optimizer.step()
        calls += optimizer.last_step.ns_matrices
    return calls


# The parts of one of these that a rank owns have several shapes, so that it updates them one after the other: its block
# is sent ahead when the last one is updated.
APART: dict[str, Any] = {"only": ("grouped queries", "experts, fused"), "comm": dmuon.CommOptions(merge_bytes=0)}
KEPT_APART = APART | {"reshard_after_forward": False, "comm": dmuon.CommOptions(merge_bytes=0, transport="single")}


@pytest.mark.parametrize(
    ("world", "layout", "options"),
    [
        (2, "shard-2", {"reshard_after_forward": False, "overlap_backward": True}),
        (2, "tp-2", {}),
        (2, "shard-2", APART | {"overlap_backward": True}),
        pytest.param(4, "hsdp", KEPT_APART, marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_each_part_equals_a_matrix_of_its_own(rank: int, world: int, layout: str, options: dict[str, Any]) -> None:
    only = options.pop("only", None)
    splits = [split for split in SPLITS if only is None or split.name in only]
    model, optimizer, mesh = fused(layout, splits, **options)
    calls = train(model, optimizer, range(STEPS), mesh)
    found, expected = full_state(model), fused_reference(STEPS, splits)
    assert_equal_weights({name: found[name] for name in expected}, expected)
    assert over_ranks(calls) == STEPS * 2 * sum(len(split.cut(torch.empty(split.shape))) for split in splits)


@on_ranks(2)
def test_a_run_goes_on_from_its_checkpoint(rank: int, world: int) -> None:
    """Momentum whole, from rank 0; into other owners."""
    model, optimizer, mesh = fused("shard-2")
    train(model, optimizer, range(2), mesh)
    again, resumed, _ = fused("shard-2", solve=dmuon.solver.SolveOptions(method="greedy"))
    again.load_state_dict(full_state(model))
    momentum = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(again, resumed, momentum, options=options)
    train(again, resumed, range(2, STEPS), mesh)
    assert_equal_weights(full_state(again), fused_reference(STEPS))


@on_ranks(2)
def test_whole_weights_can_be_read_edited_frozen_and_thawed(rank: int, world: int) -> None:
    model, *_ = fused("shard-2")
    expected = FusedModel().state_dict()
    for flag in (False, True):
        with dmuon.summon_full_params(model):
            model.requires_grad_(flag)
        assert {param.requires_grad for param in model.parameters()} == {flag}
    with dmuon.summon_full_params(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name])
            with torch.no_grad():
                param.mul_(2.0)
    found = full_state(model)
    for name, _ in model.named_parameters():
        assert torch.equal(found[name], 2 * expected[name])


@pytest.mark.pitfall("P67")
@on_ranks(4)
def test_gradients_are_accumulated_part_by_part(rank: int, world: int) -> None:
    """Two halves of a batch make the step of the whole. What waited for the other replica and was zeroed is gone."""
    model, optimizer, mesh = fused("hsdp")
    for step in range(STEPS):
        dmuon.set_requires_all_reduce(model, False)
        fused_loss(model, 100 + step, mesh.get_rank(), world).backward()
        model.zero_grad(set_to_none=False)
        for half in range(2):
            dmuon.set_requires_all_reduce(model, half == 1)
            (fused_loss(model, step, 2 * mesh.get_rank() + half, 2 * world) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(full_state(model), fused_reference(STEPS))
