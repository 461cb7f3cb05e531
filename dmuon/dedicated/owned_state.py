"""What state dicts hold of owned matrices: what this rank owns, told to torch.distributed.checkpoint box by box.

An owner has all of a matrix and the other ranks have nothing, so that a state dict is made, saved and loaded without
communication. A tensor of several matrices is cut into boxes: each matrix is one, or one for each run of rows or
columns where it is interleaved with others; neighbours in a stack that have one owner are one together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.matrix import OwnedMatrix, as_dtensor
from dmuon.dedicated.owned_tensor import LOCAL, OwnedTensor
from dmuon.layout.shards import Run, layout_of
from dmuon.model.matrix_spec import MatrixSpec, spec_of
from dmuon.platform.host import logger
from dmuon.platform.torch_private import Box, even_shape, local_tensor, spec_like

_log = logger(__name__)
_CONVERSIONS = ("_to_copy", "empty_like", "new_empty", "alias", "_pin_memory", "is_pinned")
REMEDY = (
    "on every rank call whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)) of torch.distributed.checkpoint.state_dict (for an optimizer get_optimizer_state_dict), and "
    "write that on rank 0: model.save_pretrained(folder, state_dict=whole) or torch.save(whole, file); "
    "torch.distributed.checkpoint saves shards. With accelerate take "
    "dmuon.integrations.accelerate.DedicatedAccelerator"
)


@cache
def warn_of_parts() -> None:
    """What every rank writes for itself is whole, what one writes for all is not."""
    _log.warning(
        "a state dict of a dedicated model is pickled, of which each rank has a part: every rank must write and load "
        "its own file, on as many ranks, by torch.load(file, weights_only=False). For one file of all, %s",
        REMEDY,
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a whole tensor that this rank has, and where it lies in what this rank holds.

    Attributes:
        offset: in the local tensor, flat, where the matrix begins.
        shape: of the matrix, or of several that lie one after the other.
        dim, start: where in these the box begins, which has all of them along the other dimensions.
    """

    box: Box
    offset: int
    shape: tuple[int, ...]
    dim: int
    start: int

    def view(self, flat: Tensor) -> Tensor:
        """The box in ``flat``, with its own shape and the same memory."""
        sizes = self.box[1]
        matrices = flat[self.offset : self.offset + math.prod(self.shape)].view(self.shape)
        length = math.prod(sizes) * self.shape[self.dim] // max(1, matrices.numel())
        return matrices.narrow(self.dim, self.start, length).view(sizes)


