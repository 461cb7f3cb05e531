"""One matrix of an owned tensor: who orthogonalizes it, and where in the tensor it lies."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.context import Comm
from dmuon.layout.matrices import Region, numbered, stack_shape
from dmuon.layout.parcels import Parcel, spread_over_all
from dmuon.layout.shards import layout_of
from dmuon.layout.topology import Coordinate, Position, position_in
from dmuon.model.matrix_spec import is_one_matrix, spec_of
from dmuon.platform.torch_private import local_tensor


@dataclass(slots=True, eq=False)
class Part:
    """One matrix of an owned tensor, which may be all of it.

    Attributes:
        number: among the matrices of the tensor.
        owner: position among the data-parallel ranks.
        at: the owner's place among them.
        shape: ``(m, n)`` of the whole matrix, as it is stored.
        region: where it lies in what one data-parallel rank computes with; None: it is all of that.
        local_shape: of what one data-parallel rank computes with of it.
        transposed: it is stored ``(in, out)``.
        parcel: where tensor parallelism has it; None without.
        partial: the sum of what reductions along the row alone have brought to this rank, ``local_shape``; without
            elements on the other ranks of the row, if they took part.
    """

    number: int
    owner: Position
    at: Coordinate
    shape: tuple[int, int]
    region: Region | None
    local_shape: tuple[int, int]
    transposed: bool
    parcel: Parcel | None
    partial: Tensor | None = None

    @property
    def numel(self) -> int:
        """Elements of what one data-parallel rank computes with."""
        return prod(self.local_shape)

    @property
    def is_slice(self) -> bool:
        """Whether :meth:`take` gives a view of a contiguous tensor."""
        return self.region is None or self.region.is_slice

    def take(self, tensor: Tensor) -> Tensor:
        """This matrix, ``local_shape``, of a tensor that is shaped as what one data-parallel rank computes with."""
        if self.region is None:
            return tensor
        taken = self.region.take(tensor)
        return taken[0] if len(taken) else tensor.new_empty(self.local_shape)

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Write ``value``, which :meth:`take` gave and which was changed, back to ``tensor`` if it is a copy."""
        if self.region is not None and self.numel:
            self.region.put(tensor, [value])

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Make ``value`` this matrix of such a tensor."""
        taken = self.take(tensor)
        taken.copy_(value)
        self.put(tensor, taken)


def parameter_of(name: str, known: Container[str]) -> str:
    """The name of the parameter to which the matrix belongs that a plan calls ``name``."""
    return name if name in known else name[: name.rindex("[")]


def parts_of(param: Tensor, planned: Sequence[Position], comm: Comm) -> tuple[Part, ...]:
    """The matrices of ``param``, which may be a DTensor that tensor parallelism has split.

    Those that lie alike in the matrices of a stack come one after the other, so that they can be updated at once.

    Args:
        planned: for each, the owner's position among all ranks of the topology.
    """
    spec, local = spec_of(param), local_tensor(param)
    sizes: list[int] = [1]
    placements: list[Placement] = [Replicate()]
    here = Position(0)
    if isinstance(param, DTensor):
        sizes, placements, here = [param.device_mesh.size()], list(param.placements), Position(comm.at.t)
    layout = layout_of(param.shape, sizes, placements)
    if is_one_matrix(param):
        owner, at, t = _owner(planned[0], comm)
        parcel = Parcel(1, spread_over_all(layout), t) if isinstance(param, DTensor) else None
        m, n = param.shape
        return (Part(0, owner, at, (m, n), None, (local.shape[0], local.shape[1]), spec.transposed, parcel),)
    stack = stack_shape(local.shape, spec)
    of_param = numbered(layout, spec)
    held = {i: None for share, _ in of_param if here in share.holders for i in range(share.start, share.stop)}
    places = {i: place for place, i in enumerate(held)}  # in the local stack
    parts: dict[int, Part] = {}
    for share, numbers in of_param:
        m, n = share.layout.shape
        for i, number in zip(range(share.start, share.stop), numbers, strict=True):
            owner, at, t = _owner(planned[number], comm)
            begin = places.get(i, 0)
            region = Region(stack, (begin, begin + (i in places)), spec.dim, share.runs.get(here, ()))
            parcel = None
            if isinstance(param, DTensor):
                assert t in share.holders, "whoever holds nothing of a matrix of a stack is not planned to own it"
                parcel = Parcel(1, share.spread, t)
            local_shape = region.shape if region.count else (0, n)
            parts[number] = Part(number, owner, at, (m, n), region, local_shape, spec.transposed, parcel)
    kinds = 1 + max(share.part for share, _ in of_param)
    return tuple(parts[number] for number in sorted(parts, key=lambda number: (number % kinds, number)))


def holders_of(param: Tensor) -> list[tuple[Position, ...]]:
    """For each matrix of ``param``, the tensor-parallel ranks that have some of it; none where all have."""
    if not isinstance(param, DTensor) or is_one_matrix(param):
        return [() for _ in spec_of(param).matrices(param.shape)]
    of_param = numbered(layout_of(param.shape, [param.device_mesh.size()], param.placements), spec_of(param))
    by_number = {number: share.holders for share, numbers in of_param for number in numbers}
    every = param.device_mesh.size()
    return [() if len(by_number[i]) == every else by_number[i] for i in range(len(by_number))]


def _owner(planned: Position, comm: Comm) -> tuple[Position, Coordinate, Position]:
    """The data-parallel rank that keeps this tensor-parallel rank's part, its place, and the tensor-parallel owner."""
    at = comm.topology.coordinates[planned]
    owner = position_in(comm.ranks, comm.topology.rank_at(at.r, at.s, comm.at.t))
    return owner, comm.coordinate(owner), Position(at.t)
