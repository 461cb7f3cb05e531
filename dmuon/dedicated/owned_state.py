"""What state dicts hold of owned matrices: what this rank owns, told to torch.distributed.checkpoint box by box.

An owner has all of a matrix and the other ranks have nothing, so that a state dict is made, saved and loaded without
communication. A tensor of several matrices is cut into boxes: a run of the stack whose matrices all have one owner is
one box; where matrices that lie side by side have several owners, each of them has its rows or columns, run by run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuon.dedicated.matrix import OwnedMatrix, as_dtensor
from dmuon.dedicated.owned_tensor import LOCAL, EvenShard, Keeper, OwnedTensor
from dmuon.dedicated.state_shard import REMEDY, in_parts, warn_of_parts
from dmuon.layout.matrices import Region
from dmuon.layout.shards import Run, layout_of
from dmuon.model.matrix_spec import MatrixSpec, spec_of
from dmuon.platform.torch_private import Box, even_shape, local_tensor, spec_like

_CONVERSIONS = ("_to_copy", "empty_like", "new_empty", "alias", "_pin_memory", "is_pinned")


class OwnedState(OwnedTensor):
    """A copy of what this rank owns of a matrix or of its momentum, in a state dict.

    The local tensor is the master's, if that is one matrix; of several, the boxes lie one after the other. Elementwise
    operations, copies and conversions need no other rank and give tensors that can be saved as well. Everything else
    raises and names the whole state dict.

    Attributes:
        boxes: that this rank has.
        spec: of which matrices the tensor is made.
    """

    boxes: tuple[Box, ...]
    spec: MatrixSpec
    allowed = LOCAL.union(_CONVERSIONS)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        state = args[0] if args else None
        if func is torch.ops.aten.new_empty.default and isinstance(state, OwnedState):
            # The stager of async_save makes a copy in this way, to which it gives memory and attributes afterwards.
            if tuple(args[1]) != tuple(state.shape):
                raise state.refused(func)
            return state.like(local_tensor(state).new_empty(local_tensor(state).shape, **(kwargs or {})))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def layout_key(self) -> Hashable:
        return (self.owners, self.boxes) if local_tensor(self).ndim == 1 else self.owners

    def like(self, local: Tensor, keeper: Keeper | None = None) -> OwnedState:
        return _wrapped(self, local, self.fqn, self.boxes, self.spec)

    def boxed(self) -> list[tuple[Box, Tensor]]:
        local = local_tensor(self)
        if local.ndim > 1:
            return [(box, local) for box in self.boxes]
        parts = local.split([math.prod(sizes) for _, sizes in self.boxes]) if self.boxes else ()
        return [(box, part.view(box[1])) for box, part in zip(self.boxes, parts, strict=True)]

    def full_tensor(self, **_: Any) -> Tensor:
        """The whole tensor, on every rank. Collective over the mesh.

        Every element lies on one rank; it arrives as it is where the bits of all ranks are added up.
        """
        mesh, at = self.device_mesh, self.device_mesh.get_coordinate() or ()
        whole = torch.zeros(self.shape, dtype=self.dtype, device=mesh.device_type)  # a value on the CPU may be gathered
        copies = (place for place, placement in zip(at, self.placements, strict=True) if placement == Replicate())
        if not any(copies):
            for box, part in self.boxed():
                whole[_slices(box)] = part
        bits = whole.view(-1).view({4: torch.int32, 8: torch.int64}.get(whole.element_size(), torch.uint8))
        _all_reduce(bits, mesh, dist.ReduceOp.SUM)
        return whole.to(local_tensor(self).device)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> DTensor:
        """An ordinary DTensor. Collective over the mesh."""
        mesh = self.device_mesh
        whole = as_dtensor(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, self.shape)
        return whole.redistribute(placements=self.placements if placements is None else placements)

    def to_local(self, **_: Any) -> Tensor:
        """The even shard for which torch takes this; it can only be written, by all ranks together."""
        return EvenShard(self, f"to_local() of {self.fqn!r} is not an even shard: it is {self._where}; {REMEDY}")

    def write_even(self, shard: Tensor) -> None:
        shape = even_shape(self.shape, self.device_mesh, self.placements)
        unfit = torch.tensor(int(shard.shape != shape), dtype=torch.int32, device=self.device_mesh.device_type)
        _all_reduce(unfit, self.device_mesh, dist.ReduceOp.MAX)
        if unfit:
            raise ValueError(
                f"{self.fqn}: some rank writes an even shard of another shape; here it has {tuple(shard.shape)}, and "
                f"{tuple(shape)} fits"
            )
        whole = even_whole(self, shard)
        for box, part in self.boxed():
            part.copy_(whole[_slices(box)])

    def refused(self, func: Any) -> RuntimeError:
        return RuntimeError(
            f"{func} is not available on {self.fqn!r} in a state dict of a dedicated model: it is {self._where} and "
            f"empty on the others; full_tensor() on every rank gives the whole, or {REMEDY}"
        )

    def _laid_otherwise(self, func: Any, other: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{func} mixes {self.fqn!r}, which a state dict of a dedicated model keeps {self._where}, with a tensor of "
            f"shape {tuple(other.shape)} that is laid out otherwise; full_tensor() on every rank gives the whole, or "
            f"{REMEDY}"
        )

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        return True

    def storage(self) -> Any:
        raise in_parts(self.fqn)  # safetensors asks this before it writes anything

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = twin = self.clone()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        warn_of_parts()
        return DTensor.__reduce_ex__(self, protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OwnedState({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype}, owners={self.owners})"


def _wrapped(like: OwnedTensor, local: Tensor, fqn: str, boxes: tuple[Box, ...], spec: MatrixSpec) -> OwnedState:
    state: OwnedState = OwnedState(local, spec_like(like, local.dtype), requires_grad=False)  # type: ignore[no-untyped-call]
    state.fqn, state.owners, state.keeper, state.boxes, state.spec = fqn, like.owners, None, boxes, spec
    return state


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def _all_reduce(tensor: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType) -> None:
    """Over all ranks of ``mesh``: one dimension after the other."""
    for dim in range(mesh.ndim if tensor.numel() else 0):
        if mesh.size(dim) > 1:
            dist.all_reduce(tensor, op, group=mesh.get_group(dim))


def even_whole(target: OwnedTensor, shard: Tensor) -> Tensor:
    """The tensor of which ``shard`` is this rank's even part, laid out as ``target`` says. Collective over its mesh."""
    local = shard.to(device=target.device_mesh.device_type)
    return as_dtensor(local, target.device_mesh, target.placements, target.shape).full_tensor()


