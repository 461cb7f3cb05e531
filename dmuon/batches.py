"""Muon's update of what this rank holds: matrices of one shape in stacked batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon._torch import local_tensor
from dmuon.device import PhaseTimer
from dmuon.exchange import Domain, Parcel
from dmuon.kernels import (
    Variant,
    adapted,
    apply_update_,
    choose_variant,
    coefficient_sequence,
    momentum_update,
    normalized_momentum,
    run,
    storage_dtype,
    update_scale,
    variant_fault,
)
from dmuon.kernels.newton_schulz import normalize
from dmuon.kernels.products import carrier_dtype
from dmuon.owned_tensor import OwnedTensor
from dmuon.runtime import Runtime

__all__ = [
    "Assigned",
    "Batch",
    "Done",
    "Orthogonalized",
    "apply",
    "folded",
    "kept",
    "like_param",
    "make_batches",
    "orthogonalize",
    "orthogonalize_whole",
    "wire_dtype",
]

_PLAIN_BATCH_ELEMENTS = 2**25  # bounds the workspace where no plan sets a batch size


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """Who orthogonalizes a parameter, or some of the matrices of a stack, and where the pieces lie.

    Attributes:
        parcel: of one matrix, or of ``stop - start`` of a stack.
        start, stop: which matrices of a stack, counted over all ranks.
        offset: position of ``start`` in the local stack, on a rank that holds them.
        nbytes: most bytes of whole matrices in one batch.
    """

    domain: Domain
    parcel: Parcel
    start: int = 0
    stop: int = 1
    offset: int = 0
    nbytes: int = 2**62


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
        return getattr(self.params[0], "runtime", None)

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


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """One batched update of matrices of ``shape``; ``norms`` of what was orthogonalized, ``(k,)``."""

    matrices: list[tuple[Tensor, int | None]]
    shape: tuple[int, int]
    variant: Variant
    norms: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Orthogonalized:
    """The update of some matrices, ``(k, m, n)``, before it reaches the weights."""

    done: Done
    update: Tensor


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local``, which lies as ``param`` does, as a DTensor where that is one."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def make_batches(
    params: Iterable[Tensor],
    assigned: Mapping[int, Sequence[Assigned]] | None = None,
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
    classes: dict[tuple[Any, ...], list[tuple[int, Tensor, Assigned | None]]] = {}
    positions: dict[int, int] = {}
    known: set[int] = set()
    batches: list[Batch] = []
    for index, param in enumerate(params):
        if isinstance(param, OwnedTensor):
            runtime = param.runtime
            assert runtime is not None
            if id(runtime) not in known:
                known.add(id(runtime))
                offset = len(positions)
                positions.update({id(entry.rest): offset + i for i, entry in enumerate(runtime.entries())})
            entry = runtime.entry_of(param)
            if entry.owner == runtime.comm.rank:
                split = None
                if entry.parcel is not None:
                    assert runtime.tensor_domain is not None
                    split = Assigned(runtime.tensor_domain, entry.parcel)
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
    classes: dict[tuple[Any, ...], list[tuple[int, Tensor, Assigned | None]]],
    position: int,
    param: Tensor,
    runtime: Runtime | None,
    at: Assigned | None,
) -> None:
    local = local_tensor(param)
    key = (
        param.shape, local.shape, local.dtype, local.device, runtime,
        None if at is None else (id(at.domain), at.parcel, at.nbytes),
    )  # fmt: skip
    classes.setdefault(key, []).append((position, param, at))


def _stacked(members: Sequence[tuple[int, Tensor, Assigned | None]], planned_only: bool) -> Batch:
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


def _of_stack(param: Tensor, position: int, assigned: Sequence[Assigned] | None, planned_only: bool) -> list[Batch]:
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
        held = at.domain.rank in at.parcel.pieces
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


def _batch_size(param: Tensor, at: Assigned | None) -> int:
    runtime = getattr(param, "runtime", None)
    shape = local_tensor(param).shape if at is None else at.parcel.layout.shape
    small, large = min(shape), max(shape)
    if runtime is not None:
        whole: tuple[int, int] = (min(param.shape), max(param.shape))
        return int(runtime.chunks[whole])
    if at is None:
        return max(1, _PLAIN_BATCH_ELEMENTS // max(1, small * large))
    itemsize = torch.promote_types(param.dtype, torch.float32).itemsize
    planned = at.domain.chunks.get((small, large), _PLAIN_BATCH_ELEMENTS // (small * large))
    held_at_once = max(small * large, at.parcel.packed_numel // at.parcel.count)  # with copies, what is sent back
    return max(1, min(planned, at.nbytes // (held_at_once * itemsize)))


def orthogonalize(
    group: Mapping[str, Any], batch: Batch, run_of: tuple[int, int], momentum: Tensor, timer: PhaseTimer
) -> Orthogonalized:
    """Fold gradients into ``momentum``, and orthogonalize, what this rank has whole.

    Args:
        run_of: range of the parameters.
        momentum: their rows.
    """
    params = batch.params[run_of[0] : run_of[1]]
    choice = _Choice.of(group, batch, len(momentum), momentum.dtype, momentum.device)
    with timer.phase("momentum"):
        x, norms = normalized_momentum(
            batch.matrices([_grad(p) for p in params]),
            momentum,
            beta=group["momentum"],
            nesterov=group["nesterov"],
            storage=choice.storage,
            eps=group["eps"],
        )
    with timer.phase("ns"):
        update = run(x, choice.variant, choice.sequence, choice.storage)
    return Orthogonalized(Done(batch.labels(*run_of), batch.shape, choice.variant, norms), update)


def orthogonalize_whole(group: Mapping[str, Any], batch: Batch, x: Tensor, timer: PhaseTimer) -> Orthogonalized:
    """Orthogonalize what was gathered, ``(k, m, n)``, which is not kept."""
    choice = _Choice.of(group, batch, len(x), x.dtype, x.device)
    with timer.phase("momentum"):
        normal, norms = normalize(x, choice.storage, group["eps"])
    with timer.phase("ns"):
        update = run(normal, choice.variant, choice.sequence, choice.storage)
    return kept(Orthogonalized(Done(batch.labels(0, len(batch.params)), batch.shape, choice.variant, norms), update))


def kept(ready: Orthogonalized) -> Orthogonalized:
    """``ready`` with an update that further runs of Newton–Schulz leave alone: replayed ones share a buffer."""
    return Orthogonalized(ready.done, ready.update.clone()) if ready.done.variant.replay else ready


def folded(group: Mapping[str, Any], batch: Batch, present: Sequence[bool]) -> Tensor:
    """What is to be orthogonalized, as this rank's parts ``(k, …)``; gradients that are missing here count as zero.

    Args:
        present: per parameter, whether any rank has a gradient; zero where none has.
    """
    if not len(batch.momentum):
        return torch.zeros_like(batch.momentum)
    parts = []
    for start, end in batch.runs(present):
        rows = batch.rows(start, end)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in batch.params[start:end]]
        update = momentum_update(
            batch.matrices(grads), batch.momentum[rows], beta=group["momentum"], nesterov=group["nesterov"]
        )
        parts.append((rows, update))
    if len(parts) == 1 and len(parts[0][1]) == len(batch.momentum):
        return parts[0][1]
    out = torch.zeros_like(batch.momentum)
    for rows, update in parts:
        out[rows] = update
    return out


def apply(
    group: Mapping[str, Any],
    batch: Batch,
    params: Sequence[Tensor],
    update: Tensor,
    timer: PhaseTimer,
    *,
    scale: float | None = None,
) -> None:
    """Subtract the updates, shaped as this rank's parts, from the weights; ``lr`` is a float.

    Args:
        scale: of the learning rate; None follows from the shape of the whole matrices.
    """
    with timer.phase("apply"):
        apply_update_(
            batch.matrices([p.detach() for p in params]),
            update,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            scale=update_scale(group["adjust_lr_fn"], batch.shape) if scale is None else scale,
        )


def wire_dtype(group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which updates travel, which is the one in which Newton-Schulz leaves them."""
    return carrier_dtype(device, storage_dtype(dtype, device, group["ns_dtype"]))


