"""Owned matrices as ordinary even DTensors, which is what state dicts hold, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
from dmuon.layout.matrices import Region, layout_of_region, region_at, whole_region
from dmuon.layout.parcels import Parcel, Route, spread_over_all
from dmuon.layout.shards import Piece, layout_of
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.torch_private import even_shape, local_tensor

ROUND_BYTES = 2**28  # most bytes of whole matrices that travel together, unless one has more
_T = TypeVar("_T")


def in_rounds(items: Iterable[_T], matrix_of: Callable[[_T], OwnedMatrix]) -> Iterator[list[_T]]:
    """``items`` in order, of which those whose matrices travel together come together."""
    some: list[_T] = []
    nbytes, dtype = 0, None
    for item in items:
        master = matrix_of(item).master
        size = matrix_of(item).local_shape.numel() * master.element_size()
        if some and (nbytes + size > ROUND_BYTES or master.dtype != dtype):
            yield some
            some, nbytes = [], 0
        some.append(item)
        nbytes, dtype = nbytes + size, master.dtype
    if some:
        yield some


def owned_to_even(held: Sequence[tuple[Tensor, OwnedMatrix]], comm: Comm) -> list[DTensor]:
    """Copy what owners hold of matrices into ordinary even DTensors. Collective over the data-parallel ranks.

    The DTensors are cut by rows over these, or by columns where tensor parallelism has cut the rows.

    Args:
        held: of each matrix a tensor shaped as the master; one round of :func:`in_rounds`.
    """
    evens = [_Even.of(matrix, comm) for _, matrix in held]
    routes: list[Route] = []
    sent: dict[int, Tensor] = {}
    for even, (local, matrix) in zip(evens, held, strict=True):
        number = {id(part): len(routes) + i for i, part in enumerate(matrix.parts)}
        routes += [parcel.from_owner for parcel in even.parcels]
        sent |= {number[id(part)]: piece[None] for part, piece in matrix.pieces(local)}
    what = f"scatter of {_called([matrix for _, matrix in held])} for a state dict"
    arrived = redistribute_all(routes, sent, comm.domain, held[0][0], what)
    result: list[DTensor] = []
    begin = 0
    for even, (local, matrix) in zip(evens, held, strict=True):
        shard = local.new_empty(even.shape)
        for i, region in enumerate(even.regions, begin):
            if i in arrived:
                taken = region.take(shard)
                taken.copy_(arrived[i])
                region.put(shard, list(taken.unbind(0)))
        begin += len(even.regions)
        even_dtensor = as_dtensor(shard, _even_mesh(matrix, comm), _even_placements(matrix), matrix.shape)
        result.append(StateShard.of(even_dtensor, matrix.fqn))
    return result


def even_to_owned(values: Sequence[tuple[Tensor, OwnedMatrix]], comm: Comm) -> list[Tensor]:
    """Cut from each value, a DTensor or a plain whole tensor, what the master of its matrix holds on this rank.

    Collective if a value is a DTensor; the kinds must be the same on all ranks. An ``OwnedTensor`` may have other
    owners than its matrix.

    Args:
        values: one round of :func:`in_rounds`.
    """
    result: list[Tensor | None] = [None] * len(values)
    travelling: list[tuple[int, DTensor]] = []
    what = f"gather of {_called([matrix for _, matrix in values])} from a state dict"
    for i, (value, matrix) in enumerate(values):
        mesh, placements = _even_mesh(matrix, comm), _even_placements(matrix)
        if isinstance(value, OwnedTensor):
            mesh, placements = matrix.rest.device_mesh, list(matrix.rest.placements)
        if isinstance(value, DTensor) and (value.device_mesh != mesh or list(value.placements) != placements):
            with comm.monitor.watch(what):
                value = value.full_tensor()
        if isinstance(value, DTensor):
            travelling.append((i, value))
        else:
            part = matrix.own_part(_tensor_part(value, matrix, comm))
            result[i] = part.to(device=comm.device, dtype=matrix.master.dtype, copy=True)
    if travelling:
        arrived = _gathered([(value, values[i][1]) for i, value in travelling], comm, what)
        for (i, _), local in zip(travelling, arrived, strict=True):
            result[i] = local
    return [local for local in result if local is not None]


def _gathered(values: Sequence[tuple[DTensor, OwnedMatrix]], comm: Comm, what: str) -> list[Tensor]:
    """What the masters hold on this rank of values that are even, or owned."""
    like = values[0][1].master
    routes: list[Route] = []
    sent: dict[int, Tensor] = {}
    for value, matrix in values:
        even, begin = _Even.of(matrix, comm), len(routes)
        local = local_tensor(value).to(device=comm.device, dtype=like.dtype)
        to_owners = [parcel.to_owner for parcel in even.parcels]
        if isinstance(value, OwnedTensor):
            for i, (owner, route) in enumerate(zip(value.owners, to_owners, strict=True)):
                to_owners[i] = Route(1, route.layout, {owner: Piece.whole(route.layout.shape)}, route.receivers)
            number = {id(part): begin + i for i, part in enumerate(matrix.parts)}
            others = [part for part, owner in zip(matrix.parts, value.owners, strict=True) if owner == comm.position]
            sent |= {number[id(part)]: piece[None] for part, piece in matrix.pieces(local, others)}
        else:
            sent |= {begin + i: region.take(local) for i, region in enumerate(even.regions)}
        routes += to_owners
    arrived = redistribute_all(routes, sent, comm.domain, like, what)
    result = []
    begin = 0
    for _, matrix in values:
        owned = enumerate(matrix.parts, begin)
        mine = [arrived[i][0] for i, part in owned if part.owner == comm.position]
        begin += len(matrix.parts)
        if matrix.is_split:
            result.append(joined(mine, like))
        else:
            result.append(mine[0] if mine else like.new_empty(matrix.master.shape))
    return result


def _called(matrices: Sequence[OwnedMatrix]) -> str:
    first, last = matrices[0].fqn, matrices[-1].fqn
    return repr(first) if len(matrices) == 1 else f"{len(matrices)} matrices from {first!r} to {last!r}"


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
        matrix.master.copy_(even_to_owned([(even, matrix)], comm)[0])


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
            region = part.region or whole_region(matrix.local_shape)
            parcels.append(Parcel(1, spread_over_all(layout_of_region(layout, region, flattened)), part.owner))
            regions.append(region_at(layout, region, flattened, comm.position))
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
