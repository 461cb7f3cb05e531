"""dmuon on a device with streams, a thread of autograd's and an allocator whose memory comes and goes: the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, build, train
from torch import Tensor

import dmuon
from dmuon.check.topologies import full_state

Ranks = Callable[..., list[Any]]
DEVICES = ("cpu", "pretend")
STEPS = 3
FP32: dict[str, Any] = {"ns_dtype": torch.float32}  # half precision elsewhere than on the CPU, unless one says so


def weights(name: str, device: str, keep: bool, micro: int, muon: dict[str, Any], comm: dict[str, Any]) -> Any:
    """Weights after a few steps, and batches that were orthogonalized during each step's backward."""
    options = {"comm": dmuon.CommOptions(**comm)} if LAYOUTS[name].dedicated else {}
    laid = lay(name, build().to(device), keep=keep, device=torch.device(device), **options)
    if not LAYOUTS[name].dedicated:  # a plan from measured costs takes long here
        laid.config = dmuon.create_dtensor_config(costs="flops")
    optimizer = laid.optimizer(**FP32, **muon)
    overlapped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            laid.backward(micro * step + part)
        optimizer.step()
        overlapped.append(optimizer.last_step.overlapped)
    return {n: t.cpu() for n, t in full_state(laid.model).items()}, overlapped


def compare(_rank: int, _world: int, name: str, keep: bool, micro: int, muon: Any, comm: Any) -> tuple[list[int], Any]:
    """Batches that were orthogonalized during backward on the device, and what differs there, by name."""
    (expected, before), (found, after) = (weights(name, device, keep, micro, muon, comm) for device in DEVICES)
    assert before == after
    assert found.keys() == expected.keys()
    wrong = {n: float((found[n] - t).abs().max()) for n, t in expected.items() if not torch.equal(found[n], t)}
    return after, wrong


OVERLAP = {"overlap_backward": True}
CASES = {
    **{
        f"{name} {'overlap' if muon else 'after backward'}": (name, False, 1, muon, {})
        for name in ("1d-1", "1d", "1d-two-lines", "ddp-2", "hsdp", "tp-fsdp")
        for muon in ({}, OVERLAP)
    },
    **{f"{name}": (name, False, 1, {}, {}) for name in ("fsdp2-1", "fsdp2-2", "fsdp2-hsdp", "fsdp2-tp", "ddp")},
    "whole weights stay": ("1d-two-lines", True, 1, OVERLAP, {}),
    "accumulation": ("hsdp-two-lines", False, 2, OVERLAP, {}),
    "nothing fetched ahead": ("1d-two-lines", False, 1, OVERLAP, {"prefetch": 0}),
    "two blocks fetched ahead": ("1d-two-lines", False, 1, OVERLAP, {"prefetch": 2}),
    "parts of one size": ("1d-two-lines", False, 1, OVERLAP, {"transport": "single"}),
    "one collective after the other": ("1d-two-lines", False, 1, OVERLAP, {"asynchronous": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_toy_trains_to_the_bits_of_the_cpu(device_ranks: Ranks, case: str) -> None:
    name, *how = CASES[case]
    results = device_ranks(LAYOUTS[name].world, compare, name, *how)
    assert [wrong for _, wrong in results] == [{}] * LAYOUTS[name].world
    for overlapped, _ in results:
        assert all(overlapped) if how[2] is OVERLAP and "tp" not in name else not any(overlapped)


def alone(_rank: int, _world: int) -> dict[str, float]:
    found: list[dict[str, Tensor]] = []
    for device in DEVICES:
        model = build().to(device)
        train(model, dmuon.Muon(model, **OPTIONS, **FP32), range(STEPS))
        found.append({n: t.detach().cpu() for n, t in model.state_dict().items()})
    expected, here = found
    return {n: float((here[n] - t).abs().max()) for n, t in expected.items() if not torch.equal(here[n], t)}


def test_one_process_trains_to_the_bits_of_the_cpu(device_ranks: Ranks) -> None:
    assert device_ranks(1, alone) == [{}]
