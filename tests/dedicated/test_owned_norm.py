"""Norms of owned tensors in a user's program: in logs, on one rank, and how often they communicate."""

from __future__ import annotations

import copy
import io
import math
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.dtensors import local_tensor
from harness.network import Network, is_matrix, loss_of
from harness.on_ranks import on_ranks
from harness.topologies import Laid, lay
from harness.toy import batch, build
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate

from dmuon.dedicated.owned_tensor import OwnedTensor

TOLERANCE = 2e-6
foreach_norm = torch._foreach_norm  # what torch's own clipping calls


def laid_out(name: str) -> tuple[Laid, Network]:
    """A model with gradients, and the same one on one process."""
    laid, single = lay(name, build(hidden=28)), build(hidden=28)
    laid.backward(0)
    loss_of(single, *batch(0)).backward()
    return laid, single


def owned_pairs(laid: Laid, single: Network) -> list[tuple[OwnedTensor, Tensor]]:
    expected = dict(single.named_parameters())
    pairs = [(p, expected[n]) for n, p in laid.network.named_parameters() if isinstance(p, OwnedTensor)]
    assert len(pairs) == sum(map(is_matrix, expected))
    return pairs


@pytest.mark.pitfall("P36", "P54")
@on_ranks(2)
def test_norms_that_a_program_logs_are_those_of_one_process(rank: int, world: int) -> None:
    laid, single = laid_out("1d")
    for owned, whole in owned_pairs(laid, single)[::4]:
        assert owned.grad is not None and whole.grad is not None
        for mine, other in ((owned.grad, whole.grad), (owned, whole), (owned.detach(), whole), (owned.data, whole)):
            reads: dict[str, Any] = {
                "float": lambda t: float(torch.linalg.vector_norm(t)),
                "list": lambda t: t.norm().tolist(),
                "copy": lambda t: float(copy.deepcopy(t.detach().norm())),
                "largest": lambda t: t.norm(math.inf).item(),
                "count": lambda t: torch.linalg.vector_norm(t, 0).item(),
                "foreach": lambda t: float(foreach_norm([t.detach()], 1)[0]),
                "comparison": lambda t: bool(t.norm() > 0),
            }
            for name, read in reads.items():
                assert read(mine) == pytest.approx(read(other), rel=TOLERANCE), name
            for norm in (mine.norm(), foreach_norm([mine])[0]):
                assert norm.redistribute(placements=[Replicate()]).to_local().item() == norm.full_tensor().item()
                assert norm.to_local().item() == pytest.approx(other.norm().item(), rel=TOLERANCE)
        mine = owned.grad.to_local()
        assert type(mine) is Tensor and torch.equal(mine, local_tensor(owned.grad))
        with pytest.raises(CheckpointException, match=r"saving of .* would return wrong data"):
            dcp.save({"gradient": owned.grad}, storage_writer=mock.Mock())
    kept = io.BytesIO()
    torch.save({"norm": laid.network.blocks[0].up.weight.grad.norm()}, kept)
    kept.seek(0)
    assert type(torch.load(kept)["norm"]) is Tensor


@pytest.mark.pitfall("P36")
@pytest.mark.parametrize(
    ("layout", "reductions", "foreach"),
    [("1d", 1, True), pytest.param("hsdp", 2, None, marks=pytest.mark.slow), ("tp", 1, None)],
)
@on_ranks("layout")
def test_a_norm_tells_on_every_rank_whether_all_elements_are_finite(
    rank: int, world: int, layout: str, reductions: int, foreach: bool | None
) -> None:
    """Also if an element that only one of them has is not. Other numbers are refused on the rank that asks.

    Clipping by torch communicates as often for many owned matrices as for one.
    """
    laid, single = laid_out(layout)
    for (owned, whole), spoilt in zip(owned_pairs(laid, single), cycle((None, math.nan, math.inf, -math.inf))):
        assert isinstance(owned.grad, OwnedTensor) and whole.grad is not None
        if spoilt is not None:
            whole.grad[0, 0] = spoilt
            local = local_tensor(owned.grad)
            if local.numel() and (layout != "tp" or owned.placements[-1].is_replicate() or rank == 0):
                local[0, 0] = spoilt
        for order in (2.0, math.inf):
            expected = whole.grad.norm(order).item()
            assert owned.grad.norm(order).item() == pytest.approx(expected, rel=TOLERANCE, nan_ok=True)
    matrices = [p for p in laid.network.parameters() if isinstance(p, OwnedTensor)]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        torch.nn.utils.clip_grad_norm_(matrices, 1.0, foreach=foreach)
    assert len(matrices) > 5 and all_reduce.call_count == reductions
    if rank == 0:
        for ask in (lambda t: t.abs().max(), lambda t: t.isnan().any(), lambda t: t.sum(), lambda t: t.amax(dim=1)):
            with pytest.raises(
                RuntimeError, match=r"is not available on .*take norm\(\), which all ranks have together"
            ):
                ask(owned.grad)


@pytest.mark.pitfall("P36", "P14")
@on_ranks(2)
def test_lists_of_all_kinds_are_scaled_added_and_cleared_in_one_call(rank: int, world: int) -> None:
    laid, single = laid_out("1d")
    params = dict(laid.network.named_parameters())
    grads = [p.grad for p in params.values()] + [torch.full((3,), 2.0)]
    wholes = [p.grad for p in single.parameters()] + [torch.full((3,), 2.0)]
    kinds = {type(grad) for grad in grads}
    assert kinds == {OwnedTensor, DTensor, Tensor}
    owned = next(grad for grad in grads if isinstance(grad, OwnedTensor))

    def norms(tensors: list[Any]) -> list[float]:
        return [float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in tensors]

    same = "the same list"
    for name, *operands in (
        ("mul_", torch.tensor(0.5)), ("div_", 3.0), ("add_", same), ("clamp_max_", 1e-3), ("addcmul_", same, same, 0.5)
    ):  # fmt: skip
        for tensors in (grads, wholes):
            operate = getattr(torch, f"_foreach_{name}")
            operate(tensors, *(tensors if operand is same else operand for operand in operands))
        assert norms(foreach_norm(grads)) == pytest.approx(norms(foreach_norm(wholes)), rel=TOLERANCE), name
    with pytest.raises(RuntimeError, match="laid out otherwise; lay both out alike"):
        torch._foreach_add_([owned, *grads], [grads[-1], *grads])
    torch._foreach_zero_(grads)
    assert norms(foreach_norm(grads)) == [0.0] * len(grads)
    dist.barrier()
