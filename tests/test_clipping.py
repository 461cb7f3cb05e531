"""Clipping: one norm over owned, sharded and replicated gradients, equal to a single process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_ as torch_clip
from toy import Reference, Toy, assert_equal_weights, batch, build, full_state, is_matrix, loss_of, shard

import dmuon
from dmuon.owned_tensor import OwnedTensor

OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.1, "ns_coefficients": "classic"}
STEPS = 4
MAX_NORM = 0.5  # below the norm of every step, so that each one is clipped
ORDERS = [1.0, 2.0, 3.0, math.inf]
FSDP, TWO_LINES, MIXED = "fsdp2", "two-lines", "root-replicated"


def dedicated(rank: int, world: int, mode: str) -> Toy:
    model = build()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops")
    if mode != TWO_LINES:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
    if mode == FSDP:  # otherwise owned, sharded and plain gradients meet
        dmuon.fully_shard(model, mesh=mesh)
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: local(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def whole(total: Tensor) -> float:
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def clipped_run(rank: int, world: int, mode: str, stock: bool) -> tuple[dict[str, Tensor], list[float]]:
    model = dedicated(rank, world, mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    clip = torch_clip if stock else dmuon.clip_grad_norm_
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        norms.append(whole(clip(model.parameters(), MAX_NORM)))
        assert whole(clip(model.parameters(), math.inf)) == pytest.approx(MAX_NORM, rel=1e-5)
        optimizer.step()
    return full_state(model), norms


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Tensor], list[float]]:
    model = build()
    optimizer = Reference(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        norms.append(float(torch_clip(model.parameters(), MAX_NORM)))
        optimizer.step()
    assert min(norms) > 1.2 * MAX_NORM
    return dict(model.state_dict()), norms


@pytest.mark.pitfall("P34", "P36")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_torch_clipping_equals_single_process(
    ranks: RankPool, reference: tuple[dict[str, Tensor], list[float]], world: int
) -> None:
    for weights, norms in ranks(world, clipped_run, FSDP, True):
        assert norms == pytest.approx(reference[1], rel=1e-5)
        assert_equal_weights(weights, reference[0])


@pytest.mark.pitfall("P34", "P36", "P37")
@pytest.mark.parametrize(("mode", "world"), [(FSDP, 3), (TWO_LINES, 2), (TWO_LINES, 4), (MIXED, 3)])
def test_dmuon_clipping_equals_single_process(
    ranks: RankPool, reference: tuple[dict[str, Tensor], list[float]], mode: str, world: int
) -> None:
    results = ranks(world, clipped_run, mode, False)
    for weights, norms in results:
        assert norms == pytest.approx(reference[1], rel=1e-5)
        assert norms == results[0][1], "the same number on all ranks"
        assert_equal_weights(weights, reference[0])


def norms_of_orders(rank: int, world: int, mode: str) -> dict[str, list[float]]:
    model = dedicated(rank, world, mode)
    loss_of(model, *shard(batch(0), rank, world)).backward()
    before = gradients(model)
    params = dict(model.named_parameters())
    found = {"all": [float(dmuon.clip_grad_norm_(model.parameters(), 1e9, p)) for p in ORDERS]}
    owned = [p for p in params.values() if isinstance(p, OwnedTensor)]
    rest = [p for p in params.values() if not isinstance(p, OwnedTensor)]
    found["owned"] = [float(dmuon.clip_grad_norm_(iter(owned), 1e9, p)) for p in ORDERS]
    found["rest"] = [float(dmuon.clip_grad_norm_(rest, 1e9, p)) for p in ORDERS]
    found["one"] = [float(dmuon.clip_grad_norm_(params["blocks.1.up.weight"], 1e9, p)) for p in ORDERS]
    assert all(torch.equal(g, before[n]) for n, g in gradients(model).items()), "below the limit nothing changes"
    for name in ("blocks.0.mix.weight", "blocks.0.up.bias", "embed.weight"):
        params[name].grad = None
    found["some"] = [float(dmuon.clip_grad_norm_(model.parameters(), 1e9, p)) for p in ORDERS]
    model.zero_grad()
    found["none"] = [float(dmuon.clip_grad_norm_(model.parameters(), 1e9, p)) for p in ORDERS]
    return found


@pytest.mark.pitfall("P36", "P37")
@pytest.mark.parametrize(("mode", "world"), [(FSDP, 2), (FSDP, 4), (TWO_LINES, 3), (MIXED, 2)])
def test_norms_of_every_order_equal_single_process(ranks: RankPool, mode: str, world: int) -> None:
    model = build()
    loss_of(model, *batch(0)).backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}

    def norms(names: list[str]) -> list[float]:
        flat = torch.cat([grads[n].flatten() for n in names])
        return [float(torch.linalg.vector_norm(flat, p)) for p in ORDERS]

    missing = ("blocks.0.mix.weight", "blocks.0.up.bias", "embed.weight")
    expected = {
        "all": norms(list(grads)),
        "owned": norms([n for n in grads if is_matrix(n)]),
        "rest": norms([n for n in grads if not is_matrix(n)]),
        "one": norms(["blocks.1.up.weight"]),
        "some": norms([n for n in grads if n not in missing]),
        "none": [0.0] * len(ORDERS),
    }
    for found in ranks(world, norms_of_orders, mode):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-5), name


def clip_nonfinite(rank: int, world: int, kind: str, bad: float, norm_type: float) -> list[tuple[bool, bool]]:
    """Poison one element that only one rank holds, each rank in turn."""
    model = dedicated(rank, world, MIXED)
    found = []
    for holder in range(world):
        param = model.blocks[2].up.bias
        if kind == "owned":
            param = next(p for p in model.parameters() if isinstance(p, OwnedTensor) and p.owner == holder)
        model.zero_grad()
        loss_of(model, *shard(batch(0), rank, world)).backward()
        if rank == holder:
            local(param.grad).view(-1)[0] = bad  # type: ignore[arg-type]
        before = gradients(model)
        with pytest.raises(RuntimeError, match="norm"):
            dmuon.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        same = all(torch.equal(g.nan_to_num(7.0), before[n].nan_to_num(7.0)) for n, g in gradients(model).items())
        total = dmuon.clip_grad_norm_(model.parameters(), 1.0, norm_type)
        found.append((same, bool(total.isnan() if math.isnan(bad) else total.isinf())))
    return found


@pytest.mark.pitfall("P36", "P38")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("kind", ["owned", "sharded"])
def test_nonfinite_gradients_are_reported_on_every_rank(
    ranks: RankPool, kind: str, norm_type: float, bad: float
) -> None:
    assert ranks(3, clip_nonfinite, kind, bad, norm_type) == [[(True, True)] * 3] * 3


def stock_inf_norm(rank: int, world: int) -> None:
    model = dedicated(rank, world, FSDP)
    loss_of(model, *shard(batch(0), rank, world)).backward()
    torch_clip(model.parameters(), 1.0, norm_type=math.inf)


@pytest.mark.pitfall("P36", "P48")
def test_torch_inf_norm_is_refused_by_name(ranks: RankPool) -> None:
    ranks(3, stock_inf_norm, timeout=20.0, expect=RuntimeError, match=r"dmuon\.clip_grad_norm_")


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_orders_without_a_norm_are_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match="norm_type"):
        dmuon.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0, norm_type)


@pytest.mark.pitfall("P36")
def test_plain_tensors_clip_as_in_torch() -> None:
    for norm_type in ORDERS:
        ours, theirs = build(), build()
        for model in (ours, theirs):
            loss_of(model, *batch(0)).backward()
        total = dmuon.clip_grad_norm_(ours.parameters(), 0.1, norm_type)
        expected = torch_clip(theirs.parameters(), 0.1, norm_type)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
        for mine, stock in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, stock.grad, rtol=1e-5, atol=0.0)
    assert float(dmuon.clip_grad_norm_([], 1.0)) == 0.0


@pytest.mark.pitfall("P35")
def test_half_precision_gradients_do_not_overflow_the_norm() -> None:
    param = nn.Parameter(torch.zeros(300, dtype=torch.float16))
    param.grad = torch.full_like(param, 1e4)  # the sum of squares, 3e10, is beyond fp16
    total = dmuon.clip_grad_norm_(param, 1.0)
    assert total.dtype == torch.float32 and float(total) == pytest.approx(1e4 * math.sqrt(300), rel=1e-3)
    assert float(param.grad.float().norm()) == pytest.approx(1.0, rel=1e-2)


def scaled_gradients(rank: int, world: int, factor: float) -> dict[str, Tensor]:
    model = dedicated(rank, world, FSDP)
    optimizer = dmuon.Muon(model, **OPTIONS)
    loss_of(model, *shard(batch(0), rank, world)).backward()
    total = dmuon.clip_grad_norm_(model.parameters(), math.inf)
    dmuon.clip_grad_norm_(model.parameters(), factor * float(total))
    optimizer.step()
    return full_state(model)


@pytest.mark.pitfall("P34")
def test_clipping_scales_gradients_and_not_the_update(ranks: RankPool) -> None:
    """The first update of either route does not depend on the scale of the gradient, so clipping must not change it."""
    plain, clipped = ranks(2, scaled_gradients, 2.0)[0], ranks(2, scaled_gradients, 0.25)[0]
    start = build().state_dict()
    moved = {n: plain[n] - start[n] for n in plain if is_matrix(n)}
    assert_equal_weights({n: clipped[n] - start[n] for n in moved}, moved, 1e-4)
