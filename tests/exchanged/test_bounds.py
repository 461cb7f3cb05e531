"""`chunk_bytes` bounds what an owner gets at once, and a link that is measured to be slow counts in who owns what."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.on_ranks import on_ranks
from harness.pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.solver import CostTable
from dmuon.step import update as update_module

SIDE, COUNT = 16, 8
MATRIX_BYTES = 4 * SIDE * SIDE
# Eight at once cost as little as one: a plan that knows no other bound puts all matrices of an owner into one batch.
COSTS: dict[str, Any] = {
    "flat": CostTable({(SIDE, SIDE): {1: 1000, COUNT: 1001}}),
    "alone": CostTable({(SIDE, SIDE): {1: 1000}}),
    "flops": "flops",
}


def matrices(rows: int = SIDE, cols: int = SIDE, count: int = COUNT) -> nn.Module:
    return nn.Sequential(*(nn.Linear(cols, rows, bias=False) for _ in range(count)))


@dataclass(frozen=True)
class Largest:
    """Most bytes of whole matrices in one run of Newton–Schulz, most that one all-to-all brought, and how many ran."""

    batch: int
    arrival: int
    matrices: int


def largest(_rank: int, world: int, chunk_bytes: int, small_numel: int, costs: Any) -> Largest:
    model = matrices()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    config = dmuon.create_dtensor_config(costs=costs, chunk_bytes=chunk_bytes, small_param_numel_threshold=small_numel)
    optimizer = dmuon.Muon(model.parameters(), distributed_config=config)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    batches: list[int] = []
    arrivals: list[int] = []
    run, all_to_all = update_module.run, dist.all_to_all_single

    def counted_run(x: Tensor, *args: Any) -> Tensor:
        batches.append(x.numel() * 4)
        return run(x, *args)

    def counted_all_to_all(received: Tensor, *args: Any, **kwargs: Any) -> Any:
        arrivals.append(received.nbytes)
        return all_to_all(received, *args, **kwargs)

    with (
        mock.patch.object(update_module, "run", counted_run),
        mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
    ):
        optimizer.step()
    return Largest(max(batches), max(arrivals), optimizer.last_step.ns_matrices)


@pytest.fixture(scope="module")
def measured(ranks: RankPool) -> Any:
    @cache
    def of(chunk_bytes: int, small_numel: int, costs: Any) -> list[Largest]:
        return ranks(2, largest, chunk_bytes, small_numel, COSTS[costs])

    return of


@pytest.mark.parametrize(
    ("chunk_bytes", "together"),
    [(1, 1), (2 * MATRIX_BYTES - 1, 1), (2 * MATRIX_BYTES, 2), (2**28, 4)],
)
def test_a_batch_holds_no_more_bytes_than_a_chunk(measured: Any, chunk_bytes: int, together: int) -> None:
    for rank in measured(chunk_bytes, 0, "flat"):
        assert rank.matrices == COUNT // 2
        assert rank.batch == together * MATRIX_BYTES
        assert rank.arrival == together * MATRIX_BYTES // 2, "the other half of each lies on the owner"


@pytest.mark.parametrize(("chunk_bytes", "together"), [(1, 1), (2 * MATRIX_BYTES, 2), (2**28, 4)])
def test_small_matrices_share_rounds_up_to_a_chunk(measured: Any, chunk_bytes: int, together: int) -> None:
    for rank in measured(chunk_bytes, SIDE * SIDE, "alone"):
        assert rank.batch == MATRIX_BYTES, "what was measured one by one is orthogonalized so"
        assert rank.arrival == together * MATRIX_BYTES // 2


@pytest.mark.parametrize(("ns_per_byte", "beside_the_wide_one"), [(None, 1), (16.0, 0)])
@on_ranks(2)
def test_what_a_measured_byte_costs_decides_who_owns_what(
    rank: int, world: int, ns_per_byte: float | None, beside_the_wide_one: int
) -> None:
    """Of one wide matrix and three square ones, equally dear, if every byte takes so long; None: no time."""
    model = nn.Sequential(*matrices(SIDE, 16 * SIDE, 1), *matrices(count=3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    config = dmuon.create_dtensor_config(costs=CostTable({(SIDE, side): {1: 100_000} for side in (SIDE, 16 * SIDE)}))

    def link(received: Tensor, *_args: Any, **_kwargs: Any) -> None:
        if ns_per_byte is not None:
            time.sleep(1e-9 * ns_per_byte * received.nbytes)

    with mock.patch.object(dist, "all_to_all_single", link):
        dmuon.Muon(model.parameters(), distributed_config=config)
    wide, *squares = (config.state["assignments"][i] for i in range(4))
    assert squares.count(wide) == beside_the_wide_one, f"owners {wide} and {squares}"
