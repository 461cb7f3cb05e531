"""Bytes a rank holds for each parameter of the model, by layout and optimizer, counted on the CPU.

    python bench/memory.py
    python bench/memory.py --mode resident --world 2

held        between two steps, gradients set to None: weights and optimizer state
backward    the most that is alive at once in forward and backward, activations included
step        the same in ``step()``

All three are bytes of the storages of tensors, of the rank that has most, over the number of parameters of the whole
model. The model is a GPT whose activations are small beside its weights.

``--mode resident`` takes what the system counts instead: the most MiB of memory that are resident in forward and
backward and in ``step()``, above those before the model was made, of the rank that has most. ``returned``: where glibc
is set to give back what is freed, of which it keeps much otherwise. Needs Linux.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common.harness import Record, on_ranks, run
from common.ledger import Live
from common.options import RankOptions, option
from common.ranks import over_ranks, resident_mib, restart_peak, run_ranks
from common.results import columns
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training.model import GPT, GPTConfig
from training.trainer import adamw, sharded

import dmuon

CONFIG = GPTConfig(layers=8, width=192, heads=4, context=16)
COLUMNS = ("held", "backward", "step")
# By default glibc keeps what threads have freed in arenas of their own, and small pieces between those that are in use.
RETURNED = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
WIDE = GPTConfig(layers=6, width=384, heads=6, context=128)
WINDOWS = 4
WARMUP, STEPS = 3, 6


@dataclass(frozen=True, slots=True)
class Settings(RankOptions):
    world: int = 4
    mode: str = option("counted", choices=("counted", "resident"))


Laid = tuple[nn.Module, torch.optim.Optimizer]


def ddp(model: GPT, mesh: DeviceMesh, muon: bool) -> Laid:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, dmuon.Muon(wrapped) if muon else adamw(model.parameters(), 1e-3)


def fsdp(model: GPT, mesh: DeviceMesh, muon: bool, **options: Any) -> Laid:
    sharded(fully_shard, model, mesh=mesh, **options)
    return model, dmuon.Muon(model) if muon else adamw(model.parameters(), 1e-3)


def dedicated(model: GPT, mesh: DeviceMesh, **options: Any) -> Laid:
    dmuon.dedicate_params(model, mesh, costs="flops", **options)
    sharded(dmuon.fully_shard, model, mesh=mesh, **options)
    return model, dmuon.Muon(model)


def copies(model: GPT, mesh: DeviceMesh) -> Laid:
    grid = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("replicate",))
    dmuon.dedicate_params(model, grid, costs="flops")
    return model, dmuon.Muon(model)


LAYOUTS: dict[str, Callable[[GPT, DeviceMesh], Laid]] = {
    "DDP, AdamW": lambda model, mesh: ddp(model, mesh, muon=False),
    "DDP, one line": lambda model, mesh: ddp(model, mesh, muon=True),
    "full copies, two lines": copies,
    "FSDP2, AdamW": lambda model, mesh: fsdp(model, mesh, muon=False),
    "FSDP2, one line": lambda model, mesh: fsdp(model, mesh, muon=True),
    "FSDP2, two lines": dedicated,
    "FSDP2 kept, AdamW": lambda model, mesh: fsdp(model, mesh, muon=False, reshard_after_forward=False),
    "FSDP2 kept, one line": lambda model, mesh: fsdp(model, mesh, muon=True, reshard_after_forward=False),
    "FSDP2 kept, two lines": lambda model, mesh: dedicated(model, mesh, reshard_after_forward=False),
}


def laid_out(
    name: str, config: GPTConfig, world: int, windows: int
) -> tuple[torch.optim.Optimizer, Callable[[], None], int]:
    """The optimizer of a model, its forward and backward, and how many parameters it has."""
    torch.manual_seed(0)
    model = GPT(config)
    elements = sum(p.numel() for p in model.parameters())
    laid, optimizer = LAYOUTS[name](model, init_device_mesh("cpu", (world,)))
    tokens = torch.randint(256, (windows, config.context + 1))

    def backward() -> None:
        F.cross_entropy(laid(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return optimizer, backward, elements


def counted(rank: int, name: str, world: int) -> dict[str, float]:
    """The three numbers of one layout, each of the rank that has most."""
    with Live() as live:
        optimizer, backward, elements = laid_out(name, CONFIG, world, 1)
        for _ in range(2):  # what is made once is made
            backward()
            optimizer.step()
            optimizer.zero_grad()
        live.restart()
        held = live.peak
        backward()
        in_backward = live.peak
        live.restart()
        optimizer.step()
        in_step = live.peak
    counts = over_ranks([count / elements for count in (held, in_backward, in_step)])
    return dict(zip(COLUMNS, counts, strict=True))


def resident(rank: int, name: str, world: int) -> list[float]:
    """Medians of the most MiB in forward and backward, and in ``step()``, of the rank that has most."""
    before = resident_mib()
    optimizer, backward, _ = laid_out(name, WIDE, world, WINDOWS)
    peaks: list[list[float]] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        peaks.append([])
        for work in (backward, optimizer.step):
            restart_peak()
            work()
            peaks[-1].append(resident_mib(peak=True) - before)
    return over_ranks([median(column) for column in zip(*peaks[WARMUP:], strict=True)])


def worker(rank: int, settings: Settings) -> Record:
    return {"rows": {name: counted(rank, name, settings.world) for name in LAYOUTS}}


def measure(settings: Settings) -> Record:
    if settings.mode == "counted":
        return on_ranks(worker)(settings)
    rows: dict[str, Record] = {name: {} for name in ("FSDP2, AdamW", "FSDP2, one line", "FSDP2, two lines")}
    for returned, environment in (("", {}), (", returned", RETURNED)):
        with mock.patch.dict(os.environ, environment):  # glibc reads it when a process starts
            for name, row in rows.items():
                found = run_ranks(settings.world, resident, name, settings.world)
                row |= {f"{what}{returned}": mb for what, mb in zip(COLUMNS[1:], found, strict=True)}
    return {"rows": rows}


def table(record: Record) -> str:
    if record["settings"].get("mode") == "resident":
        return columns(record["rows"], dict.fromkeys(record["rows"]["FSDP2, AdamW"], ".0f"), "MiB, most of a rank")
    return columns(record["rows"], dict.fromkeys(COLUMNS, ".1f"), "bytes a parameter and rank")


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, measure, table))
