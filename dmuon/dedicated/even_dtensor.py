"""Owned matrices as ordinary even DTensors, which is what state dicts hold, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.agreement import agree
from dmuon.comm.context import Comm
from dmuon.comm.domain import redistribute
from dmuon.dedicated.matrix import OwnedMatrix, as_dtensor, tensor_placements
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.layout.parcels import Parcel, Route
from dmuon.layout.shards import Piece, layout_of
from dmuon.layout.topology import positions
from dmuon.platform.torch_private import even_shape, local_tensor


def owned_to_even(local: Tensor, matrix: OwnedMatrix, comm: Comm) -> DTensor:
    """Copy what an owner holds of ``matrix`` into an ordinary even DTensor. Collective over the data-parallel ranks.

    The DTensor is cut by rows over these, or by columns where tensor parallelism has cut the rows.

    Args:
        local: shaped as the master.
    """
    parcel = _even_parcel(matrix, comm)
    what = f"scatter of {matrix.fqn!r} for a state dict"
    part = redistribute(parcel.from_owner, local, comm.domain, local, what)
    even = local.new_empty(parcel.layout.pieces[comm.position].shape) if part is None else part.clone()
    return as_dtensor(even, _even_mesh(matrix, comm), _even_placements(matrix), matrix.shape)


def even_to_owned(value: Tensor, matrix: OwnedMatrix, comm: Comm, dtype: torch.dtype) -> Tensor:
    """Cut from ``value``, a DTensor or a plain whole tensor, what the master of ``matrix`` holds on this rank.

    Collective if ``value`` is a DTensor; its kind must be the same on all ranks. An ``OwnedTensor`` may have another
    owner than ``matrix``.
    """
    what = f"gather of {matrix.fqn!r} from a state dict"
    mesh, placements = _even_mesh(matrix, comm), _even_placements(matrix)
    if isinstance(value, OwnedTensor):
        mesh, placements = matrix.rest.device_mesh, list(matrix.rest.placements)
    if isinstance(value, DTensor) and (value.device_mesh != mesh or list(value.placements) != placements):
        with comm.monitor.watch(what):
            value = value.full_tensor()
    if not isinstance(value, DTensor):
        part = _tensor_part(value, matrix, comm)
        return (part if matrix.owner == comm.position else part[:0]).to(device=comm.device, dtype=dtype, copy=True)
    route = _even_parcel(matrix, comm).to_owner
    if isinstance(value, OwnedTensor):
        route = Route(1, route.layout, {value.owner: Piece.whole(route.layout.shape)}, route.receivers)
    local = local_tensor(value).to(device=comm.device, dtype=dtype)
    whole = redistribute(route, local, comm.domain, local, what)
    return local.new_empty(matrix.master.shape) if whole is None else whole


def write_even(
    shard: Tensor, param: OwnedTensor, matrix: OwnedMatrix, comm: Comm, fault: Exception | None = None
) -> None:
    """Make the even shards of all ranks, laid out as ``param`` says, the value of the master. Collective.

    Args:
        fault: why this rank cannot; then no rank does.

    Raises:
        ValueError, RuntimeError: on every rank, if some rank cannot.
    """
    mesh, placements = param.device_mesh, param.placements
    shape = even_shape(matrix.shape, mesh, placements)
    mismatch = f"{matrix.fqn}: an even shard has shape {tuple(shape)} here, not {tuple(shard.shape)}"
    agree(comm.control, mismatch if shard.shape != shape else fault)
    with torch.no_grad():
        local = shard.to(device=comm.device, dtype=matrix.master.dtype)
        even = as_dtensor(local, mesh, placements, matrix.shape)
        matrix.master.copy_(even_to_owned(even, matrix, comm, matrix.master.dtype))


def _even_parcel(matrix: OwnedMatrix, comm: Comm) -> Parcel:
    """What the data-parallel ranks hold of what the owner has, if it is cut evenly."""
    layout = layout_of(matrix.local_shape, [comm.world], [Shard(_even_dim(matrix))])
    return Parcel(1, layout, positions(comm.world), matrix.owner)


def _even_dim(matrix: OwnedMatrix) -> int:
    """The dimension that data parallelism cuts: one that tensor parallelism leaves whole."""
    return 1 if matrix.tensor is not None and matrix.tensor.placement == Shard(0) else 0


def _even_mesh(matrix: OwnedMatrix, comm: Comm) -> DeviceMesh:
    return comm.flat_mesh if matrix.tensor is None else comm.flat_tensor_mesh


def _even_placements(matrix: OwnedMatrix) -> list[Placement]:
    return [Shard(_even_dim(matrix)), *tensor_placements(matrix.tensor)]


def _tensor_part(whole: Tensor, matrix: OwnedMatrix, comm: Comm) -> Tensor:
    """This tensor-parallel rank's part of a whole matrix."""
    if matrix.tensor is None:
        return whole
    layout = layout_of(matrix.shape, [comm.topology.tensor], [matrix.tensor.placement])
    if layout.split_dim is None:
        return whole
    lengths = [piece.shape[layout.split_dim] for piece in layout.pieces]
    parts: tuple[Tensor, ...] = whole.split(lengths, layout.split_dim)
    return parts[comm.at.t]