# -- from masters, and to them ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor of several matrices that this rank has.

    Attributes:
        stack: the box as a stack of matrices.
        sources: what of which of this rank's parts lies where in it: the part's number, where, and which of its rows
            or columns.
    """

    box: Box
    stack: tuple[int, int, int]
    sources: tuple[tuple[int, Region, Run], ...]

    def take(self, block: Tensor, pieces: Sequence[Tensor]) -> None:
        """Copy ``pieces``, this rank's parts, to ``block``, which has the shape of the stack."""
        for number, region, (start, stop) in self.sources:
            target = region.take(block)
            target[0].copy_(pieces[number].narrow(region.dim - 1, start, stop - start))
            region.put(block, target.unbind(0))

    def put(self, block: Tensor, pieces: Sequence[Tensor]) -> None:
        """The reverse."""
        for number, region, (start, stop) in self.sources:
            pieces[number].narrow(region.dim - 1, start, stop - start).copy_(region.take(block)[0])


def state_of(local: Tensor, matrix: OwnedMatrix, fqn: str) -> OwnedState:
    """A copy of ``local``, which lies as the master of ``matrix``, for a state dict. Nothing travels."""
    spec = spec_of(matrix.rest)
    if not matrix.is_split:
        boxes = ((_origin(matrix), tuple(local.shape)),) if local.numel() else ()
        return _wrapped(matrix.rest, local.detach().clone(), fqn, boxes, spec)
    pieces = [piece for _, piece in matrix.pieces(local)]
    chunks = _chunks(matrix)
    kept = local.new_empty(sum(math.prod(chunk.stack) for chunk in chunks))
    for chunk, block in _blocks(chunks, kept):
        chunk.take(block, pieces)
    return _wrapped(matrix.rest, kept, fqn, tuple(chunk.box for chunk in chunks), spec)


