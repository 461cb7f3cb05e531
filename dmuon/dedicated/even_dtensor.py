"""Owned matrices as ordinary even DTensors, which is what state dicts hold, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dmuon.comm.agreement import require_no_fault
from dmuon.comm.context import Comm
from dmuon.comm.domain import redistribute_all
from dmuon.dedicated.matrix import OwnedMatrix, as_dtensor, joined, tensor_placements
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.state_shard import StateShard
from dmuon.layout.matrices import Region, layout_of_region, region_at
from dmuon.layout.parcels import Parcel, Route, Spread, spread_over_all
from dmuon.layout.shards import Piece, ShardLayout, layout_of
from dmuon.layout.topology import Position
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.torch_private import DTensorSpec, even_shape, local_tensor, owned_spec

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
    evens = _evens([matrix for _, matrix in held], comm)
    routes: list[Route] = []
    sent: dict[int, Tensor] = {}
    of_first: list[tuple[int, list[int]]] = []  # number of the first route of tensors that lie alike
    for members in _alike(evens):
        even, first = evens[members[0]], len(routes)
        of_first.append((first, members))
        routes += [Parcel(len(members), part.spread, part.owner).from_owner for part in even.parts]
        pieces = [held[i][1].pieces(held[i][0]) for i in members]
        for number, of_part in zip(even.owned_at(comm.position), zip(*pieces, strict=True), strict=True):
            sent[first + number] = _stacked([piece for _, piece in of_part])
    what = f"scatter of {_called([matrix for _, matrix in held])} for a state dict"
    arrived = redistribute_all(routes, sent, comm.domain, held[0][0], what)
    del sent
    shards = [held[0][0].new_empty(even.shape) for even in evens]  # each on its own: some may be kept
    for first, members in of_first:
        for number, part in enumerate(evens[members[0]].parts, first):
            if number in arrived:
                targets = [part.take(shards[i]) for i in members]
                torch._foreach_copy_(targets, list(arrived.pop(number).unbind(0)))
                for i, target in zip(members, targets, strict=True):
                    part.put(shards[i], target)
    rows = zip(shards, evens, held, strict=True)
    return [StateShard.of(shard, even.spec, matrix.fqn) for shard, even, (_, matrix) in rows]


def even_to_owned(values: Sequence[tuple[Tensor, OwnedMatrix]], comm: Comm) -> list[Tensor]:
    """Cut from each value, a DTensor or a plain whole tensor, what the master of its matrix holds on this rank.

    Collective if a value is a DTensor; the kinds must be the same on all ranks. An ``OwnedTensor`` may have other
    owners than its matrix.

    Args:
        values: one round of :func:`in_rounds`.
    """
    result: list[Tensor | None] = [None] * len(values)
    travelling: list[tuple[int, DTensor]] = []
    matrices = [matrix for _, matrix in values]
    evens = _evens(matrices, comm)
    what = f"gather of {_called(matrices)} from a state dict"
    for i, ((value, matrix), even) in enumerate(zip(values, evens, strict=True)):
        mesh, placements = even.spec.mesh, even.spec.placements
        if isinstance(value, OwnedTensor):
            mesh, placements = matrix.rest.device_mesh, matrix.rest.placements
        if isinstance(value, DTensor) and (value.device_mesh != mesh or value.placements != placements):
            with comm.monitor.watch(what):
                value = value.full_tensor()
        if isinstance(value, DTensor):
            travelling.append((i, value))
        else:
            part = matrix.own_part(_tensor_part(value, matrix, comm))
            result[i] = part.to(device=comm.device, dtype=matrix.master.dtype, copy=True)
    if travelling:
        arrived = _gathered([(value, matrices[i], evens[i]) for i, value in travelling], comm, what)
        for (i, _), local in zip(travelling, arrived, strict=True):
            result[i] = local
    return [local for local in result if local is not None]


def _gathered(values: Sequence[tuple[DTensor, OwnedMatrix, _Even]], comm: Comm, what: str) -> list[Tensor]:
    """What the masters hold on this rank of values that are even, or owned."""
    like = values[0][1].master
    routes: list[Route] = []
    sent: dict[int, Tensor] = {}
    of_first: list[tuple[int, list[int]]] = []  # number of the first route of tensors that lie alike
    owners = [value.owners if isinstance(value, OwnedTensor) else None for value, _, _ in values]
    for members in _alike([even for _, _, even in values], owners):
        first, even, senders = len(routes), values[members[0]][2], owners[members[0]]
        of_first.append((first, members))
        of_parts = [Parcel(len(members), part.spread, part.owner).to_owner for part in even.parts]
        locals_ = [local_tensor(values[i][0]).to(device=comm.device, dtype=like.dtype) for i in members]
        if senders is None:
            for number, (part, route) in enumerate(zip(even.parts, of_parts, strict=True), first):
                if comm.position in route.senders:
                    sent[number] = _stacked([part.take(local) for local in locals_])
        else:
            whole = [{owner: Piece.whole(part.layout.shape)} for part, owner in zip(even.parts, senders, strict=True)]
            of_parts = [
                Route(route.count, route.layout, of_owner, route.receivers)
                for route, of_owner in zip(of_parts, whole, strict=True)
            ]
            mine = [number for number, owner in enumerate(senders) if owner == comm.position]
            held = [values[i][1] for i in members]
            pieces = [m.pieces(local, [m.parts[n] for n in mine]) for m, local in zip(held, locals_, strict=True)]
            for number, of_part in zip(mine, zip(*pieces, strict=True), strict=True):
                sent[first + number] = _stacked([piece for _, piece in of_part])
        routes += of_parts
    arrived = redistribute_all(routes, sent, comm.domain, like, what)
    del sent
    result: list[Tensor] = [like] * len(values)
    for first, members in of_first:
        even, matrix = values[members[0]][2], values[members[0]][1]
        parts = [arrived.pop(first + number).unbind(0) for number in even.owned_at(comm.position)]
        nothing = like.new_empty(matrix.master.shape if not parts else 0)
        for place, i in enumerate(members):
            mine_of = [part[place] for part in parts]
            result[i] = joined(mine_of, like) if matrix.is_split and mine_of else mine_of[0] if mine_of else nothing
    return result


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0][None] if len(pieces) == 1 else torch.stack([*pieces])


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
    require_no_fault(comm.control, mismatch if shard.shape != shape else fault, comm.device)
    with torch.no_grad():
        local = shard.to(device=comm.device, dtype=matrix.master.dtype)
        even = as_dtensor(local, mesh, placements, matrix.shape)
        matrix.master.copy_(even_to_owned([(even, matrix)], comm)[0])


@dataclass(frozen=True, slots=True)
class _EvenPart:
    """One matrix of a tensor that is cut evenly.

    Attributes:
        spread: where it lies: with all ranks, which perhaps have nothing of it.
        owner: position of the rank that has its master.
        region: where it lies in this rank's shard; None: it is all of that.
    """

    spread: Spread
    owner: Position
    region: Region | None

    @property
    def layout(self) -> ShardLayout:
        return self.spread.layout

    def take(self, shard: Tensor) -> Tensor:
        """This rank's rows or columns of it, of which it has some: a view where that is possible."""
        return shard if self.region is None else self.region.take(shard)[0]

    def put(self, shard: Tensor, taken: Tensor) -> None:
        """Write ``taken``, which :meth:`take` gave and which was changed, back to ``shard`` if it is a copy."""
        if self.region is not None:
            self.region.put(shard, [taken])


