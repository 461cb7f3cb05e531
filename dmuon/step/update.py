"""Muon's update of one batch of matrices: momentum, Newton–Schulz, weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels import (
    HALF,
    Polynomial,
    Storage,
    Variant,
    adapted,
    apply_update_,
    carrier_dtype,
    choose_variant,
    coefficient_sequence,
    first_dtype,
    momentum_norms,
    momentum_update,
    normalized,
    normalized_momentum,
    normalized_update,
    run,
    storage_dtype,
    storage_spans,
    update_scale,
    variant_fault,
)
from dmuon.platform.streams import PhaseTimer
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch
from dmuon.step.record import StepRecord

_PLAIN = (Tensor, torch.nn.Parameter)


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


@dataclass(frozen=True, slots=True)
class Numerics:
    """In which dtypes Newton–Schulz runs with which coefficients, for momentum of one dtype on one device.

    Attributes:
        begins: the dtype that its first step takes.
        ends: that of its last step, in which updates travel, also where tensors are wider: so it is the same on all
            ranks, of whose CPUs only some may multiply it.
        sent_normalized: parts are divided by norms of the whole before they travel, since that halves their bytes.
    """

    sequence: Polynomial
    storage: Storage
    begins: torch.dtype
    ends: torch.dtype
    sent_normalized: bool


def numerics_of(group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Numerics:
    """As the options of a group say."""
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, str):  # lists among them cannot be remembered
        coefficients = tuple(tuple(one) if isinstance(one, Sequence) else one for one in coefficients)
    return _numerics(coefficients, group["ns_steps"], group["ns_dtype"], dtype, device)


@lru_cache(maxsize=256)
def _numerics(
    coefficients: Any, steps: int, ns_dtype: Storage | None, dtype: torch.dtype, device: torch.device
) -> Numerics:
    storage = storage_dtype(dtype, device, ns_dtype)
    begins, ends = first_dtype(storage), storage_spans(storage, steps)[-1][0]
    halved = dtype == torch.float32 and begins in HALF
    return Numerics(coefficient_sequence(coefficients, steps), storage, begins, ends, halved)


def orthogonalize(
    group: Mapping[str, Any], batch: Batch, run_of: tuple[int, int], momentum: Tensor, timer: PhaseTimer
) -> Orthogonalized:
    """Fold gradients into ``momentum``, in place, and orthogonalize it, for matrices that this rank has whole.

    Args:
        run_of: range of the batch's parameters.
        momentum: theirs, ``(k, m, n)``.
    """
    start, end = run_of
    numerics = numerics_of(group, momentum.dtype, momentum.device)
    variant = variant_for(group, batch.shape, batch.variants, len(momentum), momentum.dtype, momentum.device)
    with timer.phase("momentum"):
        x, norms = normalized_momentum(
            batch.gradients(start, end),
            momentum,
            beta=group["momentum"],
            nesterov=group["nesterov"],
            storage=numerics.storage,
            eps=group["eps"],
        )
    with timer.phase("ns"):
        update = run(x, variant, numerics.sequence, numerics.storage)
    labels = batch.labels[start * batch.each : end * batch.each]
    return Orthogonalized(Done(labels, batch.shape, variant, norms), update)


def orthogonalize_whole(
    group: Mapping[str, Any], batch: Batch, x: Tensor, timer: PhaseTimer, *, norms: Tensor | None = None
) -> Orthogonalized:
    """Orthogonalize whole matrices that were gathered, ``(k, m, n)``; their memory may be reused.

    Args:
        norms: if they are divided by these already.
    """
    numerics = numerics_of(group, batch.dtype, x.device)
    variant = variant_for(group, batch.shape, batch.variants, len(x), batch.dtype, x.device)
    with timer.phase("momentum"):
        if norms is None:
            normal, norms = normalized(x, storage=numerics.storage, eps=group["eps"])
        else:
            normal = x.to(carrier_dtype(x.device, numerics.storage))
    with timer.phase("ns"):
        update = run(normal, variant, numerics.sequence, numerics.storage)
    return Orthogonalized(Done(batch.labels, batch.shape, variant, norms), update)


def folded(group: Mapping[str, Any], batch: Batch, runs: Sequence[tuple[int, int]]) -> Tensor:
    """This rank's parts of what is to be orthogonalized, ``(k, …)``. A gradient that this rank lacks counts as zero.

    Args:
        runs: of parameters of which any rank has a gradient; the result is zero for the others.
    """
    parts = []
    for start, end in runs:
        momentum = batch.momentum(start, end)
        grads = batch.gradients(start, end)
        parts.append(momentum_update(grads, momentum, beta=group["momentum"], nesterov=group["nesterov"]))
        if batch.is_split:
            batch.put_momentum(start, end, momentum)
    return parts[0] if runs == batch.whole else _with_zeros(parts, batch, runs, batch.dtype)


def folded_norms(group: Mapping[str, Any], batch: Batch, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Fold gradients as :func:`folded` does; return only the norms of this rank's parts, fp64 ``(k,)``."""
    norms = torch.zeros(batch.count, dtype=torch.float64, device=batch.device)
    for start, end in runs:
        momentum = batch.momentum(start, end)
        grads = batch.gradients(start, end)
        of_run = momentum_norms(grads, momentum, beta=group["momentum"], nesterov=group["nesterov"])
        norms[start * batch.each : end * batch.each] = of_run
        if batch.is_split:
            batch.put_momentum(start, end, momentum)
    return norms


