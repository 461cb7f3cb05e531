"""Ways to lay a model over up to eight ranks, in both residencies, and which part of a batch each rank gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from dmuon import DistributedConfig, create_devicemesh_config, create_dtensor_config, create_processgroup_config
from dmuon.dedicated.dedication import dedications
from harness.dtensors import local_tensor
from harness.network import Network, loss_of, shard, shard_blocks, tensor_parallel
from harness.toy import CPU, OPTIONS, batch


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

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(extent for _, extent in self.dims)

    @property
    def world(self) -> int:
        return prod(self.extents)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """A new one. Collective over all ranks."""
        return init_device_mesh(device.type, self.extents, mesh_dim_names=tuple(name for name, _ in self.dims))


_EXCHANGED: dict[str, Any] = {"dedicated": False}
_ALONE: dict[str, Any] = {"fsdp": False}  # no FSDP2: dmuon replicates what it does not own
_WRAPPED: dict[str, Any] = {"dedicated": False, "fsdp": False}  # see WRAPPERS

LAYOUTS = {
    grid.name: grid
    for grid in (
        Grid("1d-1", (("shard", 1),)),
        Grid("1d-1-two-lines", (("shard", 1),), **_ALONE),
        Grid("1d", (("shard", 2),)),
        Grid("1d-two-lines", (("shard", 2),), **_ALONE),
        Grid("1d-3", (("shard", 3),)),
        Grid("1d-3-two-lines", (("shard", 3),), **_ALONE),
        Grid("1d-4", (("shard", 4),)),
        Grid("1d-4-two-lines", (("shard", 4),), **_ALONE),
        Grid("hsdp", (("replicate", 2), ("shard", 2))),
        Grid("hsdp-two-lines", (("replicate", 2), ("shard", 2)), **_ALONE),
        Grid("ddp-2", (("replicate", 2),), **_ALONE),
        Grid("ddp-4", (("replicate", 4),), **_ALONE),
        Grid("cp", (("shard", 2), ("cp", 2)), **_ALONE),
        Grid("tp", (("dp", 1), ("tp", 2)), **_ALONE),
        Grid("tp-fsdp", (("shard", 2), ("tp", 2))),
        Grid("tp-two-lines", (("shard", 2), ("tp", 2)), **_ALONE),
        Grid("tp-ddp", (("replicate", 2), ("tp", 2)), **_ALONE),
        Grid("hsdp-tp", (("replicate", 2), ("shard", 2), ("tp", 2))),
        Grid("fsdp2-1", (("shard", 1),), **_EXCHANGED),
        Grid("fsdp2-2", (("shard", 2),), **_EXCHANGED),
        Grid("fsdp2-3", (("shard", 3),), **_EXCHANGED),
        Grid("fsdp2-4", (("shard", 4),), **_EXCHANGED),
        Grid("fsdp2-hsdp", (("replicate", 2), ("shard", 2)), **_EXCHANGED),
        Grid("tp-alone", (("tp", 2),), **_WRAPPED),
        Grid("fsdp2-tp", (("shard", 2), ("tp", 2)), **_EXCHANGED),
        Grid("fsdp2-hsdp-tp", (("replicate", 2), ("shard", 2), ("tp", 2)), **_EXCHANGED),
        Grid("ddp", (("replicate", 2),), **_WRAPPED),
        Grid("ddp-of-3", (("replicate", 3),), **_WRAPPED),
        Grid("ddp-inside", (("replicate", 2),), **_WRAPPED),
        Grid("replicate-ddp", (("replicate", 2),), **_WRAPPED),
        Grid("replicate-fsdp", (("replicate", 2),), **_WRAPPED),
        Grid("cp-groups", (("cp", 2), ("fsdp", 2)), **_WRAPPED),
        Grid("cp-mesh", (("cp", 2), ("fsdp", 2)), **_WRAPPED),
    )
}
EXCHANGED = [name for name, grid in LAYOUTS.items() if not grid.dedicated]


@dataclass(slots=True)
class Laid:
    """A model as a user would pass it to ``dmuon.Muon``.

    Attributes:
        part, parts: which of a global batch this rank gets.
        network: the same parameters under the names of the toy.
        config: for the optimizer.
        reduce: what the user's program does to gradients after backward.
    """

    model: nn.Module
    mesh: DeviceMesh
    part: int
    parts: int
    network: Network
    config: DistributedConfig | None = None
    reduce: Callable[[], None] = field(default=lambda: None)

    def mine(self, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return shard(tensors, self.part, self.parts)

    def loss(self, step: int) -> Tensor:
        """Of this rank's part of a global batch."""
        tokens, targets = self.mine(batch(step))
        return loss_of(self.model, tokens.to(self.mesh.device_type), targets.to(self.mesh.device_type))

    def backward(self, step: int) -> None:
        self.loss(step).backward()
        self.reduce()

    def train(self, optimizer: dmuon.Muon, steps: Iterable[int]) -> None:
        """Step on this rank's part of each of these global batches."""
        for step in steps:
            optimizer.zero_grad()
            self.backward(step)
            optimizer.step()

    def optimizer(self, **options: Any) -> dmuon.Muon:
        return dmuon.Muon(self.model, distributed_config=self.config, **{**OPTIONS, **options})


