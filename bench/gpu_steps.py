"""Steps of one GPT by AdamW, by torch's Muon and by both residencies, one after the other, for ``bench/gpu_hour.py``.

Started by torchrun in ``bench/``. A program that the file has already is not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path

import common.checkout  # noqa: F401 - before anything of dmuon
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.clock import Clock, collect, medians
from common.ranks import over_ranks
from common.results import write_json
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from training.model import GPT
from training.settings import Settings
from training.trainer import build

from dmuon.kernels import drop_graphs

AGAIN = "adamw, again"  # last, so that a device that slows down shows
PROGRAMS = ("adamw", "dmuon", "dedicated", "gather", "torch.optim.Muon", AGAIN)
SIZES = {  # layers, width, heads, context, windows a rank, samples
    "1b": (20, 2048, 16, 4096, 2, 20),
    "dry": (2, 64, 2, 32, 2, 3),
}


def settings_of(size: str, world: int, device: str) -> Settings:
    layers, width, heads, context, batch, _ = SIZES[size]
    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context, "batch": batch}
    return Settings(world=world, device=device, dtype=dtype, lr_adamw=3e-4, lr_dmuon=3e-4, **sizes)


def measure(name: str, settings: Settings, rounds: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of a step of the slowest rank, of what follows backward in it, and the peak of its memory.

    Collective over all ranks.
    """
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with device:
        model = GPT(settings.model)
        tokens = torch.randint(256, (settings.batch, settings.context + 1))
    mesh = init_device_mesh(device.type, (settings.world,), mesh_dim_names=("shard",))
    optimizers, _ = build(name.partition(",")[0], model, mesh, settings)
    clock = Clock(device)

    def sample(_index: int) -> dict[str, float]:
        begin = clock.mark()
        _backward(model, tokens)
        middle = clock.mark()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        end = clock.mark()
        return {"step_ms": clock.milliseconds(begin, end), "optimizer_ms": clock.milliseconds(middle, end)}

    row = medians(collect(3, rounds, sample))
    last = getattr(optimizers[0], "last_step", None)
    row["ns_ms"] = 1e3 * last.seconds["ns"] if last is not None else 0.0
    row["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    return dict(zip(row, over_ranks(list(row.values())), strict=True))


def _backward(model: GPT, tokens: Tensor) -> None:
    logits = model(tokens[:, :-1]).float()
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    settings = settings_of(arguments.size, world, device.type)
    rows = json.loads(arguments.json.read_text())["programs"] if arguments.json.exists() else {}
    dist.barrier()  # all have read before the first one writes
    for name in PROGRAMS:
        if name in rows:
            continue
        rows[name] = measure(name, settings, SIZES[arguments.size][-1], device)
        gc.collect()  # a model and its hooks refer to each other
        drop_graphs()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            print(f"{world} ranks, {name}: {rows[name]}", flush=True)
            write_json(arguments.json, {"world": world, "size": arguments.size, "programs": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
