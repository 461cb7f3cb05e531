"""Work that overlaps changes no bit, and what must not wait does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.pool import RankPool
from harness.topologies import LAYOUTS, Laid, lay
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dmuon
from dmuon.check.topologies import full_state
from dmuon.dedicated.dedication import dedications
from dmuon.step import rounds
from dmuon.step.batches import Batch

# -- Newton-Schulz during backward ---------------------------------------------------------------------------------


def nothing(laid: Laid, optimizer: dmuon.Muon) -> None:
    pass


def clip(laid: Laid, optimizer: dmuon.Muon) -> None:
    dmuon.clip_grad_norm_(laid.model.parameters(), 1e-2)


def clip_by_value(laid: Laid, optimizer: dmuon.Muon) -> None:
    dmuon.clip_grad_value_(laid.model.parameters(), 1e-4)


def another_backward(laid: Laid, optimizer: dmuon.Muon) -> None:
    laid.loss(7).backward()


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


def other_lr(laid: Laid, optimizer: dmuon.Muon) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def edited_momentum(laid: Laid, optimizer: dmuon.Muon) -> None:
    for param in dmuon.owned_parameters(laid.model):
        optimizer.state[param]["momentum_buffer"].mul_(0.5)


def replaced_momentum(laid: Laid, optimizer: dmuon.Muon) -> None:
    for param in dmuon.owned_parameters(laid.model):
        state = optimizer.state[param]
        state["momentum_buffer"] = torch.ones_like(state["momentum_buffer"])


def some_replaced_and_others_edited(laid: Laid, optimizer: dmuon.Muon) -> None:
    owned = sorted(dmuon.owned_parameters(laid.model), key=lambda param: param.fqn)
    state = optimizer.state[owned[0]]
    state["momentum_buffer"] = torch.ones_like(state["momentum_buffer"])
    for param in owned[1:]:
        optimizer.state[param]["momentum_buffer"].mul_(0.5)


def loaded(laid: Laid, optimizer: dmuon.Muon) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def dropped(laid: Laid, optimizer: dmuon.Muon) -> None:
    optimizer.zero_grad()
    laid.loss(8).backward()


def dropped_by_the_model(laid: Laid, optimizer: dmuon.Muon) -> None:
    laid.model.zero_grad()
    laid.loss(8).backward()


STILL_RIGHT = [nothing, other_lr, another_backward, dropped, dropped_by_the_model]  # what landed last counts
STALE = [
    clip, clip_by_value, scaled_in_place, replaced, other_momentum, edited_momentum, replaced_momentum,
    some_replaced_and_others_edited, loaded,
]  # fmt: skip


def train(
    _rank: int, _world: int, name: str, keep: bool, edits: list[Callable[[Laid, dmuon.Muon], None]]
) -> list[tuple[str, bool, list[int], int]]:
    """Per edit: its name, whether overlapping changed no bit, overlapped batches of every step, and batches a step."""
    found = []
    for edit in edits:
        states, overlapped, count = [], [], 0
        for overlap in (False, True):
            laid = lay(name, build(), keep=keep)
            optimizer = dmuon.Muon(laid.model, overlap_backward=overlap, **OPTIONS)
            for step in range(3):
                optimizer.zero_grad()
                laid.loss(step).backward()
                edit(laid, optimizer)
                optimizer.step()
                if overlap:
                    overlapped.append(optimizer.last_step.overlapped)
                    count = optimizer.last_step.ns_batches
            states.append((full_state(laid.model), optimizer.state_dict()["state"]))
        same = all(torch.equal(states[0][0][n], t) for n, t in states[1][0].items())
        for index, values in states[0][1].items():
            for key, value in values.items():
                other = states[1][1][index][key]
                if isinstance(value, Tensor):
                    value, other = (getattr(t, "_local_tensor", t) for t in (value, other))
                    same = same and torch.equal(value, other)
        found.append((edit.__name__, same, overlapped, count))
    return found


@pytest.mark.pitfall("P16", "P34")
@pytest.mark.parametrize(
    ("name", "keep"),
    [
        pytest.param("1d", False, marks=pytest.mark.slow),
        ("1d-two-lines", True),
        pytest.param("hsdp", False, marks=pytest.mark.slow),
        ("ddp-2", False),
    ],
)
def test_newton_schulz_in_backward_changes_no_bit(ranks: RankPool, name: str, keep: bool) -> None:
    edits = STILL_RIGHT + STALE if name == "1d" else [nothing, clip, another_backward]
    for results in ranks(LAYOUTS[name].world, train, name, keep, edits, timeout=100):
        for edit, same, overlapped, count in results:
            assert same, f"{edit}: weights or momentum differ"
            right = edit in {e.__name__ for e in STILL_RIGHT}
            assert overlapped == [count if right else 0] * 3, f"{edit}: {overlapped} of {count} batches overlapped"
    assert any(count for _, _, _, count in results)


def test_what_tensor_parallelism_splits_waits_for_the_step(ranks: RankPool) -> None:
    for results in ranks(2, train, "tp", False, [nothing]):
        assert results[0][1] and results[0][2] == [0, 0, 0]


# -- publication ---------------------------------------------------------------------------------------------------


def late_owner(rank: int, _world: int) -> dict[str, float]:
    """Rank 1 takes a second for every matrix of the last block; when each rank passed what, by one clock."""
    first = lay("1d-two-lines", build())
    plan = dedications(first.model)[0].plan
    plan = replace(plan, chunks=dict.fromkeys(plan.chunks, 1), variants={})
    laid = lay("1d-two-lines", build(), plan=plan, costs=None)
    late = {
        id(e.rest)
        for e in dedications(laid.model)[0].runtime.matrices()
        if e.fqn.startswith("blocks.2") and e.owner == 1
    }
    optimizer = dmuon.Muon(laid.model, **OPTIONS)
    original = rounds.orthogonalize
    times: dict[str, float] = {}

    def slow(group: Any, owned: Batch, run_of: Any, momentum: Any, timer: Any) -> Any:
        if any(id(p) in late for p in owned.params):
            time.sleep(1.0)
        return original(group, owned, run_of, momentum, timer)

    rounds.orthogonalize = slow  # type: ignore[assignment]
    try:
        for step in range(2):
            optimizer.zero_grad()
            laid.loss(step).backward()
            optimizer.step()
            times["end of step"] = time.monotonic()
        hook = laid.model.blocks[0].register_forward_hook(lambda *_: times.update({"first block": time.monotonic()}))
        laid.model(laid.mine(batch(2))[0])
        hook.remove()
    finally:
        rounds.orthogonalize = original
    times["owns late ones"] = float(len(late)) if rank == 1 else 0.0
    return times


def test_first_blocks_run_while_late_owners_still_compute(ranks: RankPool) -> None:
    fast, slow = ranks(2, late_owner)
    assert slow["owns late ones"] > 0
    assert fast["first block"] < slow["end of step"], (
        "rank 0 ran its first block only after rank 1 had finished its step"
    )


def profiled(_rank: int, _world: int, name: str) -> set[str]:
    laid = lay(name, build())
    optimizer = dmuon.Muon(laid.model, **OPTIONS)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for step in range(2):
            laid.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {event.name for event in found.events() if event.name.startswith("dmuon::")}


def test_the_profiler_shows_phases_and_blocks(ranks: RankPool) -> None:
    for names in ranks(4, profiled, "hsdp"):
        for block in ("blocks.0", "blocks.1", "blocks.2"):
            for phase in ("fill", "wait_fill", "publish", "reduce", "wait_reduce"):
                assert f"dmuon::{phase} {block}" in names
    for names in ranks(2, profiled, "tp"):
        assert {"dmuon::momentum", "dmuon::exchange", "dmuon::ns", "dmuon::apply", "dmuon::adamw"} <= names
