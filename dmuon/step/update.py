"""Muon's update of one batch of matrices: momentum, Newton–Schulz, weights; and AdamW for what Muon does not take."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

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


def orthogonalize(
    group: Mapping[str, Any], batch: Batch, run_of: tuple[int, int], momentum: Tensor, timer: PhaseTimer
) -> Orthogonalized:
    """Fold gradients into ``momentum``, in place, and orthogonalize it, for matrices that this rank has whole.

    Args:
        run_of: range of the batch's parameters.
        momentum: theirs, ``(k, m, n)``.
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


def orthogonalize_whole(
    group: Mapping[str, Any], batch: Batch, x: Tensor, timer: PhaseTimer, *, norms: Tensor | None = None
) -> Orthogonalized:
    """Orthogonalize whole matrices that were gathered, ``(k, m, n)``; their memory may be reused.

    Args:
        norms: if they are divided by these already.
    """
    choice = _Choice.of(group, batch, len(x), batch.dtype, x.device)
    with timer.phase("momentum"):
        if norms is None:
            normal, norms = normalized(x, storage=choice.storage, eps=group["eps"])
        else:
            normal = x.to(carrier_dtype(x.device, choice.storage))
    with timer.phase("ns"):
        update = run(normal, choice.variant, choice.sequence, choice.storage)
    return Orthogonalized(Done(batch.labels(0, len(batch.params)), batch.shape, choice.variant, norms), update)


def folded(group: Mapping[str, Any], batch: Batch, present: Sequence[bool]) -> Tensor:
    """This rank's parts of what is to be orthogonalized, ``(k, …)``. A gradient that this rank lacks counts as zero.

    Args:
        present: per parameter, whether any rank has a gradient; the result is zero for those that none has.
    """
    parts = []
    for start, end in batch.runs(present):
        momentum = batch.momentum(start, end)
        update = momentum_update(_grads(batch, start, end), momentum, **_fold_options(group))
        batch.put_momentum(start, end, momentum)
        parts.append((batch.rows(start, end), update))
    return _with_zeros(parts, batch, present, batch.dtype)


def folded_norms(group: Mapping[str, Any], batch: Batch, present: Sequence[bool]) -> Tensor:
    """Fold gradients as :func:`folded` does; return only the norms of this rank's parts, fp64 ``(k,)``."""
    norms = torch.zeros(batch.count, dtype=torch.float64, device=batch.device)
    for start, end in batch.runs(present):
        momentum = batch.momentum(start, end)
        norms[batch.rows(start, end)] = momentum_norms(_grads(batch, start, end), momentum, **_fold_options(group))
        batch.put_momentum(start, end, momentum)
    return norms


def normalized_parts(group: Mapping[str, Any], batch: Batch, present: Sequence[bool], norms: Tensor) -> Tensor:
    """What :func:`folded` gives over the norms of the whole matrices, ``(k,)``, in the dtype of :func:`begin_dtype`.

    The gradients were folded by :func:`folded_norms`.
    """
    storage = storage_dtype(batch.dtype, batch.device, group["ns_dtype"])
    options = {**_fold_options(group), "storage": storage, "eps": group["eps"]}
    parts = []
    for start, end in batch.runs(present):
        rows, grads = batch.rows(start, end), _grads(batch, start, end)
        parts.append((rows, normalized_update(grads, batch.momentum(start, end), norms[rows], **options)))
    return _with_zeros(parts, batch, present, first_dtype(storage))


def _grads(batch: Batch, start: int, end: int) -> list[Tensor]:
    """This rank's parts of the gradients of parameters ``start`` to ``end``; zeros where it has none."""
    return batch.matrices([torch.zeros_like(p) if p.grad is None else p.grad for p in batch.params[start:end]])


def _fold_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"beta": group["momentum"], "nesterov": group["nesterov"]}


def _with_zeros(
    parts: Sequence[tuple[slice, Tensor]], batch: Batch, present: Sequence[bool], dtype: torch.dtype
) -> Tensor:
    """All of a batch, of its parts that are not zero."""
    if len(parts) == 1 and all(present):
        return parts[0][1]
    like = batch.momentum(0, len(batch.params))
    out = torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    for rows, update in parts:
        out[rows] = update
    return out