class OwnedState(OwnedTensor):
    """A copy of what this rank owns of a matrix or of its momentum, in a state dict.

    The local tensor lies as the master. Elementwise operations, copies and conversions need no other rank and give
    tensors that can be saved as well. Everything else raises and names the whole state dict.

    Attributes:
        chunks: that this rank has.
        spec: of which matrices the tensor is made.
        param: of which it stands in what ``state_dict()`` of the model returned; None elsewhere. Torch's shares the
            memory of the parameter, to which programs write by it.
    """

    chunks: tuple[Chunk, ...]
    spec: MatrixSpec
    param: weakref.ref[Tensor] | None = None
    allowed = LOCAL.union(_CONVERSIONS)
    kept = ("owners", "chunks", "spec")
    keeps = "a state dict of a dedicated model keeps"
    remedy = f"full_tensor() on every rank gives the whole, or {REMEDY}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        state = args[0] if args else None
        if func is torch.ops.aten.new_empty.default and isinstance(state, OwnedState):
            # The stager of async_save makes a copy in this way, to which it gives memory and attributes afterwards.
            if tuple(args[1]) != tuple(state.shape):
                raise state.refused(str(func))
            return state.like(local_tensor(state).new_empty(local_tensor(state).shape, **(kwargs or {})))
        if func is torch.ops.aten.copy_.default and isinstance(state, OwnedState) and state.param is not None:
            newer = args[1]
            if isinstance(newer, OwnedState) and newer.param is not None and newer.param() is state.param():
                # This brings an older state dict up to date, and would not change the model.
                local_tensor(state).copy_(local_tensor(newer))
                return state
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def layout_key(self) -> Hashable:
        return (self.owners, self.chunks) if local_tensor(self).ndim == 1 else self.owners

    def boxed(self) -> list[tuple[Box, Tensor]]:
        flat = local_tensor(self).view(-1)
        return [(chunk.box, chunk.view(flat)) for chunk in self.chunks]

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
        return self.even_shard()

    def write_even(self, shard: Tensor, fault: Exception | None = None) -> None:
        """As of a parameter; ``fault`` is why this rank cannot, of which the others hear."""
        shape = even_shape(self.shape, self.device_mesh, self.placements)
        is_unfit = shard.shape != shape or fault is not None
        unfit = torch.tensor(this_rank() + 1 if is_unfit else 0, dtype=torch.int32).to(self.device_mesh.device_type)
        _all_reduce(unfit, self.device_mesh, dist.ReduceOp.MAX)
        if (last := int(unfit)) > 0:
            raise fault or ValueError(
                f"{self.fqn}: rank {last - 1} writes an even shard of another shape, or cannot write one now; here it "
                f"has {tuple(shard.shape)}, and {tuple(shape)} fits"
            )
        local = shard.to(device=self.device_mesh.device_type)
        whole = as_dtensor(local, self.device_mesh, self.placements, self.shape).full_tensor()
        for box, part in self.boxed():
            part.copy_(whole[_slices(box)])

    def refuse_writes(self) -> None:
        if self.param is not None:
            raise RuntimeError(
                f"{self.fqn!r} in state_dict() of a dedicated model is a copy: what is written to it would not reach "
                "the model; write to the parameter of model.named_parameters() inside torch.no_grad(), or call "
                "load_state_dict(); what you keep beside the model, clone() first"
            )

    def refused(self, what: str, operation: str = "") -> RuntimeError:
        return RuntimeError(
            f"{what} is not available on {self.fqn!r} in a state dict of a dedicated model: it is {self._where} and "
            f"empty on the others; {self.remedy}"
        )

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        return True

    def storage(self) -> Any:
        # Libraries that write one file, such as safetensors, ask this first. They would write what this rank has under
        # the name of the whole, or say nothing of what to do.
        raise RuntimeError(
            f"{self.fqn!r} in a state dict of a dedicated model cannot be written to one file as it is, since each "
            f"rank has some of it: {REMEDY}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = twin = self.clone()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        warn_of_parts()
        return DTensor.__reduce_ex__(self if self.param is None else self.detach(), protocol)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def _all_reduce(tensor: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType) -> None:
    """Over all ranks of ``mesh``: one dimension after the other."""
    for dim in range(mesh.ndim if tensor.numel() else 0):
        if mesh.size(dim) > 1:
            dist.all_reduce(tensor, op, group=mesh.get_group(dim))


# -- from masters, and to them ---------------------------------------------------------------------------------------


def state_of(local: Tensor, matrix: OwnedMatrix, fqn: str) -> OwnedState:
    """A copy of ``local``, which lies as the master of ``matrix``, for a state dict. Nothing travels."""
    kept, rest = local.detach().clone(memory_format=torch.contiguous_format), matrix.rest
    state: OwnedState = OwnedState(kept, spec_like(rest, local.dtype), requires_grad=False)  # type: ignore[no-untyped-call]
    state.fqn, state.owners, state.chunks, state.spec = fqn, rest.owners, _chunks(matrix), spec_of(rest)
    return state


def own_part(value: Tensor, matrix: OwnedMatrix) -> Tensor:
    """What the master of ``matrix`` holds of ``value`` on this rank. Collective for a DTensor that lies otherwise.

    Args:
        value: of the shape of the tensor, and nothing that :func:`dmuon.dedicated.state_dict.describe` refuses.
    """
    master = matrix.master
    if isinstance(value, OwnedTensor) and lies_as(value, matrix.rest):
        part = local_tensor(value)
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(matrix.full, DTensor):
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


def _origin(matrix: OwnedMatrix) -> tuple[int, ...]:
    """Where what this rank computes with begins in the whole tensor."""
    if not isinstance(matrix.full, DTensor):
        return (0,) * len(matrix.shape)
    mesh = matrix.full.device_mesh
    pieces = layout_of(matrix.shape, [mesh.size()], matrix.full.placements).pieces
    return tuple(runs[0][0] if runs else 0 for runs in pieces[mesh.get_local_rank()].runs)


def _chunks(matrix: OwnedMatrix) -> tuple[Chunk, ...]:
    """What this rank owns of a tensor, in the order in which masters lie."""
    flattened, origin, local_shape = spec_of(matrix.rest).flattened, _origin(matrix), matrix.local_shape
    chunks: list[Chunk] = []
    offset = 0
    whole: Run | None = None  # which matrices of the stack the last chunk is, if it is all of them
    for part in matrix.mine:
        (first, last), (_, rows, cols), dim = part.region.span, part.region.stack, part.region.dim
        begin = 0
        for start, stop in part.region.runs if part.numel else ():
            bounds: list[Run] = [(first, last), (0, rows), (0, cols)]
            bounds[dim] = start, stop
            if flattened:
                bounds = [bounds[1], *((0, length) for length in local_shape[1:])]
            elif len(local_shape) == 2:
                bounds = bounds[1:]
            offsets = tuple(at + start for at, (start, _) in zip(origin, bounds, strict=True))
            sizes = tuple(stop - start for start, stop in bounds)
            if whole is not None and whole[1] == first and sizes == (1, rows, cols):
                whole = whole[0], last  # a stack has all dimensions of its own, so that these are one box
                before = chunks.pop()
                sizes = (last - whole[0], rows, cols)
                chunks.append(Chunk((before.box[0], sizes), before.offset, sizes, 0, 0))
            else:
                chunks.append(Chunk((offsets, sizes), offset, part.local_shape, dim - 1, begin))
                whole = (first, last) if sizes == (1, rows, cols) else None
            begin += stop - start
        offset += part.numel
    return tuple(chunks)
