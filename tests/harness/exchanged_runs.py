"""Runs of models that others have sharded: the toy in its layouts, and stacks of experts in some placements."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dmuon
from harness.checkpoints import SINGLE, TOTAL, Run
from harness.dtensors import functions_of_whole_tensors
from harness.network import is_matrix
from harness.oracle import Twin, reference_weights
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, build

MOMENTUM = "momentum_buffer"
MATRICES = {n for n, _ in build().named_parameters() if is_matrix(n)}


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
    where, _, _ = name.partition(", ")
    if where in PLACEMENTS:
        return PLACEMENTS[where][0]
    return 1 if where == SINGLE else LAYOUTS[where].world


def start(name: str, seed: int = 0) -> Run:
    """``name`` is that of a layout of the toy, or of placements of experts; behind a comma stands what is special."""
    where, _, kind = name.partition(", ")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    if where in PLACEMENTS:
        experts = Experts(PLACEMENTS[where][1], dtype)
        config = None if experts.mesh is None else by_functions() if kind == "functions" else by_dtensors()
        groups = [{"params": list(experts.parameters()), "use_muon": True}]
        return RunOfExperts(experts, dmuon.Muon(groups, **OPTIONS, distributed_config=config), lambda part: part)
    model = build(seed=seed).to(dtype)
    if where == SINGLE:
        whole, config, mine = model, None, lambda part: part
    else:
        laid = lay(where, model)
        whole, config, mine = laid.model, laid.config, laid.mine
    given: Any = whole
    if kind == "both":  # Muon takes embedding and head, too, which FSDP2 shards where dmuon owns the blocks
        given = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "use_muon": True},
            {"params": [p for p in model.parameters() if p.ndim == 1], "use_muon": False, "weight_decay": 0.0},
        ]
        config = None if where == SINGLE else by_dtensors()
    return Run(whole, dmuon.Muon(given, **OPTIONS, distributed_config=config), mine)


def inner(run: Run) -> nn.Module:
    return getattr(run.model, "module", run.model)


def momenta(run: Run) -> dict[str, Tensor]:
    """What ``optimizer.state`` shows, by name."""
    named = inner(run).named_parameters()
    return {n: run.optimizer.state[p][MOMENTUM] for n, p in named if is_matrix(n) or isinstance(run, RunOfExperts)}


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