def own_part(value: Tensor, matrix: OwnedMatrix) -> Tensor:
    """What the master of ``matrix`` holds of ``value`` on this rank. Collective for a DTensor that lies otherwise.

    Args:
        value: of the shape of the tensor, and nothing that :func:`dmuon.dedicated.state_dict.describe` refuses.
    """
    master = matrix.master
    if isinstance(value, OwnedTensor) and lies_as(value, matrix.rest):
        part = local_tensor(value)
        if matrix.is_split and isinstance(value, OwnedState):
            part = part.new_empty(master.shape)
            pieces = [piece for _, piece in matrix.pieces(part)]
            for chunk, block in _blocks(_chunks(matrix), local_tensor(value)):
                chunk.put(block, pieces)
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if matrix.tensor is not None:
            whole = whole[_slices((_origin(matrix), tuple(matrix.local_shape)))]
        part = matrix.own_part(whole)
    return part.to(device=master.device, dtype=master.dtype)


def lies_as(value: OwnedTensor, rest: OwnedTensor) -> bool:
    """Whether what a rank has of ``value`` is what the master of ``rest`` holds. The same on all ranks."""
    return (
        (value.shape, value.owners, value.placements) == (rest.shape, rest.owners, rest.placements)
        and value.device_mesh == rest.device_mesh
        and (not isinstance(value, OwnedState) or value.spec == spec_of(rest))
    )


def _blocks(chunks: Sequence[_Chunk], flat: Tensor) -> list[tuple[_Chunk, Tensor]]:
    parts = flat.split([math.prod(chunk.stack) for chunk in chunks]) if chunks else ()
    return [(chunk, part.view(chunk.stack)) for chunk, part in zip(chunks, parts, strict=True)]


def _origin(matrix: OwnedMatrix) -> tuple[int, ...]:
    """Where what this rank computes with begins in the whole tensor."""
    if matrix.tensor is None:
        return (0,) * len(matrix.shape)
    mesh = matrix.tensor.mesh
    pieces = layout_of(matrix.shape, [mesh.size()], [matrix.tensor.placement]).pieces
    return tuple(runs[0][0] if runs else 0 for runs in pieces[mesh.get_local_rank()].runs)


def _chunks(matrix: OwnedMatrix) -> list[_Chunk]:
    """What this rank owns of a tensor of several matrices: all of some of the stack, then parts of others."""
    present = [part for part in matrix.parts if part.numel and part.region is not None]
    counts = Counter(part.region.span[0] for part in present if part.region is not None)
    mine: dict[int, list[tuple[int, Region]]] = {}  # by place in the stack
    for number, part in enumerate(matrix.mine):
        if part.numel and part.region is not None:
            mine.setdefault(part.region.span[0], []).append((number, part.region))
    chunks: list[_Chunk] = []
    whole = [place for place in sorted(mine) if len(mine[place]) == counts[place]]
    for first, last in _spans(whole):
        sources = [
            (number, replace(region, stack=(last - first, *region.stack[1:]), span=(place - first, place - first + 1)))
            for place in range(first, last)
            for number, region in mine[place]
        ]
        _, rows, cols = sources[0][1].stack
        box = _box(matrix, (first, last), (0, rows), (0, cols))
        placed = tuple((number, region, (0, _length(region.runs))) for number, region in sources)
        chunks.append(_Chunk(box, (last - first, rows, cols), placed))
    for place in sorted(mine.keys() - set(whole)):
        for number, region in mine[place]:
            begin = 0
            for start, stop in region.runs:
                _, rows, cols = region.stack
                bounds = ((start, stop), (0, cols)) if region.dim == 1 else ((0, rows), (start, stop))
                stack = (1, stop - start, cols) if region.dim == 1 else (1, rows, stop - start)
                within = Region(stack, (0, 1), region.dim, ((0, stop - start),))
                source = (number, within, (begin, begin + stop - start))
                chunks.append(_Chunk(_box(matrix, (place, place + 1), *bounds), stack, (source,)))
                begin += stop - start
    return chunks


def _box(matrix: OwnedMatrix, span: Run, rows: Run, cols: Run) -> Box:
    """These matrices of the stack, and rows and columns of each, in the whole tensor."""
    local = matrix.local_shape
    bounds: list[Run] = [rows, cols] if len(local) == 2 else [span, rows, cols]
    if spec_of(matrix.rest).flattened:
        bounds = [rows, *((0, length) for length in local[1:])]
    offsets = tuple(begin + start for begin, (start, _) in zip(_origin(matrix), bounds, strict=True))
    return offsets, tuple(stop - start for start, stop in bounds)


def _spans(numbers: Sequence[int]) -> list[Run]:
    """Ascending ``numbers`` as ranges."""
    spans: list[Run] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = spans[-1][0], number + 1
        else:
            spans.append((number, number + 1))
    return spans


def _length(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)
