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
from dmuon.check.accounting import expected_nbytes
from dmuon.check.model import Network, Size, batch, build, loss_of
from dmuon.check.report import Reading
from dmuon.check.topologies import Grid, lay
from dmuon.dedicated.dedication import dedications
from dmuon.platform.torch_private import local_tensor

_CONTEXT = 256  # tokens per row, at most
_WARMUP, _ROUNDS = 2, 5
_MEMORY = 0.05  # of the formula
_SLACK_BYTES = 64 << 20  # workspaces of cuBLAS


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
class _Program:
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, data: tuple[Tensor, Tensor], optimize: bool) -> None:
        dtype = torch.float32 if data[0].device.type == "cpu" else torch.bfloat16
        loss_of(self.model, *data, dtype).backward()
        if optimize:
            self.optimizer.step()
        self.optimizer.zero_grad()


def _dedicated(speed: Speed, device: torch.device, timeout: timedelta) -> _Program:
    grid = Grid("1d", (("shard", dist.get_world_size()),))
    comm = dmuon.CommOptions(timeout=timeout)
    laid = lay(grid, build(speed.size, device), grid.mesh(device), costs="flops", comm=comm)
    return _Program(laid.model, dmuon.Muon(laid.model, lr=2e-3))


def _adamw(speed: Speed, device: torch.device) -> _Program:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model: Network = build(speed.size, device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _Program(model, torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True))


def measure_speed(speed: Speed, device: torch.device, timeout: timedelta) -> str:
    """Medians over interleaved rounds, of the slowest rank each time."""
    programs = {"dmuon": _dedicated(speed, device, timeout), "FSDP2 + fused AdamW": _adamw(speed, device)}
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


def memory_of_device(speed: Speed, device: torch.device, timeout: timedelta) -> list[Reading]:
    """What the allocator holds between steps, against the formula; CUDA only."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    program = _dedicated(speed, device, timeout)
    rows = batch(speed.size, speed.rows, speed.context, dist.get_rank(), device)
    for _ in range(2):
        program.step(rows, True)
    runtime = dedications(program.model)[0].runtime
    for buffer in runtime.buffers:
        buffer.free()  # what the step has fetched for the next forward
    del rows
    torch.cuda.synchronize(device)
    found = torch.cuda.memory_allocated(device) - before
    owned = sum(expected_nbytes(dedications(program.model)[0]).values())
    rest = _rest_nbytes(program)
    expected = owned + rest
    excess = max(0, abs(found - expected) - _SLACK_BYTES) / expected
    text = f"{found / 1e6:.0f} MB allocated between steps, formula {expected / 1e6:.0f} MB"
    return [Reading("memory", text, excess, _MEMORY, f"difference beyond {_SLACK_BYTES >> 20} MiB of workspaces")]


def _rest_nbytes(program: _Program) -> int:
    """Shards and moments of what FSDP2 has."""
    owned = dmuon.owned_parameters(program.model)
    rest = [local_tensor(p) for p in program.model.parameters() if p not in owned]
    return 3 * sum(t.nbytes for t in rest)


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
