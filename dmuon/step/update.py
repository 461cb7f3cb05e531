"""Muon's update of one batch of matrices: momentum, Newton–Schulz, weights, and a record of what it did to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from dmuon.comm.norm import local_terms
from dmuon.kernels import (
    HALF,
    Polynomial,
    Variant,
    apply_update_,
    coefficient_sequence,
    run,
    step_variant,
    storage_dtype,
    update_scale,
)
from dmuon.platform.streams import PhaseTimer
from dmuon.platform.torch_private import local_tensor
from dmuon.step.adamuon import of_signs
from dmuon.step.batches import Batch
from dmuon.step.half_weights import ROUNDING_STEP, is_rounded

_PLAIN = (Tensor, torch.nn.Parameter)


_T = TypeVar("_T")

Label = tuple[Tensor, int | None]  # a parameter, and the number of a matrix in it if it is more than one
Orthogonalize = Callable[[Tensor], Tensor]  # of (k, m, n), each divided by its norm


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """One batched update of matrices of ``shape``; ``norms`` of what was orthogonalized, ``(k,)``.

    Attributes:
        variant: how Newton–Schulz ran, or the function in its place.
    """

    matrices: list[Label]
    shape: tuple[int, int]
    variant: Variant | str
    norms: Tensor


@dataclass(frozen=True, slots=True)
class Numerics:
    """In which dtypes Newton–Schulz runs with which coefficients, for momentum of one dtype on one device.

    Attributes:
        storage: the dtype in which updates travel, also where tensors are wider: so it is the same on all ranks, of
            whose CPUs only some may multiply it.
        sent_normalized: parts are divided by norms of the whole before they travel, since that halves their bytes.
        function: the user's, in place of Newton–Schulz; it takes and gives the dtype of the momentum.
    """

    sequence: Polynomial
    storage: torch.dtype
    sent_normalized: bool
    function: Orthogonalize | None = None


def numerics_of(group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Numerics:
    """As the options of a group say."""
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, str):  # lists among them cannot be remembered
        coefficients = tuple(tuple(one) if isinstance(one, Sequence) else one for one in coefficients)
    function = group.get("orthogonalize")
    if function is not None:
        return Numerics(coefficient_sequence("classic", 5), dtype, False, function)
    return _numerics(coefficients, group["ns_steps"], group["ns_dtype"], dtype, device)


@lru_cache(maxsize=256)
def _numerics(
    coefficients: Any, steps: int, ns_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device
) -> Numerics:
    storage = storage_dtype(dtype, device, ns_dtype)
    halved = dtype == torch.float32 and storage in HALF
    return Numerics(coefficient_sequence(coefficients, steps), storage, halved)


def kernel_of(group: Mapping[str, Any], kernel: Callable[..., _T]) -> Callable[..., _T]:
    """A pass over gradients and momentum, as a group has it: AdaMuon takes signs."""
    return partial(of_signs, kernel) if group["second_moment"] == "element" else kernel


def fold(
    group: Mapping[str, Any],
    batch: Batch,
    runs: Sequence[tuple[int, int]],
    kernel: Callable[..., _T],
    *,
    again: bool = False,
) -> list[_T]:
    """Fold gradients into this rank's momentum, in place. A gradient that this rank lacks counts as zero.

    Args:
        runs: ranges of parameters of which any rank has a gradient.
        kernel: of gradients, momentum ``(k, …)``, ``beta`` and ``nesterov``, such as ``momentum_update``.
        again: momentum that is rounded stays as it was: it is folded once more, since updates are of what it was
            before it is rounded.

    Returns:
        What the kernel makes of each run.
    """
    found = []
    kernel = kernel_of(group, kernel)
    for start, end in runs:
        momentum = batch.momentum(start, end)
        grads = batch.gradients(start, end, group["l2"])
        found.append(kernel(grads, momentum, beta=group["momentum"], nesterov=group["nesterov"]))
        if batch.is_copied and not (again and batch.is_rounded):
            batch.put_momentum(start, end, momentum)
    return found


def in_rows(
    found: Sequence[Tensor], batch: Batch, runs: Sequence[tuple[int, int]], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """What :func:`fold` has found of ``runs``, in its rows of all of a batch, which has ``shape``; zeros elsewhere."""
    if runs is batch.whole:
        return found[0]
    rows = torch.zeros(tuple(shape), dtype=dtype, device=batch.device)
    for (start, end), part in zip(runs, found, strict=True):
        rows[start * batch.each : end * batch.each] = part
    return rows


def orthogonalize(
    numerics: Numerics, batch: Batch, run_of: tuple[int, int], x: Tensor, norms: Tensor, timer: PhaseTimer
) -> tuple[Tensor, Done]:
    """The update of matrices that this rank has whole, ``(k, m, n)``, before it reaches the weights.

    Args:
        run_of: range of the batch's parameters.
        x: what Newton–Schulz takes of them: divided by ``norms``, ``(k,)``. Its memory may be reused.
    """
    variant: Variant | str
    if numerics.function is None:
        variant = step_variant(batch.shape, len(x), numerics.sequence, numerics.storage, x.device)
        with timer.phase("ns"):
            update = run(x, variant, numerics.sequence, numerics.storage)
    else:
        variant = name_of(numerics.function)
        with timer.phase("ns"):
            update = orthogonalized_by(numerics.function, x)
    labels = batch.labels[run_of[0] * batch.each : run_of[1] * batch.each]
    return update, Done(labels, batch.shape, variant, norms)


def orthogonalized_by(function: Orthogonalize, x: Tensor) -> Tensor:
    """What a user's function makes of ``x``, ``(k, m, n)``."""
    kind = f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
    found: object = function(x)
    if not isinstance(found, Tensor):
        raise TypeError(f"orthogonalize={name_of(function)} returned {type(found).__name__}; return {kind}, as it gets")
    if (found.shape, found.dtype, found.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"orthogonalize={name_of(function)} returned a {found.dtype} tensor of shape {tuple(found.shape)} on "
            f"{found.device}; return {kind}, as it gets"
        )
    return found