@dataclass(frozen=True, slots=True, eq=False)
class _Even:
    """What the data-parallel ranks hold of what the owners have, if it is cut evenly.

    Attributes:
        spec: of the whole tensor.
        shape: of this rank's shard.
        parts: its matrices.
    """

    spec: DTensorSpec
    shape: tuple[int, ...]
    parts: list[_EvenPart]

    @classmethod
    def of(cls, matrix: OwnedMatrix, comm: Comm) -> _Even:
        layout = layout_of(matrix.local_shape, [comm.world], [Shard(_even_dim(matrix))])
        flattened = spec_of(matrix.rest).flattened
        parts = []
        for part in matrix.parts:
            of_part, region = layout, None
            if part.region is not None:
                of_part = layout_of_region(layout, part.region, flattened)
                region = region_at(layout, part.region, flattened, comm.position)
            parts.append(_EvenPart(spread_over_all(of_part), part.owner, region))
        mesh = comm.flat_mesh if matrix.tensor is None else comm.flat_tensor_mesh
        placements = [Shard(_even_dim(matrix)), *tensor_placements(matrix.tensor)]
        spec = owned_spec(mesh, placements, matrix.shape, matrix.master.dtype)
        return cls(spec, layout.pieces[comm.position].shape, parts)

    def owned_by(self, matrix: OwnedMatrix) -> _Even:
        """Of one that lies alike, and has other owners."""
        pairs = zip(self.parts, matrix.parts, strict=True)
        return replace(self, parts=[replace(part, owner=other.owner) for part, other in pairs])

    def owned_at(self, position: Position) -> list[int]:
        """Numbers of the parts that the rank at ``position`` has the masters of."""
        return [number for number, part in enumerate(self.parts) if part.owner == position]


def _evens(matrices: Sequence[OwnedMatrix], comm: Comm) -> list[_Even]:
    """Of each matrix; those that lie alike, and have the same owners, have one together."""
    known: dict[object, _Even] = {}
    lying: dict[object, _Even] = {}  # whoever owns it
    evens = []
    for matrix in matrices:
        tensor = None if matrix.tensor is None else matrix.tensor.placement
        kind: tuple[object, ...] = (matrix.shape, matrix.local_shape, matrix.master.dtype, tensor)
        if matrix.is_split:
            kind = (*kind, spec_of(matrix.rest).flattened, tuple(part.region for part in matrix.parts))
        own = (kind, matrix.owners)
        if own not in known:
            alike = lying.get(kind)
            known[own] = lying[kind] = _Even.of(matrix, comm) if alike is None else alike.owned_by(matrix)
        evens.append(known[own])
    return evens


def _alike(evens: Sequence[_Even], further: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Indices of those that are one; in the order of the first of each, which is the same on all ranks.

    Args:
        further: of each, what must be equal too.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, even in enumerate(evens):
        alike.setdefault((id(even), None if further is None else further[i]), []).append(i)
    return list(alike.values())


def _even_dim(matrix: OwnedMatrix) -> int:
    """The dimension that data parallelism cuts: one that tensor parallelism leaves whole."""
    return 1 if matrix.tensor is not None and matrix.tensor.placement == Shard(0) else 0


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
