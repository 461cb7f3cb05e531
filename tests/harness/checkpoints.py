"""Runs that are saved and resumed on any layout, and the one process of torch alone that they must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dmuon
from harness.dtensors import functions_of_whole_tensors, local_tensor
from harness.network import is_matrix, loss_of
from harness.oracle import Reference, Twin, reference_weights
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, batch, build

SINGLE = "single"  # dmuon.Muon in one process, nothing dedicated
SAVED, TOTAL = 3, 5  # steps before the checkpoint, and in all
MOMENTUM = "momentum_buffer"
MATRICES = {n for n, _ in build().named_parameters() if is_matrix(n)}
FULL = StateDictOptions(full_state_dict=True)
FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass
class Run:
    """A model on some topology, its optimizer, and this rank's part of a batch."""

    model: nn.Module
    optimizer: dmuon.Muon
    part: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
    config: dmuon.DistributedConfig | None = None

    @property
    def inner(self) -> Any:
        """The model without DDP's wrapper."""
        return getattr(self.model, "module", self.model)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, *self.part(batch(step))).backward()

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def local_tensors(self) -> dict[str, Tensor]:
        """What this rank holds: weights, gradients, state."""
        found: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            found[name] = param
            if param.grad is not None:
                found[f"{name}.grad"] = param.grad
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[param].items()}
        return {name: local_tensor(tensor).detach().clone() for name, tensor in found.items()}

    def shown(self) -> dict[str, Tensor]:
        """The momentum that ``optimizer.state`` shows, by parameter."""
        state = {n: self.optimizer.state[p] for n, p in self.inner.named_parameters()}
        return {name: values[MOMENTUM] for name, values in state.items() if MOMENTUM in values}

    def momenta(self) -> dict[str, Tensor]:
        """What this rank holds of momentum, by parameter."""
        return {name: local_tensor(momentum).detach().clone() for name, momentum in self.shown().items()}


class Experts(nn.Module):
    """Two stacks and a matrix, cut alike, with gradients that only the step decides."""

    SHAPES = ((4, 6, 10), (5, 9, 4), (7, 11))

    def __init__(self, placement: Placement | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.mesh = None if placement is None else init_device_mesh("cpu", (dist.get_world_size(),))
        self.placement = placement
        self.weights = nn.ParameterList(self.lay(1.0 + t.to(dtype)) for t in self.noise(99))

    @classmethod
    def noise(cls, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in cls.SHAPES]

    def lay(self, tensor: Tensor) -> Tensor:
        return tensor if self.mesh is None else distribute_tensor(tensor, self.mesh, [self.placement])


class RunOfExperts(Run):
    def backward(self, step: int) -> None:
        for weight, grad in zip(self.model.weights, self.model.noise(step), strict=True):
            weight.grad = self.model.lay(grad.to(weight.dtype))


PLACEMENTS: dict[str, tuple[int, Placement | None]] = {
    "experts alone": (1, None),
    "experts on 3": (3, Shard(0)),  # the last rank holds none of the first stack
    "rows on 2": (2, Shard(1)),
    "copies on 2": (2, Replicate()),
}


def by_functions() -> dmuon.DistributedConfig:
    def assign(params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        return {i: i % dist.get_world_size() for i in range(len(params))}

    return dmuon.DistributedConfig(assign, *functions_of_whole_tensors(), state={}, prefetch_count=0)


def by_dtensors() -> dmuon.DistributedConfig:
    return dmuon.create_dtensor_config(costs="flops")


def world_of(name: str) -> int:
    where = name.partition(", ")[0]
    if where in PLACEMENTS:
        return PLACEMENTS[where][0]
    return 1 if where == SINGLE else LAYOUTS[where].world


def is_exchanged(name: str) -> bool:
    where = name.partition(", ")[0]
    return where in PLACEMENTS or (where != SINGLE and not LAYOUTS[where].dedicated)


def start(
    name: str, seed: int = 0, model: Any = None, lr: float = OPTIONS["lr"], member: Any = None, **options: Any
) -> Run:
    """A toy, or ``model``, on a layout, or placements of experts; behind a comma of ``name`` stands what is special.

    Args:
        member: more options of ``dmuon.Muon``.
        options: of :func:`harness.topologies.lay`.
    """
    where, _, kind = name.partition(", ")
    muon = {**OPTIONS, "lr": lr, **(member or {})}
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    if where in PLACEMENTS:
        experts = Experts(PLACEMENTS[where][1], dtype)
        config = None if experts.mesh is None else by_functions() if kind == "functions" else by_dtensors()
        groups = [{"params": list(experts.parameters()), "use_muon": True}]
        return RunOfExperts(experts, dmuon.Muon(groups, **muon, distributed_config=config), lambda part: part, config)
    model = build(seed=seed).to(dtype) if model is None else model
    if where == SINGLE:
        whole, config, mine = model, None, lambda part: part
    else:
        laid = lay(where, model, keep=kind == "keep" or options.pop("keep", False), **options)
        whole, config, mine = laid.model, laid.config, laid.mine
    given: Any = whole
    if kind == "both":  # Muon takes embedding and head, too, which FSDP2 shards where dmuon owns the blocks
        given = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "use_muon": True},
            {"params": [p for p in model.parameters() if p.ndim == 1], "use_muon": False, "weight_decay": 0.0},
        ]
        config = None if where == SINGLE else by_dtensors()
    return Run(whole, dmuon.Muon(given, **muon, distributed_config=config), mine, config)


