"""The optimizer: Muon for matrices, AdamW for everything else, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon._torch import local_tensor
from dmuon.adamw import adamw_step, init_adamw_state
from dmuon.comm import agree
from dmuon.device import PhaseTimer
from dmuon.kernels import apply_update_, momentum_update, orthogonalize, update_scale
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
    """

    ns_matrices: int
    ns_batches: int
    seconds: dict[str, float]


@dataclass(slots=True, eq=False)
class _Batch:
    """Matrices of one shape whose momentum is one stacked tensor, so that a batch needs no copies."""

    params: list[Tensor]
    momentum: Tensor  # (k, m, n)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for matrices and AdamW for the rest.

    A matrix's update is the orthogonal factor of its momentum, by Newton-Schulz. On a model that went through
    ``dmuon.dedicate_params`` each owner updates its own matrices and publishes the result; elsewhere it is plain
    Muon. Momentum and master weights are fp32 or wider.

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
        adjust_lr_fn: factor on ``lr`` by shape: ``"match_rms_adamw"``, ``"original"``, ``"spectral"``, or
            ``f((m, n)) -> float``.
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
        adjust_lr_fn: str | Callable[[Any], float] = "match_rms_adamw",
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
        self._counts = (0, 0)
        groups = groups_from(params, select)
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._timer = PhaseTimer(next(local_tensor(p).device for g in self.param_groups for p in g["params"]))
        self.register_state_dict_post_hook(_even_momentum)
        self.register_load_state_dict_pre_hook(_owned_momentum)
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
            if isinstance(param, OwnedTensor) and local.shape != param.shape:
                self.state[param][_MOMENTUM] = _momentum_view(param, local.new_empty(local.shape))
            else:
                key = (local.shape, local.dtype, local.device, getattr(param, "runtime", None))
                classes.setdefault(key, []).append(param)
        batches = []
        for (shape, dtype, device, runtime), params in classes.items():
            size = _batch_size(shape, runtime)
            for start in range(0, len(params), size):
                chunk = params[start : start + size]
                stack_dtype = torch.promote_types(dtype, torch.float32)
                stack = torch.zeros((len(chunk), *shape), dtype=stack_dtype, device=device)
                batches.append(_Batch(chunk, stack))
                for param, row in zip(chunk, stack, strict=True):
                    self.state[param][_MOMENTUM] = _momentum_view(param, row)
        return batches

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
                    f"the gradient of {waiting!r} is not reduced: the last backward before step() must run outside no_sync()"
                )
        self._timer.reset()
        matrices = calls = 0
        for group, batches in zip(self.param_groups, self._batches, strict=True):
            for batch in batches:
                for params, momentum in _with_gradients(batch):
                    self._update(group, params, momentum)
                    matrices += len(params)
                    calls += 1
        self._counts = (matrices, calls)
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

    def _update(self, group: dict[str, Any], params: list[Tensor], momentum: Tensor) -> None:
        with self._timer.phase("momentum"):
            update = momentum_update(
                [local_tensor(_grad(p)) for p in params],
                momentum,
                beta=group["momentum"],
                nesterov=group["nesterov"],
            )
        with self._timer.phase("ns"):
            update = orthogonalize(
                update,
                coefficients=group["ns_coefficients"],
                steps=group["ns_steps"],
                eps=group["eps"],
                dtype=group["ns_dtype"],
            )
        with self._timer.phase("apply"):
            apply_update_(
                [local_tensor(p).detach() for p in params],
                update,
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                scale=update_scale(group["adjust_lr_fn"], momentum.shape[1:]),
            )

    @property
    def last_step(self) -> StepStats:
        """Counters and time per phase of the last step. On an accelerator it waits for that step to finish."""
        return StepStats(*self._counts, self._timer.seconds())

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


def _params_by_index(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def _even_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way out owned momentum is an even row-sharded DTensor. Collective."""
    params = _params_by_index(optimizer)
    state = dict(state_dict["state"])
    for index, values in state.items():
        param = params[index]
        if isinstance(param, OwnedTensor) and _MOMENTUM in values:
            assert param.runtime is not None
            local = local_tensor(values[_MOMENTUM])
            even = owned_to_even(local, param.shape, param.owner, param.runtime.comm)
            state[index] = {**values, _MOMENTUM: even}
        elif isinstance(values.get(_MOMENTUM), Tensor):
            state[index] = {
                **values,
                _MOMENTUM: values[_MOMENTUM].clone(),
            }  # not a view that saves the whole stack
    return {**state_dict, "state": state}


def _owned_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way in it becomes the owner's whole tensor again. Collective."""
    params = _params_by_index(optimizer)
    # State is keyed by position among the saved groups' parameters, which DCP replaces by names.
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(saved) != len(params):
        raise ValueError(
            f"the saved optimizer has {len(saved)} parameters, this one {len(params)}; build it over the same model"
        )
    state = dict(state_dict["state"])
    for key, param in zip(saved, params.values(), strict=True):
        if not isinstance(param, OwnedTensor):
            continue
        assert param.runtime is not None
        comm = param.runtime.comm
        value = state.get(key, {}).get(_MOMENTUM)
        fault = None
        kind = describe(value, param.shape)
        if value is not None and kind is None:
            fault = (
                f"momentum of {param.fqn!r} has shape {tuple(getattr(value, 'shape', ()))}, not {tuple(param.shape)}"
            )
        kinds = set(agree(comm.reduce_group, fault, kind))
        if len(kinds) > 1:
            raise ValueError(f"momentum of {param.fqn!r} is {', '.join(map(str, kinds))} on different ranks")
        if value is None:
            continue
        dtype = local_tensor(param).dtype
        local = even_to_owned(value, param.shape, param.owner, comm, dtype)
        state[key] = {**state[key], _MOMENTUM: _momentum_view(param, local)}
    return {**state_dict, "state": state}


def _adopt_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy loaded momentum into the stacks (whatever dtype it came in), and make missing state anew."""
    assert isinstance(optimizer, Muon)
    for group, batches in zip(optimizer.param_groups, optimizer._batches, strict=True):
        stacked = {id(p): row for batch in batches for p, row in zip(batch.params, batch.momentum, strict=True)}
        for param in group["params"]:
            state = optimizer.state[param]
            if not group["use_muon"]:
                if "step" not in state:
                    init_adamw_state(param, state)
                step = torch.as_tensor(state["step"], dtype=torch.float32)
                state["step"] = step.to(local_tensor(param).device)
                continue
            row = stacked.get(id(param))
            if row is None:  # owned elsewhere
                local = local_tensor(param)
                state[_MOMENTUM] = _momentum_view(param, local.new_empty(local.shape))
                continue
            loaded = state.get(_MOMENTUM)
            if loaded is None:
                row.zero_()
            else:
                if isinstance(loaded, DTensor) and not isinstance(loaded, OwnedTensor):
                    loaded = loaded.full_tensor()
                row.copy_(local_tensor(loaded))
            state[_MOMENTUM] = _momentum_view(param, row)
