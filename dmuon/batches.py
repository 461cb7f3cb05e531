"""Muon's update of what this rank owns: matrices of one shape in stacked batches, in forward order."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from dmuon._torch import local_tensor
from dmuon.device import PhaseTimer
from dmuon.entry import TensorSharding
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
from dmuon.tensor_exchange import Split, collect, distribute

__all__ = [
    "Batch",
    "Done",
    "Orthogonalized",
    "apply",
    "in_rounds",
    "make_batches",
    "orthogonalize",
    "update_round",
]

_PLAIN_BATCH_ELEMENTS = 2**25  # bounds the workspace where no plan sets a batch size


@dataclass(slots=True, eq=False)
class Batch:
    """Matrices of one shape whose momentum is one stacked tensor, so that a batch needs no copies.

    Attributes:
        momentum: ``(k, m, n)``, of this tensor-parallel rank's parts where there are parts.
        position: of the first matrix in the model.
        sharding: how tensor parallelism splits them.
    """

    params: list[Tensor]
    momentum: Tensor
    position: int
    sharding: TensorSharding | None = None

    @property
    def runtime(self) -> Runtime | None:
        return getattr(self.params[0], "runtime", None)


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """One batched update; ``norms`` of what was orthogonalized, ``(k,)``."""

    params: list[Tensor]
    variant: Variant
    norms: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Orthogonalized:
    """The update of some matrices, ``(k, m, n)``, before it reaches the weights."""

    done: Done
    update: Tensor


def make_batches(params: Iterable[Tensor], *, planned_only: bool = False) -> list[Batch]:
    """Batches of everything that lives here, with zero momentum in fp32 (or wider).

    Args:
        planned_only: allocate nothing: momentum is on the meta device.
    """
    classes: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
    positions: dict[int, int] = {}
    known: set[int] = set()
    for index, param in enumerate(params):
        local = local_tensor(param)
        runtime, sharding = getattr(param, "runtime", None), None
        if isinstance(param, OwnedTensor):
            assert runtime is not None
            if id(runtime) not in known:
                known.add(id(runtime))
                offset = len(positions)
                positions.update({id(entry.rest): offset + i for i, entry in enumerate(runtime.entries())})
            entry = runtime.entry_of(param)
            if entry.owner != runtime.comm.rank:
                continue
            sharding = entry.tensor
        elif local.shape != param.shape:
            continue
        position = positions.get(id(param), index)
        key = (param.shape, local.shape, local.dtype, local.device, runtime, sharding)
        classes.setdefault(key, []).append((position, param))
    batches = []
    for (shape, part, dtype, device, runtime, sharding), members in classes.items():
        size = _batch_size(shape, runtime)
        members.sort(key=lambda member: member[0])
        for start in range(0, len(members), size):
            chunk = members[start : start + size]
            stack = torch.zeros(
                (len(chunk), *part),
                dtype=torch.promote_types(dtype, torch.float32),
                device="meta" if planned_only else device,
            )
            batches.append(Batch([p for _, p in chunk], stack, chunk[0][0], sharding))
    return sorted(batches, key=lambda batch: batch.position)


def in_rounds(batches: Sequence[Batch]) -> list[list[Batch]]:
    """What is updated at once: one batch, or, under tensor parallelism, one of each rank, exchanged together."""
    rounds = [[batch] for batch in batches if batch.sharding is None]
    by_runtime: dict[int, dict[int, list[Batch]]] = {}
    for batch in batches:
        if batch.sharding is not None:
            by_runtime.setdefault(id(batch.runtime), {}).setdefault(batch.sharding.owner, []).append(batch)
    for by_owner in by_runtime.values():
        for together in zip_longest(*(by_owner[t] for t in sorted(by_owner))):
            rounds.append([batch for batch in together if batch is not None])
    return rounds


def update_round(group: Mapping[str, Any], batches: Sequence[Batch], timer: PhaseTimer) -> list[Done]:
    """Update everything in ``batches`` that has a gradient. Collective over tensor-parallel ranks if they share it."""
    if batches[0].sharding is not None:
        return _update_together(group, batches, timer)
    done = []
    for params, momentum in _with_gradients(batches[0]):
        ready = orthogonalize(group, params, momentum, timer)
        apply(group, params, ready.update, tuple(momentum.shape[1:]), timer)
        done.append(ready.done)
    return done


def orthogonalize(
    group: Mapping[str, Any], params: list[Tensor], momentum: Tensor, timer: PhaseTimer
) -> Orthogonalized:
    """Fold the gradients into ``momentum``, and orthogonalize."""
    choice = _Choice.of(group, params, momentum.dtype, momentum.device)
    with timer.phase("momentum"):
        x, norms = normalized_momentum(
            [_local_grad(p) for p in params],
            momentum,
            beta=group["momentum"],
            nesterov=group["nesterov"],
            storage=choice.storage,
            eps=group["eps"],
        )
    with timer.phase("ns"):
        update = run(x, choice.variant, choice.sequence, choice.storage)
    return Orthogonalized(Done(params, choice.variant, norms), update)


def apply(
    group: Mapping[str, Any], params: Sequence[Tensor], update: Tensor, shape: tuple[int, ...], timer: PhaseTimer
) -> None:
    """Subtract the updates from the weights. ``shape`` ``(m, n)`` is that of whole matrices; ``lr`` is a float."""
    with timer.phase("apply"):
        apply_update_(
            [local_tensor(p).detach() for p in params],
            update,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            scale=update_scale(group["adjust_lr_fn"], shape),
        )


def _update_together(group: Mapping[str, Any], batches: Sequence[Batch], timer: PhaseTimer) -> list[Done]:
    runtime = batches[0].runtime
    assert runtime is not None
    if all(p.grad is None for batch in batches for p in batch.params):
        return []
    comm = runtime.comm
    splits = []
    parts = []
    with timer.phase("momentum"):
        for batch in batches:
            assert batch.sharding is not None
            m, n = batch.params[0].shape
            splits.append(Split(len(batch.params), (m, n), batch.sharding))
            parts.append(_folded(group, batch))
    with timer.phase("exchange"):
        whole = collect(parts, splits, comm)
    done = []
    like = parts[0].new_empty(0)
    for i, x in whole.items():
        params = batches[i].params
        choice = _Choice.of(group, params, x.dtype, x.device)
        with timer.phase("momentum"):
            normal, norms = normalize(x, choice.storage, group["eps"])
        with timer.phase("ns"):
            update = run(normal, choice.variant, choice.sequence, choice.storage)
            whole[i] = update.clone() if choice.variant.replay else update
        present = [k for k, p in enumerate(params) if p.grad is not None]
        if present:
            done.append(Done([params[k] for k in present], choice.variant, norms[present]))
    storage = storage_dtype(like.dtype, like.device, group["ns_dtype"])
    like = like.to(carrier_dtype(like.device, storage))
    with timer.phase("exchange"):
        updates = distribute(whole, splits, comm, like)
    for batch, update in zip(batches, updates, strict=True):
        for start, end in _runs_with_gradients(batch):
            apply(group, batch.params[start:end], update[start:end], tuple(batch.params[0].shape), timer)
    return done


def _folded(group: Mapping[str, Any], batch: Batch) -> Tensor:
    """What is to be orthogonalized, ``(k, m, n)`` of this rank's parts; zero where there is no gradient."""
    out = torch.zeros_like(batch.momentum)
    for start, end in _runs_with_gradients(batch):
        grads = [_local_grad(p) for p in batch.params[start:end]]
        out[start:end] = momentum_update(
            grads, batch.momentum[start:end], beta=group["momentum"], nesterov=group["nesterov"]
        )
    return out


