"""Matrices that tests lay out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(value: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a value that all ranks have; without a mesh a plain tensor."""
    if mesh is None:
        return value.clone()
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def parameter(value: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement] = ()) -> nn.Parameter:
    return nn.Parameter(spread(value, mesh, placements))


def give(param: Tensor, grad: Tensor) -> None:
    """Let ``param`` have a gradient of which all ranks have the whole."""
    on_mesh = isinstance(param, DTensor)
    param.grad = spread(grad, param.device_mesh, param.placements) if on_mesh else grad.clone()


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, no copy: of an owned parameter, too, whose ``to_local`` is for writing."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(param: Tensor) -> Tensor:
    found = param.full_tensor() if isinstance(param, DTensor) else param
    return found.detach().clone()


def placements_of(world: int, ndim: int) -> list[tuple[tuple[int, ...], list[Placement]]]:
    """Extents of a mesh, and placements of a tensor of ``ndim`` dimensions on it: a line, and a square of four."""
    line = [((world,), [placement]) for placement in (*map(Shard, range(ndim)), Replicate())]
    if world != 4:
        return line
    square: list[list[Placement]] = [
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(ndim - 1), Shard(ndim - 2)],
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
    ]
    return line + [((2, 2), placements) for placements in square]


def functions_of_whole_tensors() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The simplest ``gather_fn`` and ``redistribute_fn`` that a user may write; both for DTensors."""
    laid: dict[int, tuple[torch.Size, DeviceMesh, Sequence[Placement]]] = {}

    def gather(update: DTensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        laid[state["current_param_idx"]] = update.shape, update.device_mesh, update.placements
        found = update.full_tensor()
        return found if dist.get_rank() == dst_rank else None

    def redistribute(update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        shape, mesh, placements = laid[state["current_param_idx"]]
        found = torch.empty(shape) if update is None else update.contiguous()
        dist.broadcast(found, src_rank)
        return spread(found, mesh, placements)

    return gather, redistribute


@contextmanager
def no_whole_tensors() -> Any:
    """Raise where anything asks a DTensor for its whole, or for another placement."""

    def refuse(self: DTensor, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"a step redistributes a DTensor of shape {tuple(self.shape)}")

    kept = DTensor.full_tensor, DTensor.redistribute
    DTensor.full_tensor, DTensor.redistribute = refuse, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        DTensor.full_tensor, DTensor.redistribute = kept  # type: ignore[method-assign]
