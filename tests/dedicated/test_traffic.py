"""Collectives, their bytes and live memory equal the formulas, on every topology."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from harness.dtensors import local_tensor
from harness.network import loss_of
from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import batch, build
from harness.traffic import Amount, Traffic, live_bytes
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.report.accounting import dedicated_messages, expected_memory, totals

OPERATORS = {
    ("fill", "publish"): ("broadcast_", "_allgather_base_"),
    ("reduce",): ("reduce_", "_reduce_scatter_base_"),
    ("gather", "scatter"): ("alltoall_base_",),
}


CASES = [
    ("1d-two-lines", False, 1, "broadcast"),
    ("1d-two-lines", False, 3, "single"),
    ("hsdp-two-lines", False, 1, "broadcast"),
    pytest.param("hsdp-two-lines", True, 2, "single", marks=pytest.mark.slow),
    ("ddp-2", False, 3, "single"),
    ("tp", False, 1, "auto"),
]


@pytest.mark.pitfall("P12", "P13", "P26")
@pytest.mark.parametrize(("layout", "keep", "micro", "transport"), CASES)
@on_ranks("layout")
def test_collectives_and_bytes_equal_the_formula(
    rank: int, world: int, layout: str, keep: bool, micro: int, transport: Any
) -> None:
    laid = lay(layout, build(), keep=keep, comm=dmuon.CommOptions(transport=transport))
    model = laid.model
    optimizer = dmuon.Muon(model)
    tokens, targets = laid.mine(batch(0))
    for _ in range(2):
        with Traffic() as traffic:
            for i in range(micro):
                dmuon.set_requires_gradient_sync(model, i == micro - 1)
                loss_of(model, tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    amounts, expected = traffic.by_operator(), totals(dedicated_messages(dedications(model)[0].runtime, micro))
    for purposes, operators in OPERATORS.items():
        counted = [amounts.get(operator, Amount()) for operator in operators]
        found = sum(a.operations for a in counted), sum(a.nbytes for a in counted)
        wanted = tuple(map(sum, zip(*(expected.get(p, (0, 0)) for p in purposes), strict=True)))
        assert found == wanted, f"{purposes}: {found} calls and bytes, the formula says {wanted}; all: {amounts}"


def _live_storage_down_to(limit: float) -> int:
    """What is live once it is at most ``limit``, or after 5 s.

    Gloo's thread lets go of the last collective's tensors when it comes to run.
    """
    deadline = time.monotonic() + 5
    while (live := live_bytes()) > limit and time.monotonic() < deadline:
        time.sleep(0.1)
    return live


def _local_bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


@pytest.mark.pitfall("P59")
@pytest.mark.parametrize(
    ("layout", "keep", "half"),
    [
        ("1d-two-lines", False, False),
        ("1d", True, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("hsdp", True, True), ("tp-fsdp", False, False))),
    ],
)
@on_ranks("layout")
def test_live_memory_equals_the_formula(rank: int, world: int, layout: str, keep: bool, half: bool) -> None:
    before = live_bytes()
    torch.manual_seed(0)
    model = build(layers=6, hidden=512)
    whole = sum(p.numel() * 4 for p in model.parameters())
    original = weakref.ref(model.blocks[0].up.weight)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    laid = lay(layout, model, keep=keep, mp_policy=policy)
    optimizer = dmuon.Muon(laid.model)
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            laid.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = expected_memory(dedications(laid.model)[0].runtime)
    rest = sum(_local_bytes(p) for p in laid.model.parameters() if not hasattr(p, "owner"))
    expected = sum(memory.values()) + 3 * rest
    live = _live_storage_down_to(before + 1.05 * expected) - before
    assert 0.95 * expected <= live <= 1.05 * expected, f"{live} bytes live, {expected} expected, model {whole}"
    assert original() is None, "the tensors from before dedication are not kept alive"
    del laid, optimizer, model
    left = _live_storage_down_to(before + 0.02 * whole) - before
    assert left <= 0.02 * whole, f"{left} bytes outlive the model"
