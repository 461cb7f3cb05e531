"""What a step is asked to orthogonalize, and batches of it: matrices whose momentum is one stacked tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.kernels import streams_of
from dmuon.layout.matrices import Parcel, Region
from dmuon.platform.streams import Stream
from dmuon.platform.torch_private import local_tensor
from dmuon.step.half_weights import Places, take_edits

_SMALL_PART = 2**16  # elements: what is elementwise takes less time than to start it


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Matrices of one parameter that lie alike and have one owner, as this rank sees them.

    Attributes:
        param: one matrix, or a tensor that is made of several.
        position: tasks of one residency are batched, and updated unless it says otherwise, in ascending order.
        shape: ``(m, n)`` of each whole matrix, as it is stored.
        batch_size: how many matrices are orthogonalized at once, at most.
        region: where in the local tensor the matrices lie, if that is more than one matrix.
        transposed: matrices are stored ``(in, out)``.
        numbers: of the matrices in the parameter; of any length if that is one matrix.
        domain: the ranks that hold the matrices together; None if this rank has them alone.
        parcel: where the pieces lie, and who orthogonalizes them; None likewise.
        within: where matrices of one parcel lie in a parameter that is several: whatever is equal on all ranks if it is
            on one, and tells every rank's region. A rank's own region would not do: of two parameters it may have
            nothing at all, while others have parts that lie in different ways.
    """

    param: Tensor
    position: int
    shape: tuple[int, int]
    batch_size: int
    region: Region | None = None
    transposed: bool = False
    numbers: tuple[int, ...] = (0,)
    domain: Domain | None = None
    parcel: Parcel | None = None
    within: object = None

    @property
    def count(self) -> int:
        """Matrices, on whichever ranks they lie."""
        return len(self.numbers)


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """What comes from the host on a stream of its own; out of date where that has another ``version`` now."""

    stored: Tensor
    stream: Stream
    mark: torch.Event | None
    version: int

    def taken(self) -> Tensor:
        """For what is queued from now on."""
        self.stream.join_up_to(self.mark)
        return self.stream.handed_over(self.stored)


