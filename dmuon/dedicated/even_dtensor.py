"""Owned matrices as ordinary even DTensors, which is what state dicts hold, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.agreement import agree
from dmuon.comm.context import Comm
from dmuon.comm.domain import redistribute_all
from dmuon.dedicated.matrix import OwnedMatrix, as_dtensor, joined, tensor_placements
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.state_shard import StateShard
from dmuon.layout.matrices import Region, layout_of_region, whole_region
from dmuon.layout.parcels import Parcel, Route, spread_over_all
from dmuon.layout.shards import Piece, layout_of
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.torch_private import even_shape, local_tensor


def owned_to_even(local: Tensor, matrix: OwnedMatrix, comm: Comm) -> DTensor:
    """Copy what owners hold of ``matrix`` into an ordinary even DTensor. Collective over the data-parallel ranks.

    The DTensor is cut by rows over these, or by columns where tensor parallelism has cut the rows.

    Args:
        local: shaped as the master.
    """
    even = _Even.of(matrix, comm)
    routes = [parcel.from_owner for parcel in even.parcels]
    held = {matrix.parts.index(part): piece[None] for part, piece in matrix.pieces(local)}
    what = f"scatter of {matrix.fqn!r} for a state dict"
    arrived = redistribute_all(routes, held, comm.domain, local, what)
    shard = local.new_empty(even.shape)
    for i, piece in arrived.items():
        taken = even.regions[i].take(shard)
        taken.copy_(piece)
        even.regions[i].put(shard, list(taken.unbind(0)))
    even_dtensor = as_dtensor(shard, _even_mesh(matrix, comm), _even_placements(matrix), matrix.shape)
    return StateShard.of(even_dtensor, matrix.fqn)


def even_to_owned(value: Tensor, matrix: OwnedMatrix, comm: Comm, dtype: torch.dtype) -> Tensor:
    """Cut from ``value``, a DTensor or a plain whole tensor, what the master of ``matrix`` holds on this rank.

    Collective if ``value`` is a DTensor; its kind must be the same on all ranks. An ``OwnedTensor`` may have other
    owners than ``matrix``.
    """
    what = f"gather of {matrix.fqn!r} from a state dict"
    mesh, placements = _even_mesh(matrix, comm), _even_placements(matrix)
    if isinstance(value, OwnedTensor):
        mesh, placements = matrix.rest.device_mesh, list(matrix.rest.placements)
    if isinstance(value, DTensor) and (value.device_mesh != mesh or list(value.placements) != placements):
        with comm.monitor.watch(what):
            value = value.full_tensor()
    if not isinstance(value, DTensor):
        part = matrix.own_part(_tensor_part(value, matrix, comm))
        return part.to(device=comm.device, dtype=dtype, copy=True)
    even = _Even.of(matrix, comm)
    routes = [parcel.to_owner for parcel in even.parcels]
    local = local_tensor(value).to(device=comm.device, dtype=dtype)
    if isinstance(value, OwnedTensor):
        for i, (owner, route) in enumerate(zip(value.owners, routes, strict=True)):
            routes[i] = Route(1, route.layout, {owner: Piece.whole(route.layout.shape)}, route.receivers)
        others = [part for part, owner in zip(matrix.parts, value.owners, strict=True) if owner == comm.position]
        held = {matrix.parts.index(part): piece[None] for part, piece in matrix.pieces(local, others)}
    else:
        held = {i: region.take(local) for i, region in enumerate(even.regions)}
    arrived = redistribute_all(routes, held, comm.domain, local, what)
    mine = [arrived[i][0] for i, part in enumerate(matrix.parts) if part.owner == comm.position]
    if matrix.is_split:
        return joined(mine, local)
    return mine[0] if mine else local.new_empty(matrix.master.shape)


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


@dataclass(frozen=True, slots=True)
class _Even:
    """What the data-parallel ranks hold of what the owners have, if it is cut evenly.

    Attributes:
        shape: of this rank's shard.
        parcels: of each part, which all ranks hold, though perhaps nothing of it.
        regions: of each part, where it lies in this rank's shard.
    """

    shape: tuple[int, ...]
    parcels: list[Parcel]
    regions: list[Region]

    @classmethod
    def of(cls, matrix: OwnedMatrix, comm: Comm) -> _Even:
        layout = layout_of(matrix.local_shape, [comm.world], [Shard(_even_dim(matrix))])
        parcels, regions, flattened = [], [], spec_of(matrix.rest).flattened
        for part in matrix.parts:
            of_part, places = layout_of_region(layout, part.region or whole_region(matrix.local_shape), flattened)
            parcels.append(Parcel(1, spread_over_all(of_part), part.owner))
            regions.append(places[comm.position])
        return cls(layout.pieces[comm.position].shape, parcels, regions)


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