def orthogonalized(optimizer: dmuon.Muon, backward: Callable[[int], None], steps: int) -> list[int]:
    """Train; how many matrices this rank orthogonalized in each step."""
    calls = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
        calls.append(optimizer.last_step.ns_matrices)
    return calls


def lay(
    name: str,
    model: Network,
    *,
    keep: bool = False,
    mp_policy: Any = None,
    device: torch.device = CPU,
    split: Callable[[Network, DeviceMesh], None] = tensor_parallel,
    **options: Any,
) -> Laid:
    """Spread ``model``, which is on ``device``, as the layout ``name`` says. Collective.

    Args:
        mp_policy: of dmuon and of FSDP2.
        split: over tensor-parallel ranks.
        options: of ``dedicate_params``, or of the configuration.
    """
    grid = LAYOUTS[name]
    options.setdefault("costs", "flops")
    sharding = {} if mp_policy is None else {"mp_policy": mp_policy}
    mesh = grid.mesh(device)
    data = tuple(name for name, _ in grid.dims if name != "tp")
    along = mesh[data] if 0 < len(data) < len(grid.dims) else mesh
    if len(data) < len(grid.dims):
        split(model, mesh["tp"])
    if grid.dedicated:
        dmuon.dedicate_params(model, along, reshard_after_forward=not keep, **sharding, **options)
    if grid.fsdp:
        for block in getattr(model, "blocks", ()):
            dmuon.fully_shard(block, mesh=along, reshard_after_forward=not keep, **sharding)
        dmuon.fully_shard(model, mesh=along, **sharding)
    part, parts = 0, 1
    for dim, extent in grid.dims:
        if dim != "tp":
            part, parts = part * extent + mesh.get_local_rank(dim), parts * extent
    laid = Laid(model, along, part, parts, model)
    if not grid.dedicated:
        WRAPPERS.get(name, _by_dtensors)(laid, options)
    return laid


class Wrapped(nn.Module):
    """A model of which one submodule is everything."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens)


def _by_dtensors(laid: Laid, options: dict[str, Any]) -> None:
    laid.config = create_dtensor_config(**options)


def _ddp(laid: Laid, _options: dict[str, Any]) -> None:  # nothing is said to the optimizer
    laid.model = nn.parallel.DistributedDataParallel(laid.network)


def _ddp_inside(laid: Laid, _options: dict[str, Any]) -> None:
    laid.model = Wrapped(nn.parallel.DistributedDataParallel(laid.network))


def _replicated(laid: Laid, _options: dict[str, Any]) -> None:
    replicate(laid.network)


def _replicated_with_fsdp(laid: Laid, options: dict[str, Any]) -> None:
    shard_blocks(laid.network, laid.mesh, replicate_with_fsdp)
    _by_dtensors(laid, options)


def _context_parallel(laid: Laid, options: dict[str, Any], by_mesh: bool) -> None:
    """FSDP2 along one dimension, of which the other has copies that DTensors know nothing of."""
    mesh = laid.mesh
    shard_blocks(laid.network, mesh["fsdp"])
    if by_mesh:
        laid.config = create_devicemesh_config(mesh, ("cp", "fsdp"), **options)
    else:
        groups = {"fsdp_pg": mesh.get_group("fsdp"), "cp_pg": mesh.get_group("cp")}
        laid.config = create_processgroup_config(**groups, **options)
    laid.reduce = partial(_average, laid.network, mesh.get_group("cp"))


def _average(model: nn.Module, group: dist.ProcessGroup) -> None:
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        grad = local_tensor(param.grad)
        dist.all_reduce(grad, group=group)
        grad.div_(dist.get_world_size(group))


WRAPPERS: dict[str, Callable[[Laid, dict[str, Any]], None]] = {
    "ddp": _ddp,
    "ddp-of-3": _ddp,
    "ddp-inside": _ddp_inside,
    "replicate-ddp": _replicated,
    "replicate-fsdp": _replicated_with_fsdp,
    "cp-groups": partial(_context_parallel, by_mesh=False),
    "cp-mesh": partial(_context_parallel, by_mesh=True),
}


def runtime_of(model: nn.Module) -> Any:
    return dedications(model)[0].runtime