def normalized_parts(group: Mapping[str, Any], batch: Batch, runs: Sequence[tuple[int, int]], norms: Tensor) -> Tensor:
    """What :func:`folded` gives over the norms of the whole matrices, ``(k,)``, as Newton–Schulz begins with it.

    The gradients were folded by :func:`folded_norms`.
    """
    numerics = numerics_of(group, batch.dtype, batch.device)
    parts = []
    for start, end in runs:
        parts.append(
            normalized_update(
                batch.gradients(start, end),
                batch.momentum(start, end),
                norms[start * batch.each : end * batch.each],
                beta=group["momentum"],
                nesterov=group["nesterov"],
                storage=numerics.storage,
                eps=group["eps"],
            )
        )
    return parts[0] if runs == batch.whole else _with_zeros(parts, batch, runs, numerics.begins)


def _with_zeros(parts: Sequence[Tensor], batch: Batch, runs: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """All of a batch, of its parts that are not zero."""
    like = batch.momentum(0, len(batch.params))
    out = torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    for (start, end), update in zip(runs, parts, strict=True):
        out[start * batch.each : end * batch.each] = update
    return out


def apply(
    group: Mapping[str, Any],
    batch: Batch,
    run_of: tuple[int, int],
    update: Tensor | Sequence[Tensor],
    timer: PhaseTimer,
    *,
    scale: float | None = None,
    record: StepRecord | None = None,
) -> None:
    """Subtract ``update``, ``(k, …)``, shaped as this rank's parts, from the weights; ``lr`` must be a float.

    Args:
        run_of: range of the batch's parameters.
        update: or several that are ``k`` together.
        scale: factor on the learning rate; None: as the shape of the whole matrices says.
        record: is told of update and weights.
    """
    start, end = run_of
    with timer.phase("apply"):
        # As the fused pass takes them, and without a view where that is so; torch's in-place operations need none here.
        weights = []
        for param in batch.params[start:end]:
            local = local_tensor(param)
            weights.append(local if type(local) in _PLAIN else local.detach())
        matrices = batch.matrices(weights)
        if scale is None:
            scale = update_scale(group["adjust_lr_fn"], batch.scaled_shape)
        apply_update_(
            matrices,
            update,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            scale=scale,
        )
        if batch.is_split:
            batch.put(weights, matrices)
        if record is not None:
            stacks = [update] if isinstance(update, Tensor) else update
            parts = [part for stack in stacks for part in stack.unbind(0)]
            labels = batch.labels[start * batch.each : end * batch.each]
            record.note(labels, batch.shape, group["lr"] * scale, parts, matrices)


def variant_for(
    group: Mapping[str, Any],
    shape: tuple[int, int],
    planned: Mapping[int, str],
    k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Variant:
    """How Newton–Schulz runs for ``k`` matrices of ``shape`` whose momentum has ``dtype``.

    Args:
        planned: by batch size, as the plan says; a batch runs as the largest that is no larger.
    """
    numerics = numerics_of(group, dtype, device)
    largest = max(filter(k.__ge__, planned), default=0)
    return _variant(planned.get(largest, ""), shape, k, numerics.sequence, numerics.storage, device)


@lru_cache(maxsize=4096)
def _variant(
    planned: str,
    shape: tuple[int, int],
    k: int,
    coefficients: Polynomial,
    storage: Storage,
    device: torch.device,
) -> Variant:
    """The planned variant, made safe for these coefficients. Without one that can run here, the rule's choice."""
    if planned:
        variant = Variant.parse(planned)
        fault = variant_fault(variant, device, storage)
        if fault is None:
            return adapted(variant, shape, coefficients, storage, device)
        warnings.warn(f"the plan runs {shape[0]}x{shape[1]} as {planned!r}, which this device cannot: {fault}")
    return choose_variant(shape, k, coefficients, storage, device)
