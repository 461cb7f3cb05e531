"""Pieces that travel normalized and in half precision: what arrives, what it is worth, and how it is agreed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_close
from harness.dtensors import give, noise, parameter, whole
from harness.network import full_state
from harness.on_ranks import assert_same_over_ranks, on_ranks, slowly
from harness.topologies import lay
from harness.toy import build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dmuon
from dmuon.step import rounds

STEPS = 2
HALF = (torch.float16, torch.bfloat16)


def trained(name: str, **options: Any) -> dict[str, Tensor]:
    laid = lay(name, build())
    laid.train(laid.optimizer(**options), range(STEPS))
    return full_state(laid.network)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("fsdp2-2", torch.float16),
        ("fsdp2-hsdp", torch.bfloat16),
        *slowly(("fsdp2-tp", torch.float16)),
    ],
)
@on_ranks("layout")
def test_matrices_arrive_with_norm_one(rank: int, world: int, layout: str, dtype: torch.dtype) -> None:
    """Whole ones, so each part counted once, also where there are copies."""
    seen: list[Tensor] = []
    sums = [0]
    orthogonalize, reduce = rounds.ExchangedRound.orthogonalize, dist.all_reduce

    def observed(numerics: Any, batch: Any, run_of: Any, x: Tensor, norms: Tensor, timer: Any) -> Any:
        assert numerics.storage == dtype and torch.equal(x, x.to(dtype).to(x.dtype))
        seen.append(torch.linalg.vector_norm(x.float(), dim=(1, 2)))
        return orthogonalize(numerics, batch, run_of, x, norms, timer)

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sums[0] += tensor.dtype == torch.float64
        return reduce(tensor, *args, **kwargs)

    with (
        mock.patch.object(rounds.ExchangedRound, "orthogonalize", staticmethod(observed)),
        mock.patch.object(dist, "all_reduce", counted),
    ):
        weights = trained(layout, ns_dtype=dtype)
    assert_same_over_ranks(weights)
    found = torch.cat(seen) if seen else torch.ones(1)
    assert (found - 1).abs().max() <= 1e-2, found
    assert sums[0] == STEPS, "one all-reduce a step, of the norms of all matrices"
    start, exact, numerics = full_state(build()), trained(layout), rounds.numerics_of
    with mock.patch.object(rounds, "numerics_of", lambda *args: replace(numerics(*args), sent_normalized=False)):
        by_owner = trained(layout, ns_dtype=dtype)
    for key, weight in weights.items():
        change = (exact[key] - start[key]).norm()
        assert (weight - exact[key]).norm() <= 0.1 * change, key
        assert (weight - by_owner[key]).norm() <= 0.05 * change, f"{key}: owners would divide to the same"


def changes(
    lay_out: Callable[[], list[nn.Parameter]],
    give_all: Callable[[int, list[nn.Parameter]], None],
    dtypes: Sequence[torch.dtype | None],
    steps: int = 2,
) -> tuple[list[Tensor], list[Tensor]]:
    """What some steps add to weights: exactly, and where parameters, in turn, travel in these dtypes."""
    found = []
    for half in (False, True):
        params = lay_out()
        groups: list[dict[str, Any]] = [
            {"params": params[i :: len(dtypes)], "use_muon": True, **({"ns_dtype": dtype} if half else {})}
            for i, dtype in enumerate(dtypes)
        ]
        config = dmuon.create_dtensor_config(costs="flops")
        optimizer = dmuon.Muon(groups, lr=0.1, weight_decay=0.0, distributed_config=config)
        before = list(map(whole, params))
        for step in range(steps):
            give_all(step, params)
            optimizer.step()
        found.append([whole(p) - b for p, b in zip(params, before, strict=True)])
    return found[0], found[1]


def assert_like_exact(exactly: list[Tensor], halves: list[Tensor], limit: float) -> None:
    for exact, half in zip(exactly, halves, strict=True):
        sides = exact.shape[-2:]
        for number, (x, y) in enumerate(zip(exact.reshape(-1, *sides), half.reshape(-1, *sides), strict=True)):
            assert (x - y).norm() <= limit * x.norm(), f"matrix {number} of {tuple(exact.shape)}"


@pytest.mark.pitfall("P19", "P38", "P48")
@pytest.mark.parametrize("dtype", HALF)
@on_ranks(2)
def test_a_nan_stays_in_its_matrix_and_what_is_missing_is_zero(rank: int, world: int, dtype: torch.dtype) -> None:
    """Of four matrices: one good, one zero, one with NaN in one rank's part, one of which a rank has no gradient."""
    mesh = init_device_mesh("cpu", (world,))

    def give_all(_step: int, params: list[nn.Parameter]) -> None:
        grads = [noise(10 + i, 6, 4) for i in range(4)]
        grads[1].zero_()
        grads[2][5, 3] = torch.nan
        for param, grad in zip(params, grads, strict=True):
            give(param, grad)
        if rank == 1:
            params[3].grad = None

    exact, found = changes(
        lambda: [parameter(noise(i, 6, 4), mesh, [Shard(0)]) for i in range(4)], give_all, [dtype], 1
    )
    for x, y in zip(exact, found, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
    good, zero, broken, missing = found
    assert not zero.any() and broken.isnan().all()
    limit = 0.02 if dtype == torch.float16 else 0.1
    assert_close(good, exact[0], "good", limit)
    assert_close(missing, exact[3], "missing on a rank", limit)


@pytest.mark.parametrize(
    ("world", "dims", "shape", "placements", "dtype"),
    [
        # Each matrix is whole on one rank, and the other knows nothing of it.
        (2, (2,), (5, 6, 8), [Shard(0)], torch.float16),
        (4, (2, 2), (4, 6, 8), [Shard(0), Shard(1)], torch.float16),
        (4, (2, 2), (3, 6, 8), [Replicate(), Shard(0)], torch.bfloat16),
        *slowly(
            (4, (2, 2), (5, 6, 8), [Shard(0), Shard(0)], torch.bfloat16),
        ),
    ],
)
@on_ranks()
def test_matrices_of_stacks_keep_norms_of_their_own(
    rank: int, world: int, dims: tuple[int, ...], shape: tuple[int, ...], placements: Any, dtype: torch.dtype
) -> None:
    """Of some a million times others'."""
    mesh = init_device_mesh("cpu", dims)

    def lay_out() -> list[nn.Parameter]:
        matrix = parameter(noise(2, 6, 8), mesh, [Shard(0)] * len(dims))
        return [parameter(noise(1, *shape), mesh, placements), matrix, parameter(noise(3, *shape), mesh, placements)]

    def give_all(_step: int, params: list[nn.Parameter]) -> None:
        for i, param in enumerate(params):
            scales = torch.logspace(-3, 3, shape[0]).reshape(-1, 1, 1) if i != 1 else 1.0
            give(param, noise(10 + i, *param.shape) * scales)

    assert_like_exact(*changes(lay_out, give_all, [dtype]), 0.02 if dtype == torch.float16 else 0.15)


PLACES = ("all", "experts", "data", "cut experts", "tensor", "all", "data", "cut experts")


def _placed(index: int, where: str, mesh: DeviceMesh) -> nn.Parameter:
    shape, of_mesh, placements = {
        "all": ((8, 12), mesh, [Shard(0), Shard(0)]),
        "tensor": ((8, 16), mesh, [Shard(0), Shard(1)]),
        "data": ((6, 10), mesh["data"], [Shard(1)]),
        "experts": ((4, 6, 8), mesh["experts"], [Shard(0)]),
        "cut experts": ((4, 6, 8), mesh["experts"], [Shard(1)]),
    }[where]
    return parameter(noise(index, *shape), of_mesh, placements)


@on_ranks(4)
def test_ranks_of_several_domains_add_up_norms_in_one_order(rank: int, world: int) -> None:
    missing = {2: 3, 4: 0}  # of a parameter a rank that has no gradient
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))

    def give_all(step: int, params: list[nn.Parameter]) -> None:
        for i, param in enumerate(params):
            give(param, noise(10 + i + 100 * step, *param.shape))
            if missing.get(i) == rank:
                param.grad = None

    def lay_out() -> list[nn.Parameter]:
        return [_placed(i, where, mesh) for i, where in enumerate(PLACES)]

    assert_like_exact(*changes(lay_out, give_all, (torch.float16, None, torch.bfloat16)), 0.15)