def apply(
    group: Mapping[str, Any],
    batch: Batch,
    params: Sequence[Tensor],
    update: Tensor | Sequence[Tensor],
    timer: PhaseTimer,
    *,
    scale: float | None = None,
    record: StepRecord | None = None,
) -> None:
    """Subtract ``update``, ``(k, …)``, shaped as this rank's parts, from the weights; ``lr`` must be a float.

    Args:
        update: or several that are ``k`` together.
        scale: factor on the learning rate; None: as the shape of the whole matrices says.
        record: is told of update and weights.
    """
    with timer.phase("apply"):
        # As the fused pass takes them, and without a view where that is so; torch's in-place operations need none here.
        weights = [p if type(p) in _PLAIN else p.detach() for p in map(local_tensor, params)]
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
        batch.put(weights, matrices)
        if record is not None:
            stacks = [update] if isinstance(update, Tensor) else update
            parts = [part for stack in stacks for part in stack.unbind(0)]
            record.note(batch.labels_of(params), batch.shape, group["lr"] * scale, parts, matrices)


def begin_dtype(group: Mapping[str, Any], like: Tensor) -> torch.dtype:
    """The dtype in which Newton–Schulz begins with matrices whose momentum is as ``like``."""
    return first_dtype(storage_dtype(like.dtype, like.device, group["ns_dtype"]))


def sent_normalized(group: Mapping[str, Any], like: Tensor) -> bool:
    """Whether parts are divided by norms of the whole before they travel: where that halves their bytes."""
    return like.dtype == torch.float32 and begin_dtype(group, like) in HALF


def wire_dtype(group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which updates travel: that of Newton–Schulz's last step, also where tensors are wider.

    So it is the same on all ranks, of whose CPUs only some may multiply it.
    """
    return storage_spans(storage_dtype(dtype, device, group["ns_dtype"]), group["ns_steps"])[-1][0]


@dataclass(frozen=True, slots=True)
class _Choice:
    """How Newton–Schulz runs."""

    sequence: Polynomial
    storage: Storage
    variant: Variant

    @classmethod
    def of(cls, group: Mapping[str, Any], batch: Batch, k: int, dtype: torch.dtype, device: torch.device) -> _Choice:
        sequence = coefficient_sequence(group["ns_coefficients"], group["ns_steps"])
        storage = storage_dtype(dtype, device, group["ns_dtype"])
        return cls(sequence, storage, variant_for(group, batch.shape, batch.variants, k, dtype, device))


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


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
    sequence = coefficient_sequence(group["ns_coefficients"], group["ns_steps"])
    smaller = [size for size in planned if size <= k]
    storage = storage_dtype(dtype, device, group["ns_dtype"])
    return _variant(planned[max(smaller)] if smaller else "", shape, k, sequence, storage, device)


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


def align_gradients(params: Iterable[Tensor]) -> None:
    """Lay gradients out as their parameters: autograd leaves some DTensors Partial, or sharded otherwise.

    Sparse ones, which no module has announced, become dense.
    """
    for param in params:
        grad = param.grad
        if isinstance(grad, DTensor):
            if isinstance(param, DTensor) and grad.placements != param.placements:
                param.grad = grad.redistribute(placements=param.placements)
        elif grad is not None and grad.layout is torch.sparse_coo:
            param.grad = grad.to_dense()


def new_adamw_state(param: Tensor) -> dict[str, Tensor]:
    """``step`` (0-D fp32 on the parameter's device), ``exp_avg`` and ``exp_avg_sq`` (as ``param``)."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=local_tensor(param).device),
        "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
    }


def update_by_adamw(group: Mapping[str, Any], state: Mapping[Tensor, MutableMapping[str, Any]]) -> None:
    """Step on the parameters of a group of AdamW that have gradients; others may have no state."""
    params = [p for p in group["params"] if p.grad is not None]
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    adamw_step(params, [state[p] for p in params], **options)


def _lies_elsewhere(local: Tensor, moment: Tensor) -> bool:
    return (moment.device, moment.dtype) != (local.device, local.dtype)


@torch.no_grad()
def adamw_step(
    params: Sequence[Tensor],
    states: Sequence[MutableMapping[str, Any]],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of decoupled weight decay Adam (arXiv 1711.05101) on every parameter that has a gradient.

    AdamW is elementwise, so a sharded parameter is updated exactly by updating its local shard. One fused call per
    device and dtype; tensors of different kinds never meet in one call because only local tensors do.
    """
    batches: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, ...]]] = {}
    for param, state in zip(params, states, strict=True):
        if param.grad is None:
            continue
        if not state:  # it was cleared
            state.update(new_adamw_state(param))
        local = local_tensor(param)
        if _lies_elsewhere(local, state["exp_avg"]):  # the model was moved or converted
            state["step"] = state["step"].to(local.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(local.device, local.dtype)
        if local.numel() == 0:
            state["step"] += 1
            continue
        row = tuple(local_tensor(t) for t in (param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]))
        batches.setdefault((local.device, local.dtype), []).append(row)
    for rows in batches.values():
        local_params, grads, averages, squares, steps = (list(column) for column in zip(*rows, strict=True))
        adamw(
            [p.detach() for p in local_params],
            grads,
            averages,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