@dataclass(eq=False)
class Batch:
    """Matrices of one shape, which lie alike. What every step would ask of them is worked out once.

    Attributes:
        momenta: this rank's momentum of each parameter, shaped as the local tensor.
        position: that of the first task.
        shape: ``(m, n)`` of each whole matrix, as it is stored.
        region: where in each local tensor the matrices lie; None where that is one matrix.
        transposed: matrices are stored ``(in, out)``.
        numbers: of the matrices in each parameter that is more than one; several only if it is the only one.
        stacked: the momentum of all matrices, ``(count, …)``, of which ``momenta`` are parts or which is a part of
            them; None where no view is that, as of one of several projections in each of some parameters.
        count: matrices, on whichever ranks they lie.
        each: matrices of one parameter.
        whole: what :meth:`runs` gives if nothing is missing.
        ids: of the parameters.
        labels: parameter of each matrix, and its number in that if it is more than one matrix.
        scaled_shape: ``(out, in)`` of each whole matrix, by which learning rates are scaled.
        dtype, device: in which momentum is folded, and what travels.
        is_copied: :meth:`momentum` is a copy: it is stored otherwise than it is folded, or as no view of one tensor.
        is_rounded: it is stored in another dtype.
        is_moved: it is stored on another device, the host.
        masters: by ``id`` of the parameter, of all that have one, this rank's part, shaped as the local tensor; perhaps
            on the host.
        places: of those that are rounded stochastically.
    """

    params: list[Tensor]
    momenta: list[Tensor]
    position: int
    shape: tuple[int, int]
    region: Region | None
    transposed: bool
    numbers: tuple[int, ...]
    stacked: Tensor | None

    def __post_init__(self) -> None:
        self.each = len(self.numbers)
        self.count = len(self.params) * self.each
        self.whole = [(0, len(self.params))]
        self.ids = frozenset(map(id, self.params))
        numbers = [None] if self.region is None or self.region.is_all else self.numbers
        self.labels = [(param, number) for param in self.params for number in numbers]
        self.scaled_shape = self.shape[::-1] if self.transposed else self.shape
        self.dtype = torch.promote_types(self.params[0].dtype, torch.float32)
        self.device = local_tensor(self.params[0]).device
        self.is_rounded = self.momenta[0].dtype != self.dtype
        self.is_moved = self.momenta[0].device != self.device
        self.is_copied = self.stacked is None or self.is_rounded or self.is_moved
        self.masters: Mapping[int, Tensor] = {}
        self.places: Places | None = None
        self._fetched: dict[int, _Fetched] = {}  # by ``id`` of what is on the host

    def gradients(self, start: int, end: int, decay: float = 0.0) -> list[Tensor]:
        """This rank's parts of the gradients of parameters ``start`` to ``end``; zeros where it has none.

        Args:
            decay: the gradients are those of the loss and of half as much times the weights' squared norm.
        """
        grads = []
        for param in self.params[start:end]:
            grad = param.grad
            grad = local_tensor(torch.zeros_like(param) if grad is None else grad)
            grads.append(grad)
        if decay:
            pairs = zip(grads, self.weights(start, end), strict=True)
            grads = [grad.to(self.dtype) + decay * weight for grad, weight in pairs]
        return grads if self.region is None else self.split(grads)

    def weights(self, start: int, end: int) -> list[Tensor]:
        """What is updated of parameters ``start`` to ``end``, this rank's parts: their masters, if they have any."""
        weights = [local_tensor(param).detach() for param in self.params[start:end]]
        return self.masters_of(start, end, weights) or weights

    def masters_of(self, start: int, end: int, weights: Sequence[Tensor]) -> list[Tensor]:
        """Masters of parameters ``start`` to ``end``, with what somebody has changed in ``weights``, their local parts.

        None if the weights are wide, and so their own: those of a batch are of one dtype. Of masters on the host they
        are copies, which :meth:`keep_masters` writes back.
        """
        if id(self.params[start]) not in self.masters:
            return []
        masters = [self._here(self.masters[id(param)]) for param in self.params[start:end]]
        take_edits(masters, weights)
        return masters

    def keep_masters(self, start: int, masters: Sequence[Tensor]) -> None:
        """Let the host have ``masters``, of parameters from ``start`` on, where these are copies of its own."""
        for param, master in zip(self.params[start : start + len(masters)], masters, strict=True):
            kept = self.masters[id(param)]
            if kept is not master:
                kept.copy_(master, non_blocking=True)
                self._fetched.pop(id(kept), None)

    def split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of the matrices, 2-D each, in local ``tensors`` that lie as some of the parameters do.

        Views where that is possible; :meth:`put` writes changes back to where they came from.
        """
        if self.region is None:
            return list(tensors)
        return [matrix for tensor in tensors for matrix in self.region.take(tensor).unbind(0)]

    def put(self, tensors: Sequence[Tensor], matrices: Sequence[Tensor]) -> None:
        """Write ``matrices``, which :meth:`split` gave and which were changed, back if they are copies."""
        if self.region is None or not self.region.count:
            return
        for i, tensor in enumerate(tensors):
            self.region.put(tensor, matrices[i * self.region.count : (i + 1) * self.region.count])

    def momentum(self, start: int, end: int) -> Tensor:
        """Of parameters ``start`` to ``end``, ``(k, …)`` of this rank's parts: of :attr:`stacked`, or else a copy.

        :meth:`put_momentum` writes changes of a copy back.
        """
        if self.stacked is not None:
            rows = slice(start * self.each, end * self.each)
            if id(self.stacked) in self._fetched:
                here = self._here(self.stacked)
                del self._fetched[id(self.stacked)]
                return here[rows].to(self.dtype)
            stored = self.stacked[rows]
        else:
            assert self.region is not None
            taken = [self.region.take(momentum) for momentum in self.momenta[start:end]]
            stored = taken[0] if len(taken) == 1 else torch.cat(taken)
        return (stored.to(self.device, non_blocking=True) if self.is_moved else stored).to(self.dtype)

    @property
    def on_host(self) -> list[Tensor]:
        """Momentum and masters that are stored there, but for momentum that is no view of one tensor."""
        found = [self.stacked] if self.is_moved and self.stacked is not None else []
        masters = (self.masters[id(param)] for param in self.params if id(param) in self.masters)
        return found + [one for one in masters if one.device.type == "cpu" != self.device.type]

    def fetch(self, beside: Stream) -> None:
        """Let what is stored on the host travel while the device computes."""
        self._fetched, stored = {}, self.on_host
        if not stored:
            return
        with beside.beside():
            copies = [one.to(self.device, non_blocking=True) for one in stored]
        mark = beside.mark()
        pairs = zip(stored, copies, strict=True)
        self._fetched = {id(one): _Fetched(copy, beside, mark, one._version) for one, copy in pairs}

    def _here(self, stored: Tensor) -> Tensor:
        """``stored`` on the device: what was fetched, unless it has changed since."""
        fetched = self._fetched.get(id(stored))
        if fetched is not None and fetched.version == stored._version:
            return fetched.taken()
        return stored.to(self.device, non_blocking=True)

    def put_momentum(self, start: int, end: int, momentum: Tensor) -> None:
        """Write a copy of momentum, which was changed, back to where it came from, rounded to the nearest."""
        if self.is_moved:
            momentum = momentum.to(self.momenta[0].dtype)  # before it travels
        if self.stacked is not None:
            self.stacked[start * self.each : end * self.each].copy_(momentum, non_blocking=True)
            return
        matrices = list(momentum.unbind(0))
        if end - start > 1 or self.is_rounded or self.is_moved:  # it is a copy, whatever its parts were
            copied, matrices = matrices, self.split(self.momenta[start:end])
            torch._foreach_copy_(matrices, copied)
        self.put(self.momenta[start:end], matrices)

    def runs(self, present: Set[int]) -> list[tuple[int, int]]:
        """Longest ranges ``(start, end)`` of parameters with ids in ``present``; :attr:`whole` if none is missing."""
        if self.ids <= present:
            return self.whole
        ranges: list[tuple[int, int]] = []
        for index, param in enumerate(self.params):
            if id(param) in present and ranges and ranges[-1][1] == index:
                ranges[-1] = ranges[-1][0], index + 1
            elif id(param) in present:
                ranges.append((index, index + 1))
        return ranges


@dataclass(eq=False)
class SharedBatch(Batch):
    """Matrices that several ranks hold together, with one owner.

    Attributes:
        domain: these ranks.
        parcel: where the pieces of all ``count`` matrices lie, and who orthogonalizes them.
    """

    domain: Domain
    parcel: Parcel


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Batches of one round of whose matrices this rank has small parts that are alike, or just one batch.

    One elementwise operation serves all of them: each batch by itself would cost more to start than to compute.

    Attributes:
        numbers: of the batches in the round.
        joint: all of their parameters, one after the other. It is not orthogonalized as one: only its parts are alike.
        counts: matrices of each batch.
        owned: by this rank.
    """

    numbers: tuple[int, ...]
    joint: Batch
    counts: list[int]
    owned: bool


