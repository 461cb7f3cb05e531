"""Pieces that travel normalized and in half precision: what arrives, what it is worth, and how it is agreed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_close
from harness.dtensors import give, noise, parameter, whole
from harness.on_ranks import assert_same_over_ranks, on_ranks
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dmuon
from dmuon.check.topologies import full_state
from dmuon.step import rounds

STEPS = 3
HALF = (torch.float16, torch.bfloat16)


def trained(name: str, **options: Any) -> dict[str, Tensor]:
    laid = lay(name, build())
    optimizer = laid.optimizer(**options)
    for step in range(STEPS):
        laid.backward(step)
        optimizer.step()
        optimizer.zero_grad()
    return full_state(laid.network)


def arrivals(_rank: int, _world: int, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole matrices have norm 1 when they arrive, so each part counted once, also where there are copies."""
    seen: list[Tensor] = []
    sums = [0]
    orthogonalize, reduce = rounds.orthogonalize_whole, dist.all_reduce

    def observed(group: Any, batch: Any, x: Tensor, timer: Any, *, norms: Tensor | None = None) -> Any:
        assert norms is not None and x.dtype == dtype
        seen.append(torch.linalg.vector_norm(x.float(), dim=(1, 2)))
        return orthogonalize(group, batch, x, timer, norms=norms)

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sums[0] += tensor.dtype == torch.float64
        return reduce(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "orthogonalize_whole", observed)
        patch.setattr(dist, "all_reduce", counted)
        weights = trained(name, ns_dtype=dtype)
    assert_same_over_ranks(weights)
    found = torch.cat(seen) if seen else torch.ones(1)
    assert (found - 1).abs().max() <= 1e-2, found
    assert sums[0] == STEPS, "one all-reduce a step, of the norms of all matrices"
    start, exact = full_state(build()), trained(name)
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "sent_normalized", lambda *_: False)
        by_owner = trained(name, ns_dtype=dtype)
    for key, weight in weights.items():
        change = (exact[key] - start[key]).norm()
        assert (weight - exact[key]).norm() <= 0.1 * change, key
        assert (weight - by_owner[key]).norm() <= 0.05 * change, f"{key}: owners would divide to the same"


def observed_arrivals(rank: int, world: int, name: str, dtype: torch.dtype) -> None:
    patch = pytest.MonkeyPatch()
    try:
        arrivals(rank, world, name, dtype, patch)
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fsdp2-2", torch.float16),
        ("fsdp2-hsdp", torch.bfloat16),
        ("fsdp2-tp", torch.float16),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in ("fsdp2-2", "fsdp2-4", "fsdp2-hsdp", "fsdp2-tp", "tp-alone", "replicate-fsdp", "tp")
            for dtype in HALF
        ),
    ],
)
def test_matrices_arrive_with_norm_one(ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    ranks(LAYOUTS[name].world, observed_arrivals, name, dtype)


@pytest.mark.pitfall("P19", "P38", "P48")
@pytest.mark.parametrize("dtype", HALF)
@on_ranks(2)
def test_a_nan_stays_in_its_matrix_and_what_is_missing_is_zero(rank: int, world: int, dtype: torch.dtype) -> None:
    """Of four matrices: one good, one zero, one with NaN in one rank's part, one of which a rank has no gradient."""
    mesh = init_device_mesh("cpu", (world,))
    change: dict[Any, list[Tensor]] = {}
    for ns_dtype in (None, dtype):
        params = [parameter(noise(i, 6, 4), mesh, [Shard(0)]) for i in range(4)]
        config = dmuon.create_dtensor_config(costs="flops")
        optimizer = dmuon.Muon(params, lr=0.1, weight_decay=0.0, distributed_config=config, ns_dtype=ns_dtype)
        grads = [noise(10 + i, 6, 4) for i in range(4)]
        grads[1].zero_()
        grads[2][5, 3] = torch.nan
        for param, grad in zip(params, grads, strict=True):
            give(param, grad)
        if rank == 1:
            params[3].grad = None
        before = [copy.deepcopy(whole(p)) for p in params]
        optimizer.step()
        change[ns_dtype] = [whole(p) - b for p, b in zip(params, before, strict=True)]
    for exact, found in zip(change[None], change[dtype], strict=True):
        assert torch.equal(exact.isnan(), found.isnan())
    good, zero, broken, missing = change[dtype]
    assert not zero.any() and broken.isnan().all()
    limit = 0.02 if dtype == torch.float16 else 0.1
    assert_close(good, change[None][0], "good", limit)
    assert_close(missing, change[None][3], "missing on a rank", limit)
