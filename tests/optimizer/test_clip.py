"""Clipping: one norm over owned, sharded and replicated gradients, equal to a single process on whole ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from harness.assertions import about, assert_equal_weights
from harness.clipping import (
    MIXED,
    ORDERS,
    Snapshot,
    all_whole,
    laid_out,
    near,
    operations,
    single_process,
    toy,
    true_norm,
    whole,
    with_gradient,
)
from harness.dtensors import local_tensor
from harness.network import is_matrix
from harness.pool import RankPool
from harness.topologies import LAYOUTS as TOPOLOGIES
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.nn.utils import clip_grad_value_ as torch_clip_value
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor

TORCH_ORDERS = [2.0, 0.5, 0.0, math.inf, -math.inf, -1.0]
COLLECTIVES = {"allreduce_", "_allgather_base_", "allgather_", "all_gather_into_tensor", "all_reduce", "broadcast_"}


def on_topology(name: str, rank: int, world: int) -> dict[str, Tensor]:
    laid = laid_out(name, toy())
    laid.backward(0)
    return dict(laid.model.named_parameters())


def by_hand(lay_out: Callable[[int, str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Parameters whose gradients are those of a single process, laid out by ``lay_out(number, name, gradient)``."""
    found = {}
    for number, (name, param) in enumerate(single_process().items()):
        found[name] = with_gradient(lay_out(number, name, param.grad))  # type: ignore[arg-type]
    return found


def on_any_placement(rank: int, world: int) -> dict[str, Tensor]:
    square = init_device_mesh("cpu", (2, 2))
    box = init_device_mesh("cpu", (2, 1, 2))
    strided = _StridedShard(0, split_factor=2)
    choices: list[tuple[DeviceMesh, list[Placement]]] = [
        (square, [Shard(0), Shard(0)]),
        (square, [strided, Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Replicate()]),
        (square, [Replicate(), Replicate()]),
        (square, [Shard(-1), Shard(0)]),
        (square, [Shard(0), Shard(-1)]),
        (box, [Shard(0), Shard(0), Shard(0)]),
        (box, [Shard(-1), Replicate(), strided]),
    ]

    def lay_out(number: int, name: str, grad: Tensor) -> Tensor:
        if number % (len(choices) + 1) == len(choices):
            return grad
        mesh, placements = choices[number % (len(choices) + 1)]
        placements = [Shard(p.dim % grad.ndim) if isinstance(p, Shard) else p for p in placements]
        return distribute_tensor(grad, mesh, placements, src_data_rank=None)

    return by_hand(lay_out)


STOCK = ["fsdp2-hsdp"]
DEDICATED = ["1d-3", "hsdp-two-lines", "ddp-2", "tp-fsdp"]
# The number of ranks; and what gives the parameters of a rank, from its number and the world: collective.
LAYOUTS: dict[str, tuple[int, Callable[[int, int], dict[str, Tensor]]]] = {
    **{name: (TOPOLOGIES[name].world, partial(on_topology, name)) for name in (*DEDICATED, *STOCK)},
    MIXED: (2, partial(on_topology, MIXED)),
    "any placement": (4, on_any_placement),
}


# Every layout, every order.


def clip_every_order(params: dict[str, Tensor]) -> list[float]:
    wholes = all_whole(params)
    assert_equal_weights(wholes, {n: p.grad for n, p in single_process().items() if p.grad is not None})
    snapshot = Snapshot(params.values())
    totals = []
    for order, foreach in zip(ORDERS, itertools.cycle((None, False)), strict=False):
        case = f"order {order}, foreach {foreach}"
        norm = true_norm(wholes.values(), order)
        assert norm > 0, case
        totals.append(float(dmuon.clip_grad_norm_(iter(params.values()), 2 * norm + 1, order, foreach=foreach)))
        assert totals[-1] == near(norm), case
        snapshot.assert_unchanged(case)
        totals.append(float(dmuon.clip_grad_norm_(params.values(), norm / 2, order, foreach=foreach)))
        snapshot.assert_clipped(norm / 2, norm, case)
        snapshot.restore()
    return totals


