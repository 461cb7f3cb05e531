"""Distributed steps equal a single process with ``torch.optim.Muon`` + ``torch.optim.AdamW``."""

from __future__ import annotations

import pytest
import torch
from harness.assertions import assert_equal_weights, assert_same_bits
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import runtime_of
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.check.model import loss_of, shard
from dmuon.check.topologies import full_state


def train(
    rank: int,
    world: int,
    fsdp: bool = True,
    keep: bool = False,
    micro: int = 1,
    no_sync: bool = False,
    steps: int = 5,
) -> tuple[dict[str, Tensor], int, int]:
    model = build(seed=rank)  # different on purpose: rank 0's weights become everyone's
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not keep)
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        dmuon.fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **OPTIONS)
    calls = 0
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = shard(batch(step), rank, world)
        for i, (t, y) in enumerate(zip(tokens.chunk(micro), targets.chunk(micro), strict=True)):
            sync = i == micro - 1 or not no_sync
            dmuon.set_requires_gradient_sync(model, sync)
            (loss_of(model, t, y) / micro).backward()
        optimizer.step()
        calls += optimizer.last_step.ns_matrices
    assert {entry.master.dtype for entry in runtime_of(model).entries()} == {torch.float32}
    return full_state(model), calls, len(dmuon.owned_parameters(model))


@pytest.mark.pitfall("P01", "P11", "P14", "P53")
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])  # 4 ranks: test_parity.py
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "two-lines"])
def test_five_steps_equal_single_process(ranks: RankPool, world: int, keep: bool, fsdp: bool) -> None:
    results = ranks(world, train, fsdp, keep)
    expected = reference_weights()
    for weights, _, _ in results:
        assert_equal_weights(weights, expected)
    assert_same_bits([weights for weights, *_ in results])
    owned = results[0][2]
    assert owned == 9
    assert sum(calls for _, calls, _ in results) == 5 * owned, "every matrix is orthogonalized once a step"


@pytest.mark.pitfall("P12")
@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "two-lines"])
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
def test_accumulation_equals_one_big_batch(ranks: RankPool, no_sync: bool, fsdp: bool, keep: bool) -> None:
    results = ranks(2, train, fsdp, keep, 3, no_sync)
    expected = reference_weights()
    for weights, calls, owned in results:
        assert_equal_weights(weights, expected)
        assert calls <= 5 * owned
    assert_same_bits([weights for weights, *_ in results])
    assert sum(calls for _, calls, _ in results) == 5 * 9, "once a step, not once a micro-batch"
