"""Bytes a rank holds for each parameter of the model, by layout and optimizer, counted on the CPU.

    python bench/memory.py
    python bench/memory.py --world 4 --json FILE

held        between two steps, gradients set to None: weights and optimizer state
backward    the most that is alive at once in forward and backward, activations included
step        the same in ``step()``

All three are bytes of the storages of tensors, of the rank that has most, over the number of parameters of the whole
model. The model is a GPT whose activations are small beside its weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common.harness import Record, on_ranks, run
from common.ledger import Live
from common.options import RankOptions
from common.ranks import over_ranks
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


@dataclass(frozen=True, slots=True)
class Settings(RankOptions):
    world: int = 4


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


def measure_layout(world: int, name: str) -> dict[str, float]:
    """The three numbers of one layout, each of the rank that has most."""
    torch.manual_seed(0)
    with Live(counting=False) as live:
        model = GPT(CONFIG)
        elements = sum(p.numel() for p in model.parameters())
        laid, optimizer = LAYOUTS[name](model, init_device_mesh("cpu", (world,)))
        tokens = torch.randint(256, (1, CONFIG.context + 1))

        def backward() -> None:
            F.cross_entropy(laid(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()

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


def worker(rank: int, settings: Settings) -> Record:
    return {"rows": {name: measure_layout(settings.world, name) for name in LAYOUTS}}


def measure(settings: Settings) -> Record:
    return on_ranks(worker, settings)


def table(record: Record) -> str:
    return columns(record["rows"], dict.fromkeys(COLUMNS, ".1f"), "bytes a parameter and rank")


def main(argv: Sequence[str] | None = None) -> int:
    return run(Settings, __doc__, argv, measure, table, least={"world": 1})


if __name__ == "__main__":
    sys.exit(main())