@dataclass(frozen=True, slots=True)
class _Choice:
    """How Newton–Schulz runs."""

    sequence: tuple[tuple[float, float, float], ...]
    storage: torch.dtype
    variant: Variant

    @classmethod
    def of(cls, group: Mapping[str, Any], batch: Batch, k: int, dtype: torch.dtype, device: torch.device) -> _Choice:
        sequence = coefficient_sequence(group["ns_coefficients"], group["ns_steps"])
        storage = storage_dtype(dtype, device, group["ns_dtype"])
        planned = _planned_variant(batch, k)
        return cls(sequence, storage, _variant(planned, batch.shape, k, sequence, storage, device))


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _planned_variant(batch: Batch, k: int) -> str:
    """How the plan says that ``k`` matrices of ``batch`` run, or nothing."""
    planned = batch.runtime or batch.domain
    if planned is None:
        return ""
    small, large = sorted(batch.shape)
    variants: Mapping[int, str] = planned.variants.get((small, large), {})
    smaller = [size for size in variants if size <= k]
    return variants[max(smaller)] if smaller else ""


@lru_cache(maxsize=4096)
def _variant(
    planned: str,
    shape: tuple[int, int],
    k: int,
    coefficients: tuple[tuple[float, float, float], ...],
    storage: torch.dtype,
    device: torch.device,
) -> Variant:
    """The planned variant, made safe for these coefficients, or the rule's where there is none or it cannot run."""
    if planned:
        variant = Variant.parse(planned)
        fault = variant_fault(variant, shape, device, storage)
        if fault is None:
            return adapted(variant, shape, coefficients, storage, device)
        warnings.warn(f"the plan runs {shape[0]}x{shape[1]} as {planned!r}, which this device cannot: {fault}")
    return choose_variant(shape, k, coefficients, storage, device)