def norms_of_some(params: dict[str, Tensor]) -> None:
    for name in ("blocks.0.up.bias", "blocks.2.mix.weight", "norm.weight"):
        local_tensor(params[name].grad).zero_()  # type: ignore[arg-type]
    wholes = all_whole(params)
    some = {
        "matrices": [n for n in params if is_matrix(n)],
        "the others": [n for n in params if not is_matrix(n)],
        "one": ["blocks.1.up.weight"],
        "zeros": ["blocks.0.up.bias", "norm.weight"],
        "few": ["blocks.1.up.weight", "embed.weight", "blocks.1.down.bias", "blocks.2.mix.weight"],
    }
    for (case, names), order in itertools.product(some.items(), ORDERS):
        expected = true_norm([wholes[n] for n in names], order)
        found = dmuon.clip_grad_norm_([params[n] for n in names], math.inf, order)
        assert float(found) == near(expected), f"{case}, order {order}"
        if any(isinstance(params[n], OwnedTensor) for n in names):
            stock = torch_clip(params[names[0]] if len(names) == 1 else (params[n] for n in names), math.inf, order)
            assert float(stock) == near(expected), f"{case}, order {order}, by torch"
    for name in ("blocks.0.mix.weight", "blocks.0.up.bias", "embed.weight"):
        params[name].grad = None
        del wholes[name]
    for order in ORDERS:
        clips = [dmuon.clip_grad_norm_]
        if any(isinstance(param, OwnedTensor) for param in params.values()):
            clips.append(torch_clip)
        for clip in clips:
            found = clip(params.values(), math.inf, order)
            assert float(found) == near(true_norm(wholes.values(), order)), f"without some, order {order}"
    for param in params.values():
        param.grad = None
    assert [float(dmuon.clip_grad_norm_(params.values(), 1.0, p)) for p in ORDERS] == [0.0] * len(ORDERS)


def poison(grad: Tensor, holder: int, bad: float) -> None:
    """Put ``bad`` where only the ranks at shard ``holder`` of each dimension see it, if they hold anything."""
    if isinstance(grad, OwnedTensor):
        here = True  # the owner's, which holds all
    elif isinstance(grad, DTensor):
        mesh, at = grad.device_mesh, grad.device_mesh.get_coordinate()
        split = [i for i, p in enumerate(grad.placements) if not p.is_replicate()]
        here = all(at[i] == holder % mesh.size(i) for i in split)  # type: ignore[index]
    else:
        here = True
    if here and local_tensor(grad).numel():
        local_tensor(grad).view(-1)[0] = bad


def clip_nonfinite(params: dict[str, Tensor]) -> None:
    world = dist.get_world_size()
    names = ("blocks.1.up.weight", "blocks.2.up.bias", "embed.weight")
    wholes, clean = all_whole(params), Snapshot(params.values())
    owned = any(isinstance(param, OwnedTensor) for param in params.values())
    clips = [dmuon.clip_grad_norm_, *([torch_clip] if owned else [])]
    for name, (holder, bad) in itertools.product(names, ((0, math.nan), (world - 1, -math.inf))):
        poison(params[name].grad, holder, bad)  # type: ignore[arg-type]
        poisoned, snapshot = wholes | {name: whole(params[name].grad)}, Snapshot(params.values())  # type: ignore[arg-type]
        for order, clip in itertools.product((2.0, math.inf, -math.inf, -1.0, 0.0), clips):
            if order <= 0 and clip is dmuon.clip_grad_norm_:
                continue
            case = f"{bad} in {name}, order {order}, {clip.__module__}"
            norm = true_norm(poisoned.values(), order)
            if not math.isfinite(norm):
                with pytest.raises(RuntimeError, match="norm"):
                    clip(params.values(), 1.0, order, error_if_nonfinite=True)
                snapshot.assert_unchanged(case)
            assert float(clip(params.values(), 1.0, order)) == near(norm), case
            snapshot.assert_clipped(1.0, norm, case)
            snapshot.restore()
        clean.restore()


def clip_values(params: dict[str, Tensor]) -> None:
    snapshot = Snapshot(params.values())
    for limit in (1e-3, 0.0, math.inf):
        with operations() as ran:
            torch_clip_value(iter(params.values()), limit, foreach=False)
        assert not COLLECTIVES & set(ran)
        snapshot.assert_clamped(limit, f"clip_value {limit}")
        snapshot.restore()


# torch's own functions.


