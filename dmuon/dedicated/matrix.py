"""One owned tensor at run time: its matrices, its forms at rest and at work, and its gradient.

[Note: five forms of a weight]
A weight has up to five tensors. Only the master is ever updated; the others are wrappers, copies or views of copies.

1. The *master*, fp32 or wider, on its owner: what the optimizer updates and checkpoints save.
2. The *resting form*, ``OwnedMatrix.rest``: an ``OwnedTensor`` around the master, which has no rows on other ranks. It
   is what optimizers and users see, and what modules hold between forward and backward.
3. The *slot*: the weight's part of an ``OwnedBuffer``, in the dtype of communication, which collectives fill on every
   rank. It has memory only while the buffer has.
4. The *full* form, ``OwnedMatrix.full``: a parameter that views the slot. Modules hold it inside forward and backward,
   and autograd puts the gradient there.
5. The *stand-in*, where several replicas free whole weights: what an owner in another replica has published down the
   column. One rank of each row keeps it, and fills the row with it as if it were the owner.

``rest`` and ``full`` are made once and never replaced, so optimizers and hooks may keep them. What changes is which of
them the modules hold (``Block``) and whether the slot has memory (``OwnedBuffer``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.context import Comm
from dmuon.dedicated.owned_tensor import REDUCED_GRAD, OwnedTensor, owned_tensor
from dmuon.layout.matrices import Parcel, Region, numbered, spread_over_all, stack_shape
from dmuon.layout.shards import layout_of
from dmuon.layout.topology import Coordinate, Position, position_in
from dmuon.model.matrix_spec import is_one_matrix, remember_spec, spec_of
from dmuon.model.routing import Route
from dmuon.platform.torch_private import accumulation_hooks, contiguous_strides, local_tensor, move_hooks
from dmuon.step.residency import placed_with_one_input


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One matrix of an owned tensor, which may be all of it.

    Attributes:
        number: among the matrices of the tensor.
        owner: position among the data-parallel ranks.
        at: the owner's place among them.
        shape: ``(m, n)`` of the whole matrix, as it is stored.
        region: where it lies in what one data-parallel rank computes with.
        is_whole: it is all of that, and stored as a matrix.
        local_shape: of what one data-parallel rank computes with of it.
        transposed: it is stored ``(in, out)``.
        parcel: where tensor parallelism has it; None without.
    """

    number: int
    owner: Position
    at: Coordinate
    shape: tuple[int, int]
    region: Region
    is_whole: bool
    local_shape: tuple[int, int]
    transposed: bool
    parcel: Parcel | None

    @property
    def numel(self) -> int:
        """Elements of what one data-parallel rank computes with."""
        return prod(self.local_shape)

    def take(self, tensor: Tensor) -> Tensor:
        """This matrix, ``local_shape``, of a tensor that is shaped as what one data-parallel rank computes with."""
        if self.is_whole:
            return tensor
        taken = self.region.take(tensor)
        return taken[0] if len(taken) else tensor.new_empty(self.local_shape)

    def pairs(self, tensor: Tensor, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of such a tensor, and of ``matrix``, ``local_shape``, that hold the same elements of it."""
        region = self.region
        if self.is_whole or region.is_slice:
            return [(self.take(tensor), matrix)]
        runs = [replace(region, runs=(run,)) for run in region.runs]
        rows = matrix.split([stop - start for start, stop in region.runs], region.dim - 1)
        return [(run.take(tensor)[0], of_run) for run, of_run in zip(runs, rows, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor that is to be owned.

    Attributes:
        route: its parameter, which has the initial values, everything that holds it, and its block.
        parts: its matrices, and their owners.
    """

    route: Route
    parts: tuple[Part, ...]

    def owned_at(self, position: Position) -> tuple[Part, ...]:
        """The parts that the data-parallel rank at ``position`` owns."""
        return tuple(part for part in self.parts if part.owner == position)


@dataclass(slots=True, eq=False)
class OwnedMatrix:
    """One owned matrix, or a tensor that is made of several.

    Masters of the latter are flat: on each rank the parts that it owns, one after the other.

    Attributes:
        shape: of the whole tensor.
        parts: its matrices, in order.
        mine: those of which this rank has the masters.
        rest: the resting form, a parameter like ``full``.
        full: what modules compute with; with tensor parallelism a DTensor, of whose local part are masters and buffers.
        master: fp32; on its owner ``(m, n)``, or its tensor-parallel part, elsewhere no rows; flat if there are parts.
        places: where modules find it: their dictionaries of parameters, and its name there. Not the modules: these own
            what dmuon knows of them, not the reverse.
        empty_grad: the gradient on ranks that own no part; one serves all steps.
    """

    fqn: str
    shape: torch.Size
    parts: tuple[Part, ...]
    mine: tuple[Part, ...]
    rest: OwnedTensor
    full: nn.Parameter
    master: Tensor
    places: Sequence[tuple[dict[str, Any], str]]
    empty_grad: OwnedTensor | None = None

    @property
    def local_shape(self) -> torch.Size:
        """Of what one data-parallel rank computes with."""
        return local_tensor(self.full).shape

    @property
    def is_split(self) -> bool:
        """Whether it is made of several matrices, or of one that is stored otherwise."""
        return not self.parts[0].is_whole

    def pieces(self, local: Tensor) -> list[tuple[Part, Tensor]]:
        """The matrices that this rank owns, in ``local``, which is shaped as the master: views, ``local_shape``."""
        flat = local.view(-1).split([part.numel for part in self.mine]) if self.mine else ()
        return [(part, piece.view(part.local_shape)) for part, piece in zip(self.mine, flat, strict=True)]

    def own_part(self, whole: Tensor) -> Tensor:
        """A copy of what this rank owns of ``whole``, ``local_shape``, shaped as the master."""
        return joined([part.take(whole) for part in self.mine], whole).view(self.master.shape)

    def write(self, local: Tensor) -> None:
        """Make ``local``, shaped as the master, the weight. The runtime hears of it, as of what users write."""
        with torch.no_grad():
            self.rest.copy_(self.rest.like(local))

    def set_grad(self, local: Tensor) -> None:
        """Add ``local``, shaped as the master, to the gradient of the resting form."""
        before = REDUCED_GRAD.__get__(self.rest)
        if before is not None and not isinstance(before, DTensor):  # the program has put a whole one there
            before = self.rest.like(self.own_part(before), f"{self.fqn}.grad")
            REDUCED_GRAD.__set__(self.rest, before)
        if before is not None:
            local_tensor(before).add_(local)
            return
        grad = self.empty_grad
        if grad is None or self.mine:
            grad = self.rest.like(local, f"{self.fqn}.grad")
        if not self.mine:
            self.empty_grad = grad
        REDUCED_GRAD.__set__(self.rest, grad)

    def set_hooked_grad(self, local: Tensor) -> None:
        """As :meth:`set_grad`, and run the hooks that the user has left on the resting form."""
        grad = self.rest.like(local, f"{self.fqn}.grad")
        for hook in list((self.rest._backward_hooks or {}).values()):
            result = hook(grad)
            if result is None:
                continue
            if not isinstance(result, OwnedTensor) or local_tensor(result).shape != local_tensor(grad).shape:
                raise RuntimeError(
                    f"a gradient hook of {self.fqn!r} returned {type(result).__name__}, not a gradient as it was "
                    "given; compute it from the argument by elementwise operations, or return None"
                )
            grad = result
        self.set_grad(local_tensor(grad))
        for hook in list(accumulation_hooks(self.rest).values()):
            hook(self.rest)


def own(weight: Weight, whole: Tensor, master: Tensor, comm: Comm) -> OwnedMatrix:
    """Make the forms of ``weight`` and give its resting form to the modules.

    Args:
        whole: memory of what one data-parallel rank computes with, in that shape.
        master: what this rank owns of it, as :func:`initial_master` makes it.
    """
    route, param = weight.route, weight.route.param
    mesh = comm.mesh
    placements: list[Placement] = [Shard(0)] * mesh.ndim
    # `.data` gives the view a version counter of its own: filling the buffer must not look to autograd like an edit of
    # the weights that it saved.
    filled: Tensor = whole.data
    if isinstance(param, DTensor):  # tensor parallelism adds a dimension behind those of data parallelism
        mesh, placements = comm.tensor_mesh, [*placements, *param.placements]
        filled = as_dtensor(filled, param.device_mesh, param.placements, param.shape)
    owners = tuple(part.owner for part in weight.parts)
    wrapper = owned_tensor(master, mesh, param.shape, fqn=route.fqn, owners=owners, placements=placements)
    rest = nn.Parameter(wrapper, requires_grad=param.requires_grad)
    assert isinstance(rest, OwnedTensor)
    full = whole_parameter(filled, rest)
    mine = weight.owned_at(comm.position)
    places = [(module._parameters, name) for module, name in route.sites]
    matrix = OwnedMatrix(route.fqn, param.shape, weight.parts, mine, rest, full, local_tensor(rest), places)
    for held, name in places:
        held[name] = rest
    move_hooks(param, rest)
    remember_spec(rest, spec_of(param))
    return matrix


def of_rows(matrix: OwnedMatrix, local: Tensor, fqn: str) -> OwnedMatrix:
    """What says of ``local``, one number for each output that this rank owns, what ``matrix`` says of its master."""
    spec = spec_of(matrix.rest)
    shape, local_shape = (torch.Size(spec.with_one_input(of)) for of in (matrix.shape, matrix.local_shape))
    stack = stack_shape(local_shape, spec)
    parts = []
    for part in matrix.parts:
        (m, n), (rows, columns) = ((1, b) if spec.transposed else (a, 1) for a, b in (part.shape, part.local_shape))
        runs = part.region.runs if part.region.dim == spec.dim else ((0, 1),)
        region = replace(part.region, stack=stack, runs=runs)
        parts.append(replace(part, shape=(m, n), local_shape=(rows, columns), region=region, parcel=None))
    numbers = {part.number for part in matrix.mine}
    placements, full = list(matrix.rest.placements), local.new_empty(local_shape, device="meta")
    if isinstance(matrix.full, DTensor):
        placements[-1:] = placed_with_one_input(spec, len(shape), placements[-1:])
        full = as_dtensor(full, matrix.full.device_mesh, placements[-1:], shape)
    rest = owned_tensor(
        local, matrix.rest.device_mesh, shape, fqn=fqn, owners=matrix.rest.owners, placements=placements
    )
    remember_spec(rest, spec)
    mine = tuple(part for part in parts if part.number in numbers)
    return OwnedMatrix(fqn, shape, tuple(parts), mine, rest, nn.Parameter(full, requires_grad=False), local, ())


def of_elements(matrix: OwnedMatrix, local: Tensor, fqn: str) -> OwnedMatrix:
    """What says of ``local``, shaped as the master, what ``matrix`` says of that."""
    rest = matrix.rest.like(local, fqn)
    remember_spec(rest, spec_of(matrix.rest))
    return replace(matrix, fqn=fqn, rest=rest, master=local, places=(), empty_grad=None)


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """``parts`` one after the other in one flat tensor."""
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Make the contiguous DTensor of global ``shape`` whose local part is ``local``, sharing its storage."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=contiguous_strides(shape))


def whole_parameter(value: Tensor, rest: OwnedTensor) -> nn.Parameter:
    """Make the parameter that modules hold in place of ``rest``."""
    whole = nn.Parameter(value, requires_grad=rest.requires_grad)
    whole._dmuon_rest = rest  # type: ignore[attr-defined]
    return whole


def resting(param: nn.Parameter) -> nn.Parameter:
    """The resting form of what a module holds; ``param`` itself where nothing stands in for one."""
    rest: nn.Parameter = getattr(param, "_dmuon_rest", param)
    return rest


def supersede(param: nn.Parameter, rest: OwnedTensor) -> None:
    """Modules hold ``rest`` from now on. Whoever keeps ``param`` for later is told before anything goes wrong by it."""
    param._dmuon_rest = rest  # type: ignore[attr-defined]
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(partial(_refuse_gradient, rest.fqn))


def _refuse_gradient(fqn: str, _param: Tensor) -> None:
    raise RuntimeError(
        f"what was parameter {fqn!r} before dedicate_params got a gradient: a module, or another one that shares the "
        "weight, has kept a reference to it and computes with it; take the weight from the module that holds it, in "
        "each forward"
    )


def require_resting(params: Iterable[Tensor]) -> None:
    """Raise ValueError for what was a parameter before dedication, or stands in for one: it gets no gradient."""
    for param in params:
        rest: OwnedTensor | None = getattr(param, "_dmuon_rest", None)
        if rest is not None:
            raise ValueError(
                f"a tensor of shape {tuple(param.shape)} is not parameter {rest.fqn!r}, but what the model had in its "
                "place before dedicate_params, or has inside a forward or summon_full_params: ask the model for its "
                "parameters, or dmuon.param_groups for groups, after dedicate_params and outside of these"
            )


def initial_master(value: Tensor, weight: Weight, comm: Comm) -> Tensor:
    """A copy of what this rank owns of ``value``, in fp32 or wider: a matrix, or flat if it is one of several."""
    mine = weight.owned_at(comm.position)
    with torch.no_grad():
        copied = joined([part.take(value) for part in mine], value)
        copied = copied.to(torch.promote_types(value.dtype, torch.float32))
        if not weight.parts[0].is_whole:
            return copied
        rows, columns = weight.parts[0].local_shape
        return copied.view(rows if mine else 0, columns)


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
        (m, n), (rows, columns) = param.shape, local.shape
        region = Region((1, rows, columns), (0, 1), 1, ((0, rows),) if rows else ())
        return (Part(0, owner, at, (m, n), region, True, (rows, columns), spec.transposed, parcel),)
    stack = stack_shape(local.shape, spec)
    of_param = numbered(layout, spec)
    held = {i: None for share, _ in of_param if here in share.spread.holders for i in range(share.start, share.stop)}
    places = {i: place for place, i in enumerate(held)}  # in the local stack
    parts: dict[int, Part] = {}
    for share, numbers in of_param:
        m, n = share.spread.layout.shape
        for i, number in zip(range(share.start, share.stop), numbers, strict=True):
            owner, at, t = _owner(planned[number], comm)
            begin = places.get(i, 0)
            region = Region(stack, (begin, begin + (i in places)), spec.dim, share.runs.get(here, ()))
            parcel = None
            if isinstance(param, DTensor):
                assert t in share.spread.holders, (
                    "whoever holds nothing of a matrix of a stack is not planned to own it"
                )
                parcel = Parcel(1, share.spread, t)
            local_shape = region.shape if region.count else (0, n)
            parts[number] = Part(number, owner, at, (m, n), region, False, local_shape, spec.transposed, parcel)
    kinds = 1 + max(share.part for share, _ in of_param)
    return tuple(parts[number] for number in sorted(parts, key=lambda number: (number % kinds, number)))


def holders_of(param: Tensor) -> list[tuple[Position, ...]]:
    """For each matrix of ``param``, the tensor-parallel ranks that have some of it; none where all have."""
    if not isinstance(param, DTensor) or is_one_matrix(param):
        return [() for _ in spec_of(param).matrices(param.shape)]
    of_param = numbered(layout_of(param.shape, [param.device_mesh.size()], param.placements), spec_of(param))
    by_number = {number: share.spread.holders for share, numbers in of_param for number in numbers}
    every = param.device_mesh.size()
    return [() if len(by_number[i]) == every else by_number[i] for i in range(len(by_number))]


def _owner(planned: Position, comm: Comm) -> tuple[Position, Coordinate, Position]:
    """The data-parallel rank that keeps this tensor-parallel rank's part, its place, and the tensor-parallel owner."""
    at = comm.topology.coordinates[planned]
    owner = position_in(comm.ranks, comm.topology.rank_at(at.r, at.s, comm.at.t))
    return owner, comm.topology.of(comm.ranks[owner]), Position(at.t)
