"""Work that overlaps changes no bit, and what must not wait does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from harness.assertions import about, assert_same_tensors
from harness.dtensors import local_tensor
from harness.network import full_state
from harness.on_ranks import of_all_ranks, on_ranks, slowly
from harness.topologies import Laid, lay
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.step import rounds
from dmuon.step.batches import Batch

# -- Newton-Schulz during backward ---------------------------------------------------------------------------------


def clip_under_a_mode(laid: Laid, optimizer: dmuon.Muon) -> None:
    with FlopCounterMode(display=False):  # any mode: under one, torch counts no versions for foreach operations
        dmuon.clip_grad_norm_(laid.model.parameters(), 1e-2)


def scaled_under_a_mode(laid: Laid, optimizer: dmuon.Muon) -> None:
    grads = [param.grad for param in dmuon.owned_parameters(laid.model) if param.grad is not None]
    with FlopCounterMode(display=False), torch.no_grad():
        torch._foreach_mul_(grads, 0.5)


def scaled_in_place(laid: Laid, optimizer: dmuon.Muon) -> None:
    for param in laid.model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def replaced(laid: Laid, optimizer: dmuon.Muon) -> None:
    for param in laid.model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def other_momentum(laid: Laid, optimizer: dmuon.Muon) -> None:
    for group in optimizer.param_groups:
        if group["use_muon"]:
            group["momentum"] = 0.8 if group["momentum"] == 0.95 else 0.95


def l2_decay(laid: Laid, optimizer: dmuon.Muon) -> None:
    for group in optimizer.param_groups:
        if group["use_muon"]:
            group["weight_decay_mode"] = "decoupled" if group.get("weight_decay_mode") == "l2" else "l2"


def other_lr(laid: Laid, optimizer: dmuon.Muon) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def edited_momentum(laid: Laid, optimizer: dmuon.Muon) -> None:
    for param in dmuon.owned_parameters(laid.model):
        optimizer.state[param]["momentum_buffer"].mul_(0.5)


def dropped(laid: Laid, optimizer: dmuon.Muon) -> None:
    optimizer.zero_grad()
    laid.loss(8).backward()


Edit = Callable[[Laid, dmuon.Muon], Any]
STILL_RIGHT: dict[str, Edit] = {  # what landed last counts
    "nothing": lambda laid, optimizer: None,
    "other lr": other_lr,
    "another backward": lambda laid, optimizer: laid.loss(7).backward(),
    "dropped": dropped,
}
STALE: dict[str, Edit] = {
    "clip": lambda laid, optimizer: dmuon.clip_grad_norm_(laid.model.parameters(), 1e-2),
    "clip by value": lambda laid, optimizer: torch.nn.utils.clip_grad_value_(laid.model.parameters(), 1e-4),
    "clip under a mode": clip_under_a_mode,
    "scaled under a mode": scaled_under_a_mode,
    "scaled in place": scaled_in_place,
    "replaced": replaced,
    "other momentum": other_momentum,
    "l2 decay": l2_decay,
    "edited momentum": edited_momentum,
    "loaded": lambda laid, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}
STEPS = 2  # so that the second begins from what the first has left
FEW = ("nothing", "clip under a mode", "scaled under a mode", "another backward", "l2 decay")


def train(name: str, keep: bool, edit: Edit, overlap: bool) -> tuple[dict[str, Tensor], list[int], int]:
    """Weights and this rank's state, overlapped batches of every step, and batches a step."""
    laid = lay(name, build(), keep=keep)
    optimizer = dmuon.Muon(laid.model, overlap_backward=overlap, **OPTIONS)
    overlapped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        laid.loss(step).backward()
        edit(laid, optimizer)
        optimizer.step()
        overlapped.append(optimizer.last_step.overlapped)
    found = full_state(laid.model)
    for index, values in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": local_tensor(t) for key, t in values.items() if isinstance(t, Tensor)}
    return found, overlapped, optimizer.last_step.ns_batches


def check_overlap(name: str, keep: bool, what: str) -> int:
    """How many batches a step has, all of which overlap if they are still right."""
    edit = (STILL_RIGHT | STALE)[what]
    expected, *_ = train(name, keep, edit, overlap=False)
    found, overlapped, count = train(name, keep, edit, overlap=True)
    with about(what):
        assert_same_tensors(found, expected)
        assert overlapped == [count if what in STILL_RIGHT and name != "tp" else 0] * STEPS, f"of {count} batches"
    return count


@pytest.mark.pitfall("P16", "P34")
@pytest.mark.parametrize(("name", "keep"), [("1d-two-lines", True), *slowly(("1d", False), ("hsdp", False))])
@on_ranks("name", timeout=300)
def test_newton_schulz_in_backward_changes_no_bit(rank: int, world: int, name: str, keep: bool) -> None:
    edits = {"1d": (*STILL_RIGHT, *STALE), "hsdp": FEW[:2]}.get(name, FEW)
    counts = [check_overlap(name, keep, what) for what in edits]
    assert any(counts)


@on_ranks(2)
def test_what_tensor_parallelism_splits_waits_for_the_step(rank: int, world: int) -> None:
    check_overlap("tp", False, "nothing")


# -- publication ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_first_blocks_run_while_late_owners_still_compute(rank: int, world: int) -> None:
    """Rank 1 takes long for every matrix of the last block; when each rank passed what, by one clock."""
    first = lay("1d-two-lines", build())
    plan = dedications(first.model)[0].plan
    plan = replace(plan, chunks=dict.fromkeys(plan.chunks, 1))
    laid = lay("1d-two-lines", build(), plan=plan, costs=None)
    matrices = dedications(laid.model)[0].runtime.matrices()
    late = {id(e.rest) for e in matrices if e.fqn.startswith("blocks.2") and e.rest.owner == 1}
    assert late
    optimizer = dmuon.Muon(laid.model, **OPTIONS)
    original = rounds.orthogonalize

    def slow(numerics: Any, owned: Batch, *others: Any) -> Any:
        if any(id(p) in late for p in owned.params):
            time.sleep(0.4)
        return original(numerics, owned, *others)

    passed: list[float] = []
    laid.train(optimizer, range(1))
    with mock.patch.object(rounds, "orthogonalize", slow):
        laid.train(optimizer, range(1, 2))
        passed.append(time.monotonic())
        hook = laid.model.blocks[0].register_forward_hook(lambda *_: passed.append(time.monotonic()))
        laid.model(laid.mine(batch(2))[0])
        hook.remove()
    of_ranks = of_all_ranks(passed)
    (_, first_block), (end_of_step, _) = of_ranks
    assert first_block < end_of_step, "rank 0 ran its first block only after rank 1 had finished its step"
