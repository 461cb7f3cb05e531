"""Ways to lay the small model over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.check.model import Network, shard
from dmuon.dedicated.dedication import Dedication, dedications

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
        return f"{self.name} {'x'.join(map(str, self.extents))}"

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(extent for _, extent in self.dims)

    @property
    def world(self) -> int:
        return prod(self.extents)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """A new one. Collective over all ranks."""
        return init_device_mesh(device.type, self.extents, mesh_dim_names=tuple(name for name, _ in self.dims))


def grid_of(name: str, world: int, hosts: int) -> Grid | str:
    """The topology ``name`` over ``world`` ranks, with a replica per host if there are several; or why not."""
    replicas = hosts if hosts > 1 and world % hosts == 0 and world > hosts else 2
    one, half, tp = ("shard", world), ("shard", world // 2), ("tp", 2)
    hsdp = (("replicate", replicas), ("shard", world // replicas))
    # By name: the least number of ranks, and one that divides it.
    least, divisor, grid = {
        "1d": (1, 1, Grid(name, (one,))),
        "hsdp": (4, replicas, Grid(name, hsdp)),
        "ddp": (2, 1, Grid(name, (("replicate", world),), fsdp=False)),
        "cp": (4, 2, Grid(name, (half, ("cp", 2)), fsdp=False)),
        "tp": (2, 2, Grid(name, (half, tp), fsdp=world > 2)),
        "tp-hsdp": (8, 4, Grid(name, (("replicate", 2), ("shard", world // 4), tp))),
        "fsdp2": (2, 1, Grid(name, (one,), dedicated=False)),
        "fsdp2-hsdp": (4, replicas, Grid(name, hsdp, dedicated=False)),
        "fsdp2-tp": (4, 2, Grid(name, (half, tp), dedicated=False)),
    }[name]
    if world >= least and world % divisor == 0:
        return grid
    words = {2: "at least 2", 4: "an even number of at least 4", 8: "a multiple of 4, at least 8"}
    needs = "an even number of" if name == "tp" else words[least]
    return f"needs {needs} ranks, here {'are' if world > 1 else 'is'} {world}"


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
        return shard(tensors, self.part, self.parts)


def lay(
    grid: Grid,
    model: Network,
    mesh: DeviceMesh,
    *,
    keep: bool = False,
    sharding: Mapping[str, Any] = MappingProxyType({}),
    **dedication: Any,
) -> Laid:
    """Split, dedicate (if the grid says so) and shard ``model``. Collective over all ranks.

    Args:
        mesh: of the grid.
        keep: whole weights stay after forward.
        sharding: further options of ``fully_shard``.
        dedication: further options of ``dedicate_params``.
    """
    data = tuple(name for name, _ in grid.dims if name != "tp")
    along = mesh[data] if 0 < len(data) < len(grid.dims) else mesh
    if len(data) < len(grid.dims):
        tensor_parallel(model, mesh["tp"])
    if grid.dedicated:
        dmuon.dedicate_params(model, along, reshard_after_forward=not keep, **dedication)
    if grid.fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=along, reshard_after_forward=not keep, **sharding)
        dmuon.fully_shard(model, mesh=along, **sharding)
    part, parts = 0, 1
    for name, extent in grid.dims:
        if name != "tp":
            part, parts = part * extent + mesh.get_local_rank(name), parts * extent
    return Laid(model, along, part, parts)


@cache
def mesh_of(grid: Grid, device: torch.device) -> DeviceMesh:
    """One per grid, as long as the default process group lives: its groups serve all models on it."""
    return grid.mesh(device)


def tensor_parallel(model: Network, mesh: DeviceMesh) -> None:
    """Split the blocks: columns, rows, and one that is gathered behind."""
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


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors on every rank, by stock means. Collective."""
    state = {name: t for name, t in get_model_state_dict(model).items() if isinstance(t, Tensor)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}