@dataclass(frozen=True, slots=True)
class _Choice:
    """How Newton–Schulz runs."""

    sequence: tuple[tuple[float, float, float], ...]
    storage: torch.dtype
    variant: Variant

    @classmethod
    def of(
        cls, group: Mapping[str, Any], params: Sequence[Tensor], dtype: torch.dtype, device: torch.device
    ) -> _Choice:
        sequence = coefficient_sequence(group["ns_coefficients"], group["ns_steps"])
        storage = storage_dtype(dtype, device, group["ns_dtype"])
        planned = _planned_variant(params[0], len(params))
        return cls(sequence, storage, _variant(planned, params[0].shape, len(params), sequence, storage, device))


def _local_grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return local_tensor(param.grad)


def _batch_size(shape: torch.Size, runtime: Runtime | None) -> int:
    if runtime is not None:
        return runtime.chunks[(min(shape), max(shape))]
    return max(1, _PLAIN_BATCH_ELEMENTS // shape.numel())


def _planned_variant(param: Tensor, k: int) -> str:
    """How the plan says that ``k`` matrices like ``param`` run, or nothing."""
    runtime = getattr(param, "runtime", None)
    if runtime is None:
        return ""
    variants: dict[int, str] = runtime.variants.get((min(param.shape), max(param.shape)), {})
    smaller = [size for size in variants if size <= k]
    return variants[max(smaller)] if smaller else ""


@lru_cache(maxsize=4096)
def _variant(
    planned: str,
    shape: torch.Size,
    k: int,
    coefficients: tuple[tuple[float, float, float], ...],
    storage: torch.dtype,
    device: torch.device,
) -> Variant:
    """The planned variant, made safe for these coefficients, or the rule's where there is none or it cannot run."""
    if planned:
        variant = Variant.parse(planned)
        fault = variant_fault(variant, (shape[0], shape[1]), device, storage)
        if fault is None:
            return adapted(variant, (shape[0], shape[1]), coefficients, storage, device)
        warnings.warn(f"the plan runs {shape[0]}x{shape[1]} as {planned!r}, which this device cannot: {fault}")
    return choose_variant((shape[0], shape[1]), k, coefficients, storage, device)


def _with_gradients(batch: Batch) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Runs of neighbours that all have gradients: the whole batch, normally."""
    for start, end in _runs_with_gradients(batch):
        yield batch.params[start:end], batch.momentum[start:end]


def _runs_with_gradients(batch: Batch) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index, param in enumerate(batch.params):
        if param.grad is None:
            continue
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs
