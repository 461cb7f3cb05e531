"""What a step is asked to orthogonalize, and batches of it: matrices whose momentum is one stacked tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.layout.parcels import Parcel
from dmuon.platform.torch_private import local_tensor

_UNPLANNED_ELEMENTS = 2**25  # bounds the workspace where no plan sets a batch size


@dataclass(frozen=True, slots=True)
class Shared:
    """Which ranks hold matrices together, where the pieces lie, and who orthogonalizes them."""

    domain: Domain
    parcel: Parcel


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One matrix to orthogonalize, or neighbouring matrices of a stack, as this rank sees them.

    Attributes:
        param: the matrix ``(m, n)``, or the stack ``(e, m, n)``.
        position: tasks of one residency are batched, and updated unless it says otherwise, in ascending order.
        shape: ``(m, n)`` of each whole matrix.
        batch_size: how many matrices are orthogonalized at once, at most.
        variants: how Newton-Schulz runs, by batch size, as planned; empty leaves it to a rule.
        span: which matrices of the local stack these are; empty if this rank has no part of them. A matrix counts as a
            stack of one.
        first: number of the first matrix in the whole stack.
        shared: with which ranks; None if this rank has the matrices alone.
    """

    param: Tensor
    position: int
    shape: tuple[int, int]
    batch_size: int
    variants: Mapping[int, str]
    span: slice
    first: int = 0
    shared: Shared | None = None

    @property
    def count(self) -> int:
        """Matrices, on whichever ranks they lie."""
        return self.span.stop - self.span.start if self.shared is None else self.shared.parcel.count


def unplanned_batch_size(shape: tuple[int, int]) -> int:
    """How many matrices of ``shape`` to orthogonalize at once if no plan says so."""
    return max(1, _UNPLANNED_ELEMENTS // max(1, shape[0] * shape[1]))


@dataclass(slots=True, eq=False)
class Batch:
    """Matrices of one shape. Each parameter is a matrix, or there is one parameter, a stack of them.

    Attributes:
        momentum: ``(k, …)``, this rank's parts, so that a batch needs no copies; no rows if it has none.
        position: that of the first task.
        shape: ``(m, n)`` of each whole matrix.
        variants: how Newton-Schulz runs, by batch size, as planned.
        span: which matrices of a local stack these are.
        first: number of the first of these in the whole stack.
        count: matrices, on whichever ranks they lie.
    """

    params: list[Tensor]
    momentum: Tensor
    position: int
    shape: tuple[int, int]
    variants: Mapping[int, str]
    span: slice
    first: int
    count: int

    @property
    def is_stack(self) -> bool:
        return self.params[0].ndim == 3

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of the matrices, 2-D each, in tensors that lie as some of the parameters do."""
        local = [local_tensor(tensor) for tensor in tensors]
        return list(local[0][self.span].unbind(0)) if self.is_stack else local

    def runs(self, present: Sequence[bool]) -> list[tuple[int, int]]:
        """Longest ranges ``(start, end)`` of parameters that are all ``present``; one range if nothing is missing."""
        ranges: list[tuple[int, int]] = []
        for index, is_present in enumerate(present):
            if is_present and ranges and ranges[-1][1] == index:
                ranges[-1] = ranges[-1][0], index + 1
            elif is_present:
                ranges.append((index, index + 1))
        return ranges

    def rows(self, start: int, end: int) -> slice:
        """The matrices of parameters ``start`` to ``end``."""
        return slice(None) if self.is_stack else slice(start, end)

    def labels(self, start: int, end: int) -> list[tuple[Tensor, int | None]]:
        """Parameter of each of these matrices, and its number in the stack if that is one."""
        if self.is_stack:
            return [(self.params[0], self.first + i) for i in range(self.count)]
        return [(param, None) for param in self.params[start:end]]


@dataclass(slots=True, eq=False)
class SharedBatch(Batch):
    """Matrices that several ranks hold together, with one owner.

    Attributes:
        domain: these ranks.
        parcel: where the pieces of all ``count`` matrices lie, and who orthogonalizes them.
    """

    domain: Domain
    parcel: Parcel


def make_batches(tasks: Iterable[Task], device: torch.device | None = None) -> tuple[list[Batch], dict[int, Tensor]]:
    """Batches of ``tasks``, whose parameters share their options, with momentum of zeros in fp32 (or wider).

    Args:
        device: of the momentum; ``None`` is that of the parameters, ``meta`` allocates nothing.

    Returns:
        The batches by position, and by ``id`` of the parameter this rank's momentum of it, shaped as the local tensor.
        These are views of the batches' momentum, or the momentum of a stack is a view of them.
    """
    batches: list[Batch] = []
    momentum: dict[int, Tensor] = {}
    alike: dict[object, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.position):
        param, local = task.param, local_tensor(task.param)
        if param.ndim == 3:
            if id(param) not in momentum:
                momentum[id(param)] = _zeros(local.shape, local, device)
            batches += _of_stack(task, momentum[id(param)])
        else:
            kind = (param.shape, local.shape, local.dtype, local.device, task.batch_size, task.shared)
            alike.setdefault(kind, []).append(task)
    for members in alike.values():
        size, local = members[0].batch_size, local_tensor(members[0].param)
        for start in range(0, len(members), size):
            params = [task.param for task in members[start : start + size]]
            rows = _zeros((len(params), *local.shape), local, device)
            momentum.update(zip(map(id, params), rows, strict=True))
            batches.append(_batch(members[start], params, rows, slice(0, 1), 0, len(params)))
    return sorted(batches, key=lambda batch: batch.position), momentum


def _of_stack(task: Task, momentum: Tensor) -> Iterator[Batch]:
    """``momentum`` is that of all of the local stack. A stack without matrices on this rank is one empty batch."""
    for start in range(0, max(1, task.count), task.batch_size):
        count = min(task.batch_size, task.count - start)
        begin = min(task.span.start + start, task.span.stop)
        span = slice(begin, min(begin + count, task.span.stop))
        yield _batch(task, [task.param], momentum[span], span, task.first + start, count)


def _batch(task: Task, params: list[Tensor], momentum: Tensor, span: slice, first: int, count: int) -> Batch:
    """Of tasks like ``task``, the first one."""
    if task.shared is None:
        return Batch(params, momentum, task.position, task.shape, task.variants, span, first, count)
    parcel = replace(task.shared.parcel, count=count)
    return SharedBatch(
        params, momentum, task.position, task.shape, task.variants, span, first, count, task.shared.domain, parcel
    )


def _zeros(shape: Sequence[int], like: Tensor, device: torch.device | None) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(tuple(shape), dtype=dtype, device=device or like.device)
