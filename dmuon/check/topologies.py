"""Ways to lay the small model over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.check.model import Network
from dmuon.dedicated.dedication import Dedication, dedications

__all__ = ["TOPOLOGIES", "Grid", "Laid", "grid_of", "lay", "mesh_of"]

TOPOLOGIES = ("1d", "hsdp", "ddp", "cp", "tp", "tp-hsdp", "fsdp2", "fsdp2-hsdp", "fsdp2-tp")


@dataclass(frozen=True, slots=True)
class Grid:
    """Names and extents of mesh dimensions; ``tp`` is tensor parallel, the others are data parallel.

    Attributes:
        dedicated: dmuon owns the matrices; otherwise FSDP2 shards them, and the optimizer exchanges them.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    fsdp: bool = True
    dedicated: bool = True

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(str(extent) for _, extent in self.dims)}"


def grid_of(name: str, world: int, hosts: int) -> Grid | str:
    """The topology ``name`` over ``world`` ranks, with a replica per host if there are several; or why not."""
    replicas = hosts if hosts > 1 and world % hosts == 0 and world > hosts else 2
    match name:
        case "1d":
            return Grid(name, (("shard", world),))
        case "ddp" if world > 1:
            return Grid(name, (("replicate", world),), fsdp=False)
        case "hsdp" if world >= 4 and world % replicas == 0:
            return Grid(name, (("replicate", replicas), ("shard", world // replicas)))
        case "cp" if world >= 4 and world % 2 == 0:
            return Grid(name, (("shard", world // 2), ("cp", 2)), fsdp=False)
        case "tp" if world >= 2 and world % 2 == 0:
            return Grid(name, (("shard", world // 2), ("tp", 2)), fsdp=world > 2)
        case "tp-hsdp" if world >= 8 and world % 4 == 0:
            return Grid(name, (("replicate", 2), ("shard", world // 4), ("tp", 2)))
        case "fsdp2" if world > 1:
            return Grid(name, (("shard", world),), dedicated=False)
        case "fsdp2-hsdp" if world >= 4 and world % replicas == 0:
            return Grid(name, (("replicate", replicas), ("shard", world // replicas)), dedicated=False)
        case "fsdp2-tp" if world >= 4 and world % 2 == 0:
            return Grid(name, (("shard", world // 2), ("tp", 2)), dedicated=False)
    needs = {
        "hsdp": "an even number of at least 4",
        "ddp": "at least 2",
        "cp": "an even number of at least 4",
        "tp": "an even number of",
        "tp-hsdp": "a multiple of 4, at least 8",
        "fsdp2": "at least 2",
        "fsdp2-hsdp": "an even number of at least 4",
        "fsdp2-tp": "an even number of at least 4",
    }
    return f"needs {needs[name]} ranks, here {'are' if world > 1 else 'is'} {world}"


@dataclass(slots=True)
class Laid:
    """A model over all ranks, and which part of the global batch this rank gets."""

    model: nn.Module
    mesh: DeviceMesh
    part: int
    parts: int

    @property
    def dedication(self) -> Dedication:
        return dedications(self.model)[0]

    def mine(self, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, targets = tensors
        return tokens.chunk(self.parts)[self.part], targets.chunk(self.parts)[self.part]


def lay(
    grid: Grid, model: Network, device: torch.device, *, keep: bool, dtype: torch.dtype, timeout: timedelta
) -> Laid:
    """Split, dedicate (if the grid says so) and shard ``model``. Collective over all ranks.

    Args:
        dtype: of owned weights in forward and backward.
    """
    whole = mesh_of(grid, device)
    data = tuple(name for name, _ in grid.dims if name != "tp")
    mesh = whole[data] if len(data) < len(grid.dims) else whole
    if len(data) < len(grid.dims):
        _split(model, whole["tp"])
    if grid.dedicated:
        dmuon.dedicate_params(
            model,
            mesh,
            reshard_after_forward=not keep,
            mp_policy=None if dtype == torch.float32 else MixedPrecisionPolicy(param_dtype=dtype),
            costs="flops",
            comm=dmuon.CommOptions(timeout=timeout),
        )
    if grid.fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        dmuon.fully_shard(model, mesh=mesh)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = 0
    for position, extent in zip(coordinate, mesh.mesh.shape, strict=True):
        part = part * extent + position
    return Laid(model, mesh, part, prod(mesh.mesh.shape))


@cache
def mesh_of(grid: Grid, device: torch.device) -> DeviceMesh:
    """One per grid, as long as the default process group lives: its groups serve all models on it."""
    return init_device_mesh(
        device.type, tuple(extent for _, extent in grid.dims), mesh_dim_names=tuple(name for name, _ in grid.dims)
    )


def _split(model: Network, mesh: DeviceMesh) -> None:
    """Tensor parallelism: columns, rows, and one that is gathered behind."""
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "mix": ColwiseParallel(output_layouts=Replicate()),
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(),
            },
        )
