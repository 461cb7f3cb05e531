"""The optimizer: Muon for matrices, AdamW for everything else, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon._torch import local_tensor
from dmuon.adamw import adamw_step, init_adamw_state
from dmuon.comm import agree
from dmuon.device import PhaseTimer
from dmuon.kernels import (
    Variant,
    adapted,
    apply_update_,
    choose_variant,
    coefficient_sequence,
    normalized_momentum,
    run,
    storage_dtype,
    update_scale,
    variant_fault,
)
from dmuon.owned_tensor import OwnedTensor, owned_tensor
from dmuon.param_groups import check_group, groups_from
from dmuon.policy import Select
from dmuon.runtime import Runtime
from dmuon.state_dict import describe, even_to_owned, owned_to_even

__all__ = ["Muon", "StepStats"]

_PLAIN_BATCH_ELEMENTS = 2**25  # bounds the workspace where no plan sets a batch size
_MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the last ``step()`` did on this rank.

    Attributes:
        ns_matrices: matrices that were orthogonalized.
        ns_batches: batched Newton-Schulz calls that took.
        seconds: per phase: ``momentum``, ``ns``, ``apply``, ``publish``, ``adamw``.
        variants: per shape, small side first, how Newton-Schulz ran: form, restarts, back end, matrices at once.
        nonfinite: the matrices whose momentum holds NaN or infinity; their weights do now too, nobody else's.
    """

    ns_matrices: int
    ns_batches: int
    seconds: dict[str, float]
    variants: dict[tuple[int, int], str]
    nonfinite: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Batch:
    """Matrices of one shape whose momentum is one stacked tensor, so that a batch needs no copies."""

    params: list[Tensor]
    momentum: Tensor  # (k, m, n)


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """One batched update of the last step; ``norms`` of what was orthogonalized, ``(k,)``."""

    params: list[Tensor]
    variant: Variant
    norms: Tensor


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for matrices and AdamW for the rest.

    A matrix's update is the orthogonal factor of its momentum, by Newton-Schulz. On a model that went through
    ``dmuon.dedicate_params`` each owner updates its own matrices and publishes the result; elsewhere it is plain
    Muon. Momentum is fp32 or wider, and so are the masters of what dmuon owns.

    Args:
        params: a module (routed by policy: matrices inside blocks to Muon), an iterable of tensors (two dimensions to
            Muon, fewer to AdamW), ``dmuon.owned_parameters(model)``, or groups with ``use_muon`` flags.
        lr: learning rate of Muon.
        weight_decay: decoupled, multiplied by the base ``lr``.
        momentum, nesterov: as in ``torch.optim.Muon``.
        ns_coefficients: ``"polar_express"``, ``"you"``, ``"classic"``, or one or several ``(a, b, c)``.
        ns_steps: Newton-Schulz steps.
        eps: lower clamp of the norm that scales a matrix before Newton-Schulz; 0 is exact.
        ns_dtype: dtype of Newton-Schulz; ``None`` is fp16 on CUDA and fp32 on the CPU.
        adjust_lr_fn: factor on ``lr`` by shape: ``"match_rms_adamw"``, ``"original"`` (``None`` is that too, as in
            ``torch.optim.Muon``), ``"spectral"``, or ``f((m, n)) -> float``.
        adamw_lr: ``None`` means ``lr``.
        adamw_betas, adamw_eps: of AdamW.
        adamw_weight_decay: ``None`` means ``weight_decay``; tensors of fewer than two dimensions are not decayed.
        select: as in ``dedicate_params``; only with a module that was not dedicated.

    Raises:
        TypeError, ValueError: an option or parameter that cannot be used, with the remedy.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | tuple[Any, ...] = "polar_express",
        ns_steps: int = 5,
        eps: float = 0.0,
        ns_dtype: torch.dtype | None = None,
        adjust_lr_fn: str | Callable[[Any], float] | None = "match_rms_adamw",
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        select: Select | None = None,
    ) -> None:
        self._muon_defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "eps": eps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._adamw_defaults = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            "betas": adamw_betas,
            "eps": adamw_eps,
        }
        self._batches: list[list[_Batch]] = []  # per group
        self._runtimes: list[Runtime] = []
        self._done: list[_Done] = []
        groups = groups_from(params, select)
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._timer = PhaseTimer(next(local_tensor(p).device for g in self.param_groups for p in g["params"]))
        self.register_state_dict_post_hook(_even_momentum)
        self.register_load_state_dict_pre_hook(_load_momentum)
        self.register_load_state_dict_post_hook(_adopt_loaded_state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ``use_muon`` says which route it takes.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        if not isinstance(param_group, dict) or not isinstance(param_group.get("use_muon"), bool):
            raise ValueError("a parameter group lacks use_muon; set it to True (Muon) or False (AdamW)")
        defaults = self._muon_defaults if param_group["use_muon"] else self._adamw_defaults
        for name, value in defaults.items():
            param_group.setdefault(name, value)
        given = param_group["params"]
        param_group["params"] = [given] if isinstance(given, Tensor) else list(given)
        check_group(param_group)
        super().add_param_group(param_group)
        self._batches.append(self._init_state(self.param_groups[-1]))

    def _init_state(self, group: dict[str, Any]) -> list[_Batch]:
        """Create the state at once: a checkpoint can then be loaded before the first step."""
        if not group["use_muon"]:
            for param in group["params"]:
                init_adamw_state(param, self.state[param])
            return []
        classes: dict[tuple[Any, ...], list[Tensor]] = {}
        for param in group["params"]:
            if isinstance(param, OwnedTensor) and param.runtime is not None and param.runtime not in self._runtimes:
                self._runtimes.append(param.runtime)
            local = local_tensor(param)
            if local.shape == param.shape:  # otherwise owned elsewhere
                key = (local.shape, local.dtype, local.device, getattr(param, "runtime", None))
                classes.setdefault(key, []).append(param)
        batches = []
        for (shape, dtype, device, runtime), params in classes.items():
            size = _batch_size(shape, runtime)
            for start in range(0, len(params), size):
                chunk = params[start : start + size]
                stack_dtype = torch.promote_types(dtype, torch.float32)
                batches.append(_Batch(chunk, torch.zeros((len(chunk), *shape), dtype=stack_dtype, device=device)))
        self._show_momentum(group, batches)
        return batches

    def _show_momentum(self, group: dict[str, Any], batches: list[_Batch]) -> None:
        """Make ``state`` show the rows of the stacks, in the order of the group: ranks own different ones."""
        rows = _momentum_rows(batches)
        for param in group["params"]:
            local = local_tensor(param)
            row = rows.get(id(param), local.new_empty(local.shape))
            self.state[param][_MOMENTUM] = _momentum_view(param, row)

    # -- step ------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, and start publishing what dmuon owns.

        Raises:
            RuntimeError: inside a forward or backward, or when gradients were left unreduced.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for runtime in self._runtimes:
            runtime.at_rest("step()")
            waiting = runtime.unreduced()
            if waiting is not None:
                raise RuntimeError(
                    f"the gradient of {waiting!r} is not reduced: the last backward before step() must run outside "
                    "no_sync()"
                )
        self._timer.reset()
        self._done = []
        for group, batches in zip(self.param_groups, self._batches, strict=True):
            lr = float(group["lr"]) if batches else 0.0
            for batch in batches:
                for params, momentum in _with_gradients(batch):
                    self._update(group, lr, params, momentum)
        with self._timer.phase("publish"):
            for runtime in self._runtimes:
                runtime.publish()
        with self._timer.phase("adamw"):
            for group in self.param_groups:
                if not group["use_muon"]:
                    adamw_step(
                        group["params"],
                        [self.state[p] for p in group["params"]],
                        lr=group["lr"],
                        betas=group["betas"],
                        eps=group["eps"],
                        weight_decay=group["weight_decay"],
                    )
        return loss

    def _update(self, group: dict[str, Any], lr: float, params: list[Tensor], momentum: Tensor) -> None:
        sequence = coefficient_sequence(group["ns_coefficients"], group["ns_steps"])
        storage = storage_dtype(momentum.dtype, momentum.device, group["ns_dtype"])
        planned = _planned_variant(params[0], len(params))
        variant = _variant(planned, momentum.shape[1:], len(params), sequence, storage, momentum.device)
        with self._timer.phase("momentum"):
            x, norms = normalized_momentum(
                [local_tensor(_grad(p)) for p in params],
                momentum,
                beta=group["momentum"],
                nesterov=group["nesterov"],
                storage=storage,
                eps=group["eps"],
            )
        with self._timer.phase("ns"):
            update = run(x, variant, sequence, storage)
        with self._timer.phase("apply"):
            apply_update_(
                [local_tensor(p).detach() for p in params],
                update,
                lr=lr,
                weight_decay=group["weight_decay"],
                scale=update_scale(group["adjust_lr_fn"], momentum.shape[1:]),
            )
        self._done.append(_Done(params, variant, norms))

    @property
    def last_step(self) -> StepStats:
        """Counters and time per phase of the last step. On an accelerator it waits for that step to finish."""
        variants = {}
        nonfinite = []
        for done in self._done:
            small, large = sorted(local_tensor(done.params[0]).shape)
            variants[small, large] = str(done.variant)
            finite = done.norms.isfinite().tolist()
            nonfinite += [p for p, ok in zip(done.params, finite, strict=True) if not ok]
        return StepStats(
            ns_matrices=sum(len(done.params) for done in self._done),
            ns_batches=len(self._done),
            seconds=self._timer.seconds(),
            variants=dict(sorted(variants.items())),
            nonfinite=tuple(self._name_of(p) for p in nonfinite),
        )

    def _name_of(self, param: Tensor) -> str:
        if isinstance(param, OwnedTensor):
            return param.fqn
        for g, group in enumerate(self.param_groups):
            for i, other in enumerate(group["params"]):
                if other is param:
                    return f"parameter {i} of group {g}"
        return "a parameter that no group holds"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients that wait for a synchronizing backward are dropped too."""
        for runtime in self._runtimes:
            runtime.drop_gradients()
        super().zero_grad(set_to_none)


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


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


def _momentum_view(param: Tensor, local: Tensor) -> Tensor:
    if not isinstance(param, OwnedTensor):
        return local
    return owned_tensor(local, param.device_mesh, param.shape, fqn=f"{param.fqn}.{_MOMENTUM}", owner=param.owner)


def _with_gradients(batch: _Batch) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Runs of neighbours that all have gradients: the whole batch, normally."""
    start: int | None = None
    for index in range(len(batch.params) + 1):
        present = index < len(batch.params) and batch.params[index].grad is not None
        if present and start is None:
            start = index
        elif not present and start is not None:
            yield batch.params[start:index], batch.momentum[start:index]
            start = None


def _momentum_rows(batches: list[_Batch]) -> dict[int, Tensor]:
    return {id(p): row for batch in batches for p, row in zip(batch.params, batch.momentum, strict=True)}


def _even_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way out owned momentum is an even row-sharded DTensor. Collective."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for index, param in enumerate(params):  # in one order on all ranks, for us and for whoever gathers the result
        values = state_dict["state"].get(index)
        if values is None:
            continue
        momentum = values.get(_MOMENTUM)
        if isinstance(param, OwnedTensor):
            assert param.runtime is not None
            momentum = owned_to_even(local_tensor(momentum), param.shape, param.owner, param.runtime.comm)
        elif momentum is not None:
            momentum = momentum.clone()  # not a view that saves the whole stack
        state[index] = values if momentum is None else {**values, _MOMENTUM: momentum}
    return {**state_dict, "state": state}


def _load_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way in momentum goes straight into the stacks. Collective.

    ``torch.optim.Optimizer`` would cast it to the dtype of the parameter, which may be a half.
    """
    assert isinstance(optimizer, Muon)
    saved_groups = state_dict["param_groups"]
    fault = _group_mismatch(saved_groups, optimizer.param_groups)
    # State is keyed by position among the saved groups' parameters, which DCP replaces by names.
    loads = [
        (param, key, state_dict["state"].get(key, {}).get(_MOMENTUM))
        for saved, group in zip(saved_groups, optimizer.param_groups, strict=False)
        if group["use_muon"] and fault is None
        for key, param in zip(saved["params"], group["params"], strict=True)
    ]
    kinds = ["absent" if value is None else describe(value, param.shape) for param, _, value in loads]
    for (param, key, value), kind in zip(loads, kinds, strict=True):
        if kind is None:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            fault = f"momentum of {_name(param, key)} is {shape}, not a tensor of shape {tuple(param.shape)}"
            break
    for runtime in optimizer._runtimes:
        everywhere = agree(runtime.comm.reduce_group, fault, kinds)
        for (param, key, _), found in zip(loads, zip(*everywhere, strict=True), strict=True):
            if len(set(found)) > 1:
                raise ValueError(f"momentum of {_name(param, key)} is {', '.join(map(str, found))} on ranks 0, 1, …")
    if fault is not None:
        raise ValueError(fault)
    rows = {key: row for batches in optimizer._batches for key, row in _momentum_rows(batches).items()}
    state = dict(state_dict["state"])
    for param, key, value in loads:
        row = rows.get(id(param))
        if value is None:
            whole = None
        elif isinstance(param, OwnedTensor):
            assert param.runtime is not None
            dtype = local_tensor(param).dtype
            whole = even_to_owned(value, param.shape, param.owner, param.runtime.comm, dtype)
        else:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
        if row is not None:
            row.zero_() if whole is None else row.copy_(whole)
        state[key] = {name: other for name, other in state.get(key, {}).items() if name != _MOMENTUM}
    groups = [_completed(s, g) for s, g in zip(saved_groups, optimizer.param_groups, strict=True)]
    return {**state_dict, "state": state, "param_groups": groups}


def _group_mismatch(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> str | None:
    counts = [sum(len(g["params"]) for g in some) for some in (saved, groups)]
    if counts[0] != counts[1]:
        return f"the saved optimizer has {counts[0]} parameters, this one {counts[1]}; build it over the same model"
    if len(saved) != len(groups):
        return f"the saved optimizer has {len(saved)} groups, this one {len(groups)}; build it with the same groups"
    for index, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        sizes = len(theirs["params"]), len(ours["params"])
        if sizes[0] != sizes[1]:
            return f"group {index} has {sizes[0]} parameters in the saved optimizer and {sizes[1]} in this one"
        if theirs.get("use_muon", ours["use_muon"]) != ours["use_muon"]:
            return f"group {index} has use_muon={theirs['use_muon']} in the saved optimizer, the opposite in this one"
    return None


def _completed(saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """A saved group; options that ``torch.optim.Muon`` and ``torch.optim.AdamW`` do not know keep their values."""
    return {**{name: value for name, value in group.items() if name != "params"}, **saved}


def _name(param: Tensor, key: Any) -> str:
    return repr(param.fqn) if isinstance(param, OwnedTensor) else f"parameter {key!r}"


def _adopt_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Show the loaded momentum again, and make missing AdamW state anew."""
    assert isinstance(optimizer, Muon)
    for group, batches in zip(optimizer.param_groups, optimizer._batches, strict=True):
        if group["use_muon"]:
            optimizer._show_momentum(group, batches)
            continue
        for param in group["params"]:
            state = optimizer.state[param]
            if "step" not in state:
                init_adamw_state(param, state)
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(local_tensor(param).device)
