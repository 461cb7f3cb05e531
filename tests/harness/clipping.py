"""Gradients of the toy model as layouts hold them, and what torch's own functions make of whole ones in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor
from harness.dtensors import local_tensor
from harness.network import Network, loss_of
from harness.on_ranks import of_all_ranks
from harness.topologies import Laid, lay
from harness.toy import batch, build

ORDERS = [2.0, 1.0, 3.5, 0.5, math.inf]
MIXED = "root replicated"  # owned, sharded and plain gradients meet
HIDDEN = 28  # tensor parallelism splits it evenly

Gradients = dict[str, Tensor]


# Layouts of one model: each gives its parameters, by name, with the gradient of one global batch as it lays them out.


def toy() -> Network:
    return build(hidden=HIDDEN)


def single_process() -> dict[str, Tensor]:
    """The parameters of the model on one process, each a plain tensor with its whole gradient."""
    model = toy()
    loss_of(model, *batch(0)).backward()
    return dict(model.named_parameters())


def laid_out(name: str, model: Network) -> Laid:
    if name != MIXED:
        return lay(name, model)
    laid = lay("1d-two-lines" if dist.get_world_size() == 2 else "1d-3-two-lines", model)
    for block in model.blocks:
        dmuon.fully_shard(block, mesh=laid.mesh)
    return laid


def with_gradient(grad: Tensor) -> Tensor:
    param = torch.zeros_like(grad)
    param.grad = grad
    return param


# Oracle: torch's functions on whole gradients, in fp64.


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, on every rank; collective."""
    if not isinstance(tensor, OwnedTensor):
        return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
    parts = of_all_ranks(local_tensor(tensor))
    held = [part for part in parts if part.numel()]
    last = tensor.placements[-1]
    if held[0].shape != tensor.shape:
        assert isinstance(last, Shard)
        return torch.cat(held, last.dim)
    replicas = tensor.device_mesh.size(-1) if last.is_replicate() else 1
    assert len(held) == replicas, f"{tensor.fqn} has {len(held)} owners"
    return held[0]


def all_whole(params: dict[str, Tensor]) -> Gradients:
    return {n: whole(p.grad) for n, p in params.items() if p.grad is not None}


def true_norm(wholes: Iterable[Tensor], order: float) -> float:
    return float(get_total_norm([grad.double() for grad in wholes], order))


class Snapshot:
    """What this rank held of the gradients, and what torch makes of it, given the true norm."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.held = [local_tensor(p.grad) for p in params if p.grad is not None]
        self.copies = [tensor.clone() for tensor in self.held]

    def restore(self) -> None:
        for tensor, copy in zip(self.held, self.copies, strict=True):
            tensor.copy_(copy)

    def assert_unchanged(self, case: str) -> None:
        for tensor, copy in zip(self.held, self.copies, strict=True):
            assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0)), case

    def assert_clipped(self, max_norm: float, norm: float, case: str) -> None:
        expected = [with_gradient(copy.double()) for copy in self.copies]
        clip_grads_with_norm_(expected, max_norm, torch.tensor(norm, dtype=torch.float64))
        self.assert_equal([p.grad for p in expected], case)  # type: ignore[misc]

    def assert_clamped(self, limit: float, case: str) -> None:
        self.assert_equal([copy.double().clamp(-limit, limit) for copy in self.copies], case)

    def assert_equal(self, expected: list[Tensor], case: str) -> None:
        for found, wanted in zip(self.held, expected, strict=True):
            assert torch.allclose(found.double(), wanted, rtol=2e-6, atol=1e-30, equal_nan=True), case


def near(value: float) -> Any:
    return pytest.approx(value, rel=2e-6, abs=0.0, nan_ok=True)


@contextmanager
def operations() -> Iterator[list[str]]:
    """The names of all operations that run inside."""
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield names
