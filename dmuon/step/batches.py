"""Muon's update of what this rank holds: matrices of one shape in stacked batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.domain import Domain
from dmuon.dedicated.runtime import Runtime, runtime_of
from dmuon.layout.parcels import Parcel
from dmuon.platform.torch_private import local_tensor
from dmuon.step.task import Task

__all__ = ["Batch", "like_param", "make_batches"]

_PLAIN_BATCH_ELEMENTS = 2**25  # bounds the workspace where no plan sets a batch size


@dataclass(slots=True, eq=False)
class Batch:
    """Matrices of one shape whose momentum is one stacked tensor, so that a batch needs no copies.

    Attributes:
        params: one per matrix, or the one stack ``(e, m, n)`` that holds all of them.
        momentum: ``(k, …)`` of this rank's parts; no rows where it holds none of them.
        position: of the first matrix among all of them.
        shape: ``(m, n)`` of the whole matrices.
        span: which matrices of the local stack; None outside of stacks.
        first: number of the first one in the whole stack.
        stack: momentum of all of the local stack, of which ``momentum`` is a view; None outside of stacks.
        domain: the ranks that hold the matrices together; None where this rank has all of them alone.
        parcel: where their pieces lie, and who orthogonalizes them.
        number: of the parameter, where a user's functions exchange it.
    """

    params: list[Tensor]
    momentum: Tensor
    position: int
    shape: tuple[int, int]
    span: slice | None = None
    first: int = 0
    stack: Tensor | None = None
    domain: Domain | None = None
    parcel: Parcel | None = None
    number: int | None = None

    @property
    def runtime(self) -> Runtime | None:
        return runtime_of(self.params[0])

    @property
    def count(self) -> int:
        """Matrices, wherever they lie."""
        if self.parcel is not None:
            return self.parcel.count
        return len(self.params) if self.span is None else len(self.momentum)

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The local parts, ``(…, …)`` each, of tensors that lie as some of the parameters."""
        local = [local_tensor(tensor) for tensor in tensors]
        return local if self.span is None else list(local[0][self.span].unbind(0))

    def runs(self, present: Sequence[bool]) -> list[tuple[int, int]]:
        """Ranges of neighbours among the parameters that are ``present``: the whole batch, normally."""
        found: list[tuple[int, int]] = []
        for index, there in enumerate(present):
            if there and found and found[-1][1] == index:
                found[-1] = found[-1][0], index + 1
            elif there:
                found.append((index, index + 1))
        return found

    def rows(self, start: int, end: int) -> slice:
        """The matrices of parameters ``start`` to ``end``."""
        return slice(start, end) if self.span is None else slice(None)

    def labels(self, start: int, end: int) -> list[tuple[Tensor, int | None]]:
        """Parameter, and number in the stack, of each of these matrices."""
        if self.span is None:
            return [(param, None) for param in self.params[start:end]]
        return [(self.params[0], self.first + i) for i in range(self.count)]


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local``, which lies as ``param`` does, as a DTensor where that is one."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def make_batches(
    params: Iterable[Tensor],
    assigned: Mapping[int, Sequence[Task]] | None = None,
    *,
    numbers: Mapping[int, int] | None = None,
    planned_only: bool = False,
) -> list[Batch]:
    """Batches of everything that lives here, and of what is exchanged, with zero momentum in fp32 (or wider).

    Args:
        assigned: by ``id`` of the parameter; what is missing lives on this rank alone, or is owned.
        numbers: by ``id``, those that a user's functions exchange, one by one.
        planned_only: allocate nothing: momentum is on the meta device.
    """
    classes: dict[tuple[Any, ...], list[tuple[int, Tensor, Task | None]]] = {}
    positions: dict[int, int] = {}
    known: set[int] = set()
    batches: list[Batch] = []
    for index, param in enumerate(params):
        runtime = runtime_of(param)
        if runtime is not None:
            if id(runtime) not in known:
                known.add(id(runtime))
                offset = len(positions)
                positions.update({id(entry.rest): offset + i for i, entry in enumerate(runtime.entries())})
            entry = runtime.entry_of(param)
            if entry.owner == runtime.comm.position:
                split = None
                if entry.parcel is not None:
                    assert runtime.tensor_domain is not None
                    split = Task(runtime.tensor_domain, entry.parcel)
                _join_class(classes, positions[id(param)], param, runtime, split)
        elif numbers and id(param) in numbers:
            batches.append(_by_function(param, index, numbers[id(param)], planned_only))
        elif param.ndim == 3:
            batches += _of_stack(param, index, (assigned or {}).get(id(param)), planned_only)
        else:
            at = (assigned or {}).get(id(param))
            _join_class(classes, index, param, None, at[0] if at else None)
    for members in classes.values():
        members.sort(key=lambda member: member[0])
        size = _batch_size(members[0][1], members[0][2])
        for start in range(0, len(members), size):
            batches.append(_stacked(members[start : start + size], planned_only))
    return sorted(batches, key=lambda batch: batch.position)


