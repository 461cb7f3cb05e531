"""Runs that are saved and resumed on any layout, and the one process of torch alone that they must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import dmuon
from dmuon.platform.torch_private import local_tensor
from harness.network import loss_of
from harness.oracle import Reference
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, batch, build

SINGLE = "single"  # dmuon.Muon in one process, nothing dedicated
SAVED, TOTAL = 3, 5  # steps before the checkpoint, and in all
FULL = StateDictOptions(full_state_dict=True)
FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def world_of(name: str) -> int:
    return 1 if name == SINGLE else LAYOUTS[name].world


@dataclass
class Run:
    """A model on some topology, its optimizer, and this rank's part of a batch."""

    model: nn.Module
    optimizer: dmuon.Muon
    part: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
    autocast: bool = False

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        dtype = torch.bfloat16 if self.autocast else torch.float32
        loss_of(self.model, *self.part(batch(step)), dtype).backward()

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

    def momenta(self) -> dict[str, Tensor]:
        """What this rank holds of momentum, by parameter."""
        suffix = ".momentum_buffer"
        return {n.removesuffix(suffix): t for n, t in self.local_tensors().items() if n.endswith(suffix)}


def start(
    name: str, seed: int = 0, keep: bool = False, model: Any = None, lr: float | None = None, **options: Any
) -> Run:
    """A toy, or ``model``, on the layout ``name``; ``options`` are those of :func:`harness.topologies.lay`."""
    model = build(seed=seed) if model is None else model
    muon = OPTIONS if lr is None else {**OPTIONS, "lr": lr}
    if name == SINGLE:
        return Run(model, dmuon.Muon(model, **muon), lambda tensors: tensors)
    laid = lay(name, model, keep=keep, **options)
    return Run(laid.model, laid.optimizer(**muon), laid.mine)


def save(_rank: int, _world: int, path: str, name: str, keep: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint after ``SAVED`` steps; whole weights and state, which rank 0 alone gets. Saving changes nothing."""
    run = start(name, keep=keep)
    run.train(range(SAVED))
    before = run.local_tensors()
    assert any(key.endswith(".grad") for key in before)
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    weights, state = get_state_dict(run.model, run.optimizer, options=FULL_ON_RANK_0)
    after = run.local_tensors()
    assert before.keys() == after.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return dict(weights), dict(state)


def load(run: Run, path: str, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(run.model, run.optimizer, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        run.model, run.optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"], options=options
    )


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
