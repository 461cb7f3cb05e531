"""Owned matrices as ordinary even DTensors, which is what state dicts hold, and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.agreement import agree
from dmuon.comm.context import Comm
from dmuon.dedicated.matrix import OwnedMatrix, matrix_of, tensor_placements
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.platform.torch_private import even_shape, local_tensor

__all__ = ["even_parts", "even_to_owned", "owned_to_even", "write_even"]


def even_parts(length: int, size: int) -> list[int]:
    """Lengths of the parts into which torch's ``Shard`` cuts: ``ceil(length / size)`` each, the last ones less."""
    part = -(-length // size)
    return [max(0, min(part, length - i * part)) for i in range(size)]


def owned_to_even(local: Tensor, entry: OwnedMatrix, comm: Comm) -> DTensor:
    """Copy what an owner holds of ``entry`` into an ordinary even DTensor. Collective over the data-parallel ranks.

    The DTensor is cut by rows over these, or by columns where tensor parallelism has cut the rows.

    Args:
        local: shaped as the master.
    """
    dim, shape = _even_dim(entry), list(entry.local_shape)
    lengths = even_parts(shape[dim], comm.world)
    shape[dim] = lengths[comm.position]
    even = local.new_empty(shape)
    owned = entry.owner == comm.position
    if comm.world == 1:
        even.copy_(local)
    else:
        pieces = [piece.reshape(-1) for piece in local.split(lengths, dim)] if owned else []
        outgoing = torch.cat(pieces) if pieces else local.new_empty(0)
        received = [even.numel() if rank == entry.owner else 0 for rank in range(comm.world)]
        sent = [piece.numel() for piece in pieces] if owned else [0] * comm.world
        with comm.monitor.watch(f"scatter of {entry.fqn!r} for a state dict"):
            dist.all_to_all_single(even.view(-1), outgoing, received, sent, group=comm.group)
    return matrix_of(even, _even_mesh(entry, comm), [Shard(dim), *tensor_placements(entry.tensor)], entry.shape)


def even_to_owned(value: Tensor, entry: OwnedMatrix, comm: Comm, dtype: torch.dtype) -> Tensor:
    """Cut from ``value``, a DTensor or a plain whole tensor, what the master of ``entry`` holds on this rank.

    Collective if ``value`` is a DTensor; its kind must be the same on all ranks. An ``OwnedTensor`` may have another
    owner than ``entry``.
    """
    owned = entry.owner == comm.position
    if not isinstance(value, DTensor):
        part = _tensor_part(value, entry, comm)
        return (part if owned else part[:0]).to(device=comm.device, dtype=dtype, copy=True)
    dim, mesh = _even_dim(entry), _even_mesh(entry, comm)
    placements: list[Placement] = [Shard(dim)]
    if isinstance(value, OwnedTensor):
        mesh = comm.mesh if entry.tensor is None else comm.tensor_mesh
        placements = [Shard(0)] * comm.mesh.ndim
    if value.device_mesh != mesh or list(value.placements) != [*placements, *tensor_placements(entry.tensor)]:
        with comm.monitor.watch(f"gather of {entry.fqn!r} from a state dict"):
            whole = value.full_tensor()
        return even_to_owned(whole, entry, comm, dtype)
    shape = list(entry.local_shape)
    lengths = even_parts(shape[dim], comm.world)
    if isinstance(value, OwnedTensor):
        lengths = [shape[dim] if rank == value.owner else 0 for rank in range(comm.world)]
    local = local_tensor(value).to(device=comm.device, dtype=dtype).contiguous()
    if comm.world == 1:
        return local.clone()
    across = shape[1 - dim]
    received = [length * across if owned else 0 for length in lengths]
    sent = [local.numel() if rank == entry.owner else 0 for rank in range(comm.world)]
    incoming = local.new_empty(sum(received))
    with comm.monitor.watch(f"gather of {entry.fqn!r} from a state dict"):
        dist.all_to_all_single(incoming, local.view(-1), received, sent, group=comm.group)
    if not owned:
        return local.new_empty(entry.master.shape)
    sizes = [(length, across) if dim == 0 else (across, length) for length in lengths]
    return torch.cat([p.view(size) for p, size in zip(incoming.split(received), sizes, strict=True)], dim)


def write_even(
    shard: Tensor, param: OwnedTensor, entry: OwnedMatrix, comm: Comm, fault: Exception | None = None
) -> None:
    """Make the even shards of all ranks, laid out as ``param`` says, the value of the master. Collective.

    Args:
        fault: why this rank cannot; then no rank does.

    Raises:
        ValueError, RuntimeError: on every rank, if some rank cannot.
    """
    mesh, placements = param.device_mesh, param.placements
    shape = even_shape(entry.shape, mesh, placements)
    mismatch = f"{entry.fqn}: an even shard has shape {tuple(shape)} here, not {tuple(shard.shape)}"
    agree(comm.control, mismatch if shard.shape != shape else fault)
    with torch.no_grad():
        local = shard.to(device=comm.device, dtype=entry.master.dtype)
        even = matrix_of(local, mesh, placements, entry.shape)
        entry.master.copy_(even_to_owned(even, entry, comm, entry.master.dtype))


def _even_dim(entry: OwnedMatrix) -> int:
    """The dimension that data parallelism cuts: one that tensor parallelism leaves whole."""
    return 1 if entry.tensor is not None and entry.tensor.placement == Shard(0) else 0


def _even_mesh(entry: OwnedMatrix, comm: Comm) -> DeviceMesh:
    return comm.flat_mesh if entry.tensor is None else comm.flat_tensor_mesh


def _tensor_part(whole: Tensor, entry: OwnedMatrix, comm: Comm) -> Tensor:
    """This tensor-parallel rank's part of a whole matrix."""
    if entry.tensor is None or not isinstance(entry.tensor.placement, Shard):
        return whole
    dim = entry.tensor.placement.dim
    parts: tuple[Tensor, ...] = whole.split(even_parts(whole.shape[dim], comm.topology.tensor), dim)
    return parts[comm.at.t]