def trial_of(function: Orthogonalize, batch: Batch) -> tuple[object, ...]:
    """On what a user's function is tried before it gets matrices of ``batch``."""
    return (function, batch.shape, batch.dtype, batch.device)


def name_of(function: Any) -> str:
    """As messages call a user's function."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def apply(
    group: Mapping[str, Any],
    batch: Batch,
    run_of: tuple[int, int],
    update: Tensor | Sequence[Tensor],
    timer: PhaseTimer,
    *,
    scale: float | None = None,
    record: list[Terms] | None = None,
) -> None:
    """Subtract ``update``, ``(k, …)``, shaped as this rank's parts, from the weights; ``lr`` must be a float.

    Args:
        run_of: range of the batch's parameters.
        update: or several that are ``k`` together.
        scale: factor on the learning rate; None: as the shape of the whole matrices says.
        record: gets the terms of update and weights.
    """
    start, end = run_of
    with timer.phase("apply"):
        # As the fused pass takes them, and without a view where that is so; torch's in-place operations need none here.
        weights = []
        for param in batch.params[start:end]:
            local = local_tensor(param)
            weights.append(local if type(local) in _PLAIN else local.detach())
        stored = matrices = weights if batch.region is None else batch.split(weights)
        masters = batch.masters_of(start, end, weights) if batch.masters else []
        if masters:
            matrices = batch.split(masters)
        elif group["bf16_stochastic_round"] and is_rounded(group, batch.params[start]):
            matrices = [weight.float() for weight in stored]
        if scale is None:
            on_sphere = group["weight_decay_mode"] == "hyperball"
            scale = 1.0 if on_sphere else update_scale(group["adjust_lr_fn"], batch.scaled_shape)
        lr, decay, factor = group["lr"], group["weight_decay"], scale
        if group["weight_decay_mode"] != "decoupled":
            if group["weight_decay_mode"] == "independent":
                lr, factor = 1.0, lr * scale
            else:
                if group["weight_decay_mode"] == "cautious":  # what the update does not take away from zero decays
                    for weight, part in zip(matrices, _parts(update), strict=True):
                        weight.sub_(weight * (weight.sign() * part.sign() >= 0), alpha=lr * decay)
                decay = 0.0
        apply_update_(matrices, update, lr=lr, weight_decay=decay, scale=factor)
        if masters:
            batch.put(masters, matrices)
            torch._foreach_copy_(stored, matrices)
        elif matrices is not stored:
            assert batch.places is not None, "of groups with the option there are"
            places = (batch.places.of(param).matrices(batch.region) for param in batch.params[start:end])
            for weight, wide, place in zip(stored, matrices, chain.from_iterable(places), strict=True):
                place.round(weight, wide, group[ROUNDING_STEP])
        if batch.region is not None:
            batch.put(weights, stored)
        parts = [] if record is None else _parts(update)
        if record is not None and parts and parts[0].numel():
            labels = batch.labels[start * batch.each : end * batch.each]
            record.append(_terms_of(labels, batch.shape, group["lr"] * scale, parts, matrices))


def _parts(update: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Of each matrix."""
    return [part for stack in ([update] if isinstance(update, Tensor) else update) for part in stack.unbind(0)]


# -- what a step does to single matrices, in numbers that stay on the device until somebody asks for them --------------


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Of some matrices, of each of which this rank has a part with ``numel`` elements.

    Attributes:
        columns: ``(4, k)``, fp64: what the parts add to squared norms of update and weight, elements, and those times
            the factor on the orthogonal factor, which is the learning rate, scaled by shape. Sums of them over ranks
            divided by the elements of the whole matrix are of as many copies as there are.
    """

    labels: tuple[Label, ...]
    shape: tuple[int, int]
    numel: int
    columns: Tensor


def _terms_of(
    labels: Sequence[Label], shape: tuple[int, int], factor: float, updates: list[Tensor], weights: Sequence[Tensor]
) -> Terms:
    """Of ``k`` matrices. Nothing waits for an accelerator.

    Args:
        shape: of each whole matrix.
        updates: what was subtracted ``factor`` times, this rank's part of each.
        weights: the parts of the new weights.
    """
    numel = updates[0].numel()
    of_update, of_weight = local_terms(updates, 2.0, None), local_terms(list(weights), 2.0, None)
    elements = of_update.new_full((len(labels),), float(numel))
    columns = torch.stack([of_update * factor**2, of_weight, elements, elements * factor])
    return Terms(tuple(labels), shape, numel, columns)