def make_bundles(batches: Mapping[int, Batch], owned: Collection[int]) -> list[Bundle]:
    """Bundles of ``batches``, by number in the round; those of several parameters have new momentum: zeros.

    Args:
        owned: by this rank. They are apart from the others: what it keeps for itself must not keep what it sends.
    """
    alike: dict[object, list[int]] = {}
    for number, batch in batches.items():
        kind: object = number
        if batch.stacked is not None and 0 < batch.stacked[0].numel() <= _SMALL_PART:
            like = batch.stacked[0]
            kind = (like.shape, like.dtype, batch.params[0].dtype, like.device, batch.shape, batch.transposed)
            if batch.region is not None:  # those of one stack, if they lie next to each other
                kind = (id(batch.params[0]), replace(batch.region, span=(0, 0)), kind)
        alike.setdefault((kind, number in owned), []).append(number)
    bundles: list[Bundle] = []
    for numbers in alike.values():
        for some in _next_to_each_other(numbers, batches):
            members = [batches[number] for number in some]
            joint = members[0] if len(members) == 1 else _joined(members)
            bundles.append(Bundle(tuple(some), joint, [batch.count for batch in members], some[0] in owned))
    return bundles


def _next_to_each_other(numbers: Sequence[int], batches: Mapping[int, Batch]) -> list[list[int]]:
    """Longest runs of batches whose matrices follow those of the one before in a stack; all where there is none."""
    runs = [[numbers[0]]]
    for number in numbers[1:]:
        before, region = batches[runs[-1][-1]].region, batches[number].region
        if before is None or region is None or before.span[1] == region.span[0]:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _joined(batches: Sequence[Batch]) -> Batch:
    """All of them as one, over one momentum, of which they get theirs; those of a stack have it."""
    first = batches[0]
    if first.region is not None:
        last, numbers = batches[-1].region, [number for batch in batches for number in batch.numbers]
        assert last is not None, "all are of one stack"
        region = replace(first.region, span=(first.region.span[0], last.span[1]))
        momenta, stacked = first.momenta, region.take(first.momenta[0])
        return Batch(
            first.params, momenta, first.position, first.shape, region, first.transposed, tuple(numbers), stacked
        )
    assert first.stacked is not None
    counts = [len(batch.params) for batch in batches]
    like, stored = local_tensor(first.params[0]), first.stacked
    stacked = _zeros((sum(counts), *stored.shape[1:]), like, stored.device, stored.dtype)
    for batch, part in zip(batches, stacked.split(counts), strict=True):
        batch.stacked, batch.momenta = part, list(part)
    params, momenta = [p for batch in batches for p in batch.params], [m for batch in batches for m in batch.momenta]
    return Batch(params, momenta, first.position, first.shape, None, first.transposed, first.numbers, stacked)


