"""What clipping takes and returns: plain tensors as in torch, every dtype, and what it refuses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.clipping import ORDERS, operations, single_process, with_gradient
from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import build
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip

import dmuon


@pytest.mark.pitfall("P36")
@pytest.mark.parametrize("foreach", [None, True, False])
def test_plain_tensors_clip_as_in_torch(foreach: bool | None) -> None:
    for order in ORDERS:
        ours, theirs = single_process(), single_process()
        total = dmuon.clip_grad_norm_(ours.values(), 0.1, order, foreach=foreach)
        expected = torch_clip(theirs.values(), 0.1, order, foreach=foreach)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
        for mine, stock in zip(ours.values(), theirs.values(), strict=True):
            torch.testing.assert_close(mine.grad, stock.grad, rtol=1e-5, atol=0.0)
    assert float(dmuon.clip_grad_norm_([], 1.0)) == 0.0
    one = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    one.grad = torch.tensor([3.0, 4.0j])
    assert float(dmuon.clip_grad_norm_(one, 1.0, foreach=foreach)) == pytest.approx(5.0)


@pytest.mark.pitfall("P35")
def test_half_precision_gradients_do_not_overflow_the_norm() -> None:
    param = nn.Parameter(torch.zeros(300, dtype=torch.float16))
    param.grad = torch.full_like(param, 1e4)  # the sum of squares, 3e10, is beyond fp16
    total = dmuon.clip_grad_norm_(param, 1.0)
    assert total.dtype == torch.float32 and float(total) == pytest.approx(1e4 * math.sqrt(300), rel=1e-3)
    assert float(param.grad.float().norm()) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.pitfall("P35")
def test_a_mixture_of_dtypes_loses_nothing() -> None:
    grads = [torch.full((2,), 3.0, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float16)]
    assert dmuon.clip_grad_norm_(map(with_gradient, grads), 1e9).dtype == torch.float32
    small = torch.full((1,), 2.0**-40, dtype=torch.float64)
    total = dmuon.clip_grad_norm_(map(with_gradient, [*grads, small]), 1e9, 1.0)
    assert total.dtype == torch.float64 and float(total) == 18.0 + 2.0**-40


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        *(((1.0, order), "norm_type") for order in (math.nan, 0.0, -math.inf)),
        ((-1.0,), "max_norm"),
        ((math.nan,), "max"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments: tuple[float, ...], match: str) -> None:
    param = with_gradient(torch.ones(2))
    with pytest.raises(ValueError, match=match):
        dmuon.clip_grad_norm_([param], *arguments)
    assert param.grad is not None and param.grad.tolist() == [1.0, 1.0]


@pytest.mark.pitfall("P36", "P48")
@on_ranks(2)
def test_gradients_that_are_not_summed_are_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    sharded = with_gradient(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
    partial_sum = with_gradient(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    with operations() as ran, pytest.raises(ValueError, match=r"number 1 of shape \(3,\).*Partial"):
        dmuon.clip_grad_norm_([sharded, partial_sum], 1.0)
    assert "allreduce_" not in ran


@pytest.mark.pitfall("P36", "P48")
@on_ranks(3)
def test_meshes_over_which_no_rank_can_count_are_refused(rank: int, world: int) -> None:
    pair = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        outside = with_gradient(DTensor.from_local(torch.ones(0, 3), pair, [Shard(0)], run_check=False))
        with pytest.raises(ValueError, match="without this rank"):
            dmuon.clip_grad_norm_([outside], 1.0)
    with pytest.raises(ValueError, match="pp_mesh"):
        dmuon.clip_grad_norm_([], 1.0, pp_mesh=init_device_mesh("cpu", (1, world)))


@pytest.mark.parametrize("lacking", [{0: (0,), 1: (1,)}, {0: (), 1: (0, 1, 2)}])
@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_counts_where_it_is(rank: int, world: int, lacking: dict[int, Any]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for order, expected in ((2.0, torch.linalg.vector_norm), (math.inf, lambda x: x.abs().max())):
        params = [nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])) for _ in range(3)]
        for number, param in enumerate(params):
            if number not in lacking[rank]:
                param.grad = DTensor.from_local(torch.full((2, 3), number + 1.0), mesh, [Shard(0)])
        there = [torch.full((6,), n + 1.0) for one in lacking.values() for n in range(3) if n not in one]
        total = dmuon.clip_grad_norm_(params, 1.0, order)
        torch.testing.assert_close(total, expected(torch.cat(there)), rtol=1e-6, atol=0.0)
        for number, param in enumerate(params):
            assert (param.grad is None) == (number in lacking[rank])
            if param.grad is not None:
                clipped = torch.full((2, 3), (number + 1.0)) / total
                torch.testing.assert_close(param.grad.to_local(), clipped, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("order", [2.0, math.inf])
@on_ranks(2)
def test_lists_that_meet_other_lists_are_refused_and_clip_nothing(rank: int, world: int, order: float) -> None:
    """Also where only one rank asks, such as for a log; and lists of the same shapes, whose names an optimizer knows.

    Within a list any order will do.
    """
    mesh = init_device_mesh("cpu", (world,))
    wholes = [torch.full(shape, shape[0] + 0.5) for shape in [(2, 3), (4,), (5, 2)]]
    params = [with_gradient(distribute_tensor(whole, mesh, [Shard(0)])) for whole in wholes]
    refused = partial(
        pytest.raises, RuntimeError, match=r"ranks \[0, 1\] join norms of different .* calls in one order"
    )
    for lists in ((params[:2], params[:1]), (params[:2], params[1:])):
        with refused():
            dmuon.clip_grad_norm_(lists[rank], 1.0, order)
    total = dmuon.clip_grad_norm_(params[:: 1 - 2 * rank], 1e9, order)
    expected = torch.linalg.vector_norm(torch.cat([whole.flatten() for whole in wholes]), order)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0.0)
    laid = lay("fsdp2-2", build())
    laid.backward(0)
    optimizer = laid.optimizer()
    with refused():
        dmuon.clip_grad_norm_(laid.network.blocks[rank].parameters(), 1.0, order)
    optimizer.step()