def _join_class(
    classes: dict[tuple[Any, ...], list[tuple[int, Tensor, Task | None]]],
    position: int,
    param: Tensor,
    runtime: Runtime | None,
    at: Task | None,
) -> None:
    local = local_tensor(param)
    key = (
        param.shape, local.shape, local.dtype, local.device, runtime,
        None if at is None else (id(at.domain), at.parcel, at.nbytes),
    )  # fmt: skip
    classes.setdefault(key, []).append((position, param, at))


def _stacked(members: Sequence[tuple[int, Tensor, Task | None]], planned_only: bool) -> Batch:
    position, param, at = members[0]
    local = local_tensor(param)
    parcel = None if at is None else _counted(at.parcel, len(members))
    shape = local.shape if parcel is None else parcel.layout.shape
    return Batch(
        [p for _, p, _ in members],
        _zeros((len(members), *local.shape), local, planned_only),
        position,
        (shape[0], shape[1]),
        domain=None if at is None else at.domain,
        parcel=parcel,
    )


def _by_function(param: Tensor, position: int, number: int, planned_only: bool) -> Batch:
    local = local_tensor(param)
    stack = local.ndim == 3
    momentum = _zeros(local.shape if stack else (1, *local.shape), local, planned_only)
    span = slice(0, len(local)) if stack else None
    return Batch(
        [param], momentum, position, (local.shape[-2], local.shape[-1]), span,
        stack=momentum if stack else None, number=number,
    )  # fmt: skip


def _of_stack(param: Tensor, position: int, assigned: Sequence[Task] | None, planned_only: bool) -> list[Batch]:
    """Batches of a stack of matrices; the momentum of all of them is one tensor, shaped as the local stack."""
    local = local_tensor(param)
    momentum = _zeros(local.shape, local, planned_only)
    rows, cols = local.shape[1:]
    if assigned is None:
        size = max(1, _PLAIN_BATCH_ELEMENTS // max(1, rows * cols))
        spans = [slice(a, min(a + size, len(local))) for a in range(0, len(local), size)]
        return [Batch([param], momentum[s], position, (rows, cols), s, s.start, momentum) for s in spans]
    batches = []
    for at in assigned:
        m, n = at.parcel.layout.shape
        size = _batch_size(param, at)
        held = at.domain.position in at.parcel.pieces
        for start in range(at.start, at.stop, size):
            count = min(size, at.stop - start)
            offset = at.offset + start - at.start
            span = slice(offset, offset + count) if held else slice(0, 0)
            batches.append(
                Batch(
                    [param],
                    momentum[span],
                    position,
                    (m, n),
                    span,
                    start,
                    momentum,
                    at.domain,
                    _counted(at.parcel, count),
                )
            )
    return batches


def _counted(parcel: Parcel, count: int) -> Parcel:
    return Parcel(count, parcel.layout, parcel.holders, parcel.owner)


def _zeros(shape: Sequence[int], like: Tensor, planned_only: bool) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(tuple(shape), dtype=dtype, device="meta" if planned_only else like.device)


def _batch_size(param: Tensor, at: Task | None) -> int:
    runtime = runtime_of(param)
    shape = local_tensor(param).shape if at is None else at.parcel.layout.shape
    small, large = min(shape), max(shape)
    if runtime is not None:
        whole: tuple[int, int] = (min(param.shape), max(param.shape))
        return int(runtime.chunks[whole])
    if at is None:
        return max(1, _PLAIN_BATCH_ELEMENTS // max(1, small * large))
    itemsize = torch.promote_types(param.dtype, torch.float32).itemsize
    planned = at.domain.chunks.get((small, large), _PLAIN_BATCH_ELEMENTS // (small * large))
    packed = sum(at.parcel.from_owner.numel_out(at.parcel.owner).values())  # as many copies as there are elsewhere
    held_at_once = max(small * large, packed // at.parcel.count)
    return max(1, min(planned, at.nbytes // (held_at_once * itemsize)))
