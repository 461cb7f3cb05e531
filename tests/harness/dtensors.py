"""Matrices that tests lay out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


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


def whole(param: Tensor) -> Tensor:
    found = param.full_tensor() if isinstance(param, DTensor) else param
    return found.detach().clone()


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
