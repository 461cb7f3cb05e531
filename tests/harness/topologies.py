"""Ways to lay a model over up to four ranks, and which part of a batch each rank gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.dedicated.dedication import dedications
from harness.toy import shard


@dataclass(frozen=True)
class Layout:
    """Names and extents of mesh dimensions; ``tp`` is tensor parallel, the others are data parallel."""

    dims: tuple[tuple[str, int], ...]
    fsdp: bool = True

    @property
    def world(self) -> int:
        size = 1
        for _, extent in self.dims:
            size *= extent
        return size

    @property
    def tensor(self) -> int:
        return dict(self.dims).get("tp", 1)


LAYOUTS: dict[str, Layout] = {
    "1d": Layout((("shard", 2),)),
    "1d-4": Layout((("shard", 4),)),
    "1d-two-lines": Layout((("shard", 2),), fsdp=False),
    "hsdp": Layout((("replicate", 2), ("shard", 2))),
    "hsdp-two-lines": Layout((("replicate", 2), ("shard", 2)), fsdp=False),
    "ddp-2": Layout((("replicate", 2),), fsdp=False),
    "ddp-4": Layout((("replicate", 4),), fsdp=False),
    "cp": Layout((("shard", 2), ("cp", 2)), fsdp=False),
    "tp": Layout((("dp", 1), ("tp", 2)), fsdp=False),
    "tp-fsdp": Layout((("shard", 2), ("tp", 2))),
    "tp-two-lines": Layout((("shard", 2), ("tp", 2)), fsdp=False),
    "tp-ddp": Layout((("replicate", 2), ("tp", 2)), fsdp=False),
    "hsdp-tp": Layout((("replicate", 2), ("shard", 2), ("tp", 2))),
}


@dataclass
class Laid:
    """A dedicated model, its mesh, and this rank's part in data parallelism."""

    model: nn.Module
    mesh: DeviceMesh
    rank: int
    world: int

    def part(self, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return shard(tensors, self.rank, self.world)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the blocks of a toy model: uneven columns, uneven rows, and one that is gathered behind."""
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "mix": ColwiseParallel(output_layouts=_replicate()),
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(),
            },
        )


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def lay(
    name: str,
    model: nn.Module,
    *,
    keep: bool = False,
    prepare: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> Laid:
    """Split, dedicate and shard ``model`` as the layout ``name`` says. ``options`` go to ``dedicate_params``."""
    layout = LAYOUTS[name]
    whole = init_device_mesh(
        "cpu", tuple(extent for _, extent in layout.dims), mesh_dim_names=tuple(name for name, _ in layout.dims)
    )
    data = tuple(name for name, _ in layout.dims if name != "tp")
    mesh = whole[data] if len(data) < len(layout.dims) else whole
    if layout.tensor > 1:
        tensor_parallel(model, whole["tp"])
    options.setdefault("costs", "flops")
    dmuon.dedicate_params(model, mesh, reshard_after_forward=not keep, **options)
    if layout.fsdp:
        policy = {"mp_policy": options["mp_policy"]} if options.get("mp_policy") else {}
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not keep, **policy)
        dmuon.fully_shard(model, mesh=mesh, **policy)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    rank = 0
    for position, extent in zip(coordinate, mesh.mesh.shape, strict=True):
        rank = rank * extent + position
    return Laid(model, mesh, rank, mesh.size())


def runtime_of(model: nn.Module) -> Any:
    return dedications(model)[0].runtime
