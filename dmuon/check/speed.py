"""A larger model's step beside FSDP2 with AdamW: for information, the machine may be shared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.check.model import Network, Size, batch, build, loss_of
from dmuon.check.topologies import Grid, lay

_CONTEXT = 256  # tokens per row, at most
_WARMUP, _ROUNDS = 2, 5


@dataclass(frozen=True, slots=True)
class Speed:
    """The larger model, and tokens per rank."""

    size: Size
    tokens: int

    @property
    def context(self) -> int:
        return min(_CONTEXT, self.tokens)

    @property
    def rows(self) -> int:
        return max(1, self.tokens // self.context)

    def __str__(self) -> str:
        return f"width {self.size.width}, {self.size.layers} layers, {self.rows * self.context} tokens per rank"


@dataclass(slots=True)
class Program:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, data: tuple[Tensor, Tensor], optimize: bool) -> None:
        """Forward and backward, and the optimizer's step if ``optimize``."""
        dtype = torch.float32 if data[0].device.type == "cpu" else torch.bfloat16
        loss_of(self.model, *data, dtype).backward()
        if optimize:
            self.optimizer.step()
        self.optimizer.zero_grad()


def dedicated(speed: Speed, device: torch.device, timeout: timedelta) -> Program:
    """Matrices owned, over all ranks in one row. Collective."""
    grid = Grid("1d", (("shard", dist.get_world_size()),))
    comm = dmuon.CommOptions(timeout=timeout)
    laid = lay(grid, build(speed.size, device), grid.mesh(device), costs="flops", comm=comm)
    return Program(laid.model, dmuon.Muon(laid.model, lr=2e-3))


def exchanged(speed: Speed, device: torch.device) -> Program:
    """Matrices sharded by FSDP2 over all ranks. Collective."""
    model = _sharded(speed, device)
    config = dmuon.create_dtensor_config(costs="flops")
    return Program(model, dmuon.Muon(model, lr=2e-3, distributed_config=config))


def _adamw(speed: Speed, device: torch.device) -> Program:
    model = _sharded(speed, device)
    return Program(model, torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True))


def _sharded(speed: Speed, device: torch.device) -> Network:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model: Network = build(speed.size, device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def measure_speed(speed: Speed, device: torch.device, timeout: timedelta) -> str:
    """Medians over interleaved rounds, of the slowest rank each time."""
    programs = {"dmuon": dedicated(speed, device, timeout), "FSDP2 + fused AdamW": _adamw(speed, device)}
    samples: dict[tuple[str, bool], list[float]] = {}
    world, rank = dist.get_world_size(), dist.get_rank()
    for index in range(_WARMUP + _ROUNDS):
        tokens, targets = batch(speed.size, speed.rows * world, speed.context, index, device)
        mine = tokens.chunk(world)[rank], targets.chunk(world)[rank]
        names = list(programs) if index % 2 else list(reversed(programs))
        for name, optimize in product(names, (True, False)):
            took = _timed(partial(programs[name].step, mine, optimize), device)
            if index >= _WARMUP:
                samples.setdefault((name, optimize), []).append(took)
    parts = []
    for name in programs:
        step, bare = (statistics.median(samples[name, optimize]) for optimize in (True, False))
        parts.append(f"{name} {step:.1f} ms a step, of which {step - bare:.1f} exposed optimizer")
    ratio = statistics.median(samples["dmuon", True]) / statistics.median(samples["FSDP2 + fused AdamW", True])
    return f"{'; '.join(parts)}; ratio {ratio:.2f}"


def _timed(work: Callable[[], None], device: torch.device) -> float:
    """Milliseconds from a common start to the end of the slowest rank."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    settle()
    if dist.get_world_size() > 1:
        dist.barrier()
    settle()
    start = time.perf_counter()
    work()
    settle()
    spent = torch.tensor((time.perf_counter() - start) * 1e3, device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)