def torch_every_order(params: dict[str, Tensor]) -> list[float]:
    """Every norm that torch's functions have found."""
    wholes, snapshot = all_whole(params), Snapshot(params.values())
    totals = []
    for order, foreach in zip(TORCH_ORDERS, itertools.cycle((None, True, False)), strict=False):
        case = f"order {order}, foreach {foreach}"
        norm = true_norm(wholes.values(), order)
        total = torch_clip(iter(params.values()), norm / 2, order, foreach=foreach)
        assert type(total) is Tensor and float(total) == near(norm), case
        totals.append(float(total))
        snapshot.assert_clipped(norm / 2, norm, case)
        snapshot.restore()
    for foreach in (None, True, False):
        norm = true_norm(wholes.values(), 3.0)
        total = get_total_norm([p.grad for p in params.values() if p.grad is not None], 3.0, foreach=foreach)
        clip_grads_with_norm_(params.values(), norm / 3, total, foreach=foreach)
        snapshot.assert_clipped(norm / 3, norm, f"in two calls, foreach {foreach}")
        snapshot.restore()
        torch_clip_value(params.values(), 1e-3, foreach)
        snapshot.assert_clamped(1e-3, f"values, foreach {foreach}")
        snapshot.restore()
    return totals


def nothing_waits_and_foreach_is_obeyed(params: dict[str, Tensor]) -> None:
    for order, foreach in zip((2.0, 0.5, math.inf), itertools.cycle((None, True, False)), strict=False):
        with operations() as names:
            dmuon.clip_grad_norm_(params.values(), 1.0, order, foreach=foreach)
        assert not {"_local_scalar_dense", "is_nonzero", "nonzero"} & set(names), "the host waits for the device"
        assert names.count("allreduce_") == 1
        assert any(name.startswith("_foreach") for name in names) == (foreach is not False)


# What holds of which layouts.
CLAIMS: dict[Callable[[dict[str, Tensor]], Any], list[str]] = {
    clip_every_order: [*LAYOUTS],
    clip_values: [*LAYOUTS],
    clip_nonfinite: [MIXED, "fsdp2-hsdp", "tp-fsdp", "any placement"],
    torch_every_order: [name for name in LAYOUTS if name not in (*STOCK, "any placement")],
    nothing_waits_and_foreach_is_obeyed: ["1d-3", MIXED, "fsdp2-hsdp"],
    norms_of_some: [*LAYOUTS],
}


def run_claims(rank: int, world: int, layout: str) -> dict[str, Any]:
    """Norms that claims about a layout have found; each claim begins with the gradients of one backward."""
    params = LAYOUTS[layout][1](rank, world)
    grads, snapshot = {n: p.grad for n, p in params.items()}, Snapshot(params.values())
    results = {}
    for claim, layouts in CLAIMS.items():
        if layout in layouts:
            for name, param in params.items():
                param.grad = grads[name]
            snapshot.restore()
            with about(claim.__name__):
                results[claim.__name__] = claim(params)
    return results


QUICK = ("ddp-2", "fsdp2-hsdp")


@pytest.mark.pitfall("P10", "P14", "P36", "P37", "P38", "P48")
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_clipping_equals_a_single_process(ranks: RankPool, layout: str) -> None:
    """All that is claimed of a layout runs in one call: laying it out takes most of the time."""
    results = ranks(LAYOUTS[layout][0], run_claims, layout)
    assert all(found == results[0] for found in results), "the same numbers on all ranks"


# Pipeline stages.


def clip_stages(rank: int, world: int, stages: int, empty: tuple[int, ...]) -> list[float]:
    mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    single = single_process()
    full = [s for s in range(stages) if s not in empty]
    mine = {}
    for number, (name, param) in enumerate(single.items()):
        if full and stage == full[number % len(full)]:
            sharded = distribute_tensor(param.grad, mesh["dp"], [Shard(0)], src_data_rank=None)  # type: ignore[arg-type]
            mine[name] = with_gradient(sharded if number % 3 else param.grad)  # type: ignore[arg-type]
    snapshot = Snapshot(mine.values())
    totals = []
    for order in ORDERS:
        norm = true_norm([p.grad for p in single.values() if p.grad is not None] if full else [], order)
        totals.append(float(dmuon.clip_grad_norm_(mine.values(), norm / 2, order, pp_mesh=mesh["pp"])))
        assert totals[-1] == near(norm), order
        snapshot.assert_clipped(norm / 2, norm, f"order {order}")
        snapshot.restore()
    return totals


@pytest.mark.pitfall("P36", "P48")
@pytest.mark.parametrize(("world", "stages", "empty"), [(4, 2, ()), (3, 3, (0, 2))])
def test_stages_of_a_pipeline_count_together(ranks: RankPool, world: int, stages: int, empty: tuple[int, ...]) -> None:
    results = ranks(world, clip_stages, stages, empty)
    assert all(totals == results[0] for totals in results), "the same number on all ranks"