def expected_weights(name: str) -> dict[str, Tensor]:
    """Of ``torch.optim.Muon`` in one process, after all steps."""
    where, _, kind = name.partition(", ")
    if where in PLACEMENTS:
        twin = Twin([1.0 + t for t in Experts.noise(99)])
        for step in range(TOTAL):
            twin.step(Experts.noise(step))
        return {f"weights.{i}": t.reshape(Experts.SHAPES[i]) for i, t in enumerate(twin.weights())}
    return reference_weights(TOTAL, matrix=is_2d if kind == "both" else is_matrix)


def is_2d(name: str) -> bool:
    return is_matrix(name) or name in ("embed.weight", "head.weight")


def save(run: Run, path: str, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(run.model, run.optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load(run: Run, path: str, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(run.model, run.optimizer, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        run.model, run.optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"], options=options
    )


def save_after_steps(_rank: int, _world: int, path: str, name: str, flat: bool = False, member: Any = None) -> None:
    run = start(name, member=member)
    run.train(range(SAVED))
    save(run, path, flat)


def resumed(path: str, name: str, member: Any) -> Run:
    """After all steps. It began with other values, and with state to be overwritten."""
    run = start(name, seed=50, member=member)
    run.train(range(1))
    load(run, path)
    run.train(range(SAVED, TOTAL))
    return run


class Plain:
    """One process of torch alone after ``steps``: what whole state dicts must hold, by name."""

    def __init__(self, steps: int = 0, seed: int = 0) -> None:
        self.model = build(seed=seed)
        self.reference = Reference(self.model)
        self.train(range(steps))

    def train(self, steps: range) -> None:
        for step in steps:
            self.reference.zero_grad()
            loss_of(self.model, *batch(step)).backward()
            self.reference.step()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.reference.muon, self.reference.adamw]

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(dict(self.model.state_dict()))

    def state(self) -> dict[str, Any]:
        """As ``get_optimizer_state_dict`` gives it, without options that only dmuon's groups have."""
        return copy.deepcopy(dict(get_optimizer_state_dict(self.model, self.optimizers)))

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.model.load_state_dict(weights)
        names = {p: n for n, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            stock = optimizer.state_dict()
            params = [p for group in optimizer.param_groups for p in group["params"]]
            stock["state"] = {i: state["state"][names[p]] for i, p in enumerate(params)}
            optimizer.load_state_dict(stock)


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, values in state["state"].items() for key, value in values.items()}