def make_batches(
    tasks: Iterable[Task], device: torch.device | None = None, dtype: torch.dtype | None = None
) -> list[Batch]:
    """Batches of ``tasks`` by position, whose parameters share options, with momentum of zeros.

    Of parameters that are one matrix each it is one tensor for each batch.

    Args:
        device: of the momentum; ``None`` is that of the parameters, ``meta`` allocates nothing.
        dtype: of the momentum; ``None`` is fp32 (or wider).
    """
    batches: list[Batch] = []
    momentum: dict[int, Tensor] = {}  # of parameters that are several matrices, by ``id``
    alike: dict[object, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.position):
        param, local = task.param, local_tensor(task.param)
        is_one = task.region is None or task.region.is_all
        if not is_one and id(param) not in momentum:
            momentum[id(param)] = _zeros(local.shape, local, device, dtype)
        if task.region is not None and task.count > 1:
            # Matrices of which this rank has nothing are batches all the same.
            for start in range(0, task.count, task.batch_size):
                end = min(start + task.batch_size, task.count)
                region, numbers = task.region.part(start, end), task.numbers[start:end]
                batches.append(_batch(task, [param], [momentum[id(param)]], region, numbers, None))
        else:
            shared = (task.domain, task.parcel, task.within)
            lies = (local.shape, task.region) if task.domain is None else shared
            kind = (param.shape, local.dtype, local.device, task.batch_size, lies)
            alike.setdefault((kind, task.numbers, task.transposed), []).append(task)
    for members in alike.values():
        first, local = members[0], local_tensor(members[0].param)
        for start in range(0, len(members), first.batch_size):
            some = members[start : start + first.batch_size]
            params, rows = [task.param for task in some], None
            if first.region is None or first.region.is_all:
                shape = local.shape if first.region is None else first.region.shape
                rows = _zeros((len(some), *shape), local, device, dtype)
            momenta = [momentum[id(p)] for p in params] if rows is None else [row.view(local.shape) for row in rows]
            batches.append(_batch(some[0], params, momenta, first.region, first.numbers, rows))
    return sorted(batches, key=lambda batch: batch.position)


def _batch(
    task: Task,
    params: list[Tensor],
    momenta: list[Tensor],
    region: Region | None,
    numbers: tuple[int, ...],
    stacked: Tensor | None,
) -> Batch:
    """Of tasks like ``task``, the first one."""
    if region is not None and len(momenta) == 1 and region.is_slice:
        stacked = region.take(momenta[0])
    fields = (params, momenta, task.position, task.shape, region, task.transposed, numbers, stacked)
    if task.domain is None or task.parcel is None:
        return Batch(*fields)
    return SharedBatch(*fields, task.domain, replace(task.parcel, count=len(params) * len(numbers)))


def _zeros(shape: Sequence[int], like: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    """Of the host's memory, what a device of ``like`` reads and writes while the host goes on."""
    dtype, device = dtype or torch.promote_types(like.dtype, torch.float32), device or like.device
    pinned = device.type == "cpu" != like.device.type and streams_of(like.device) is not None
    return torch.zeros(tuple(shape), dtype=dtype, device=device, pin_memory=pinned)
