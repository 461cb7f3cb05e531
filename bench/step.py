"""What a step costs: dedicated Muon, gather-then-compute Muon, and FSDP2 + AdamW, beside communication-free ideals.

All programs live in one process tree and take turns, so that drift of the machine hits them alike. Printed are
medians over rounds and ratios of medians; the error column is the largest relative difference of any weight from a
single-process run of the same steps (for AdamW from a single-process AdamW).

With F = forward + backward of one rank without communication, N = one rank's Newton-Schulz time for all matrices and
W ranks, the ideal step is F + N/W for dedicated owners, F + N when every rank computes everything, and F for AdamW.

    python bench/step.py --world 2 --rounds 15
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from gather_muon import GatherMuon
from model import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.policy import route_parameters

LR = 2e-3


@dataclass(frozen=True, slots=True)
class Settings:
    world: int = 2
    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 4
    rounds: int = 15
    warmup: int = 3
    check: int = 3
    costs: str | None = None
    seed: int = 0
    json: str | None = None


@dataclass(slots=True)
class Program:
    """One way to train: forward and backward, and the optimizers that follow."""

    name: str
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    reference: str

    def step(self, tokens: Tensor, targets: Tensor, optimize: bool = True) -> None:
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        for optimizer in self.optimizers:
            if optimize:
                optimizer.step()
            optimizer.zero_grad()


def adamw_groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(params: list[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(adamw_groups(params), lr=LR, betas=(0.9, 0.95), fused=True)


def build(name: str, initial: GPT, mesh: DeviceMesh, settings: Settings) -> Program:
    model = copy.deepcopy(initial)
    matrices = {r.fqn for r in route_parameters(model) if r.muon}
    if name.startswith("dedicated"):
        keep = name.endswith("keep")
        dmuon.dedicate_params(model, mesh, reshard_after_forward=not keep, costs=settings.costs)
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        dmuon.fully_shard(model, mesh=mesh)
        return Program(name, model, [dmuon.Muon(model, lr=LR)], "muon")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if name == "fsdp2 + adamw":
        return Program(name, model, [adamw(list(model.parameters()))], "adamw")
    named = list(model.named_parameters())
    muon = GatherMuon([p for n, p in named if n in matrices], lr=LR)
    return Program(name, model, [muon, adamw([p for n, p in named if n not in matrices])], "muon")


def data(settings: Settings, step: int, rank: int | None) -> tuple[Tensor, Tensor]:
    """Random bytes of one rank, or of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (settings.world, settings.batch, settings.context + 1), generator=generator)
    mine = tokens.flatten(0, 1) if rank is None else tokens[rank]
    return mine[:, :-1], mine[:, 1:]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    state = get_model_state_dict(model)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in state.items()}


def errors(programs: list[Program], initial: GPT, settings: Settings, rank: int) -> dict[str, float]:
    """Largest relative Frobenius difference of any weight from a single process after ``check`` steps."""
    twins = {}
    for kind in ("muon", "adamw"):
        twin = copy.deepcopy(initial)
        optimizer = dmuon.Muon(twin, lr=LR) if kind == "muon" else adamw(list(twin.parameters()))
        single = Program(kind, twin, [optimizer], kind)
        for step in range(settings.check):
            single.step(*data(settings, step, None))
        twins[kind] = {n: p.detach() for n, p in twin.state_dict().items()}
    found = {}
    for program in programs:
        for step in range(settings.check):
            program.step(*data(settings, step, rank))
        weights = whole_weights(program.model)
        expected = twins[program.reference]
        found[program.name] = max(
            float((weights[n] - e).norm() / e.norm().clamp(min=1e-12)) for n, e in expected.items() if n in weights
        )
    return found


def timed(work: Callable[[], None]) -> float:
    """Milliseconds of ``work``, from a common start to the end of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    spent = torch.tensor((time.perf_counter() - start) * 1e3)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def measure(programs: list[Program], initial: GPT, settings: Settings, rank: int) -> dict[str, list[float]]:
    local = copy.deepcopy(initial)
    muon = dmuon.Muon(local, lr=LR)
    alone = Program("local", local, [muon], "muon")
    samples: dict[str, list[float]] = {}
    for index in range(settings.warmup + settings.rounds):
        tokens, targets = data(settings, 1000 + index, rank)
        took = {"F": timed(lambda x=tokens, y=targets: alone.step(x, y, optimize=False))}
        alone.step(tokens, targets)
        took["N"] = 1e3 * muon.last_step.seconds["ns"]
        order = programs[index % len(programs) :] + programs[: index % len(programs)]
        for program in order:
            took[program.name] = timed(lambda p=program, x=tokens, y=targets: p.step(x, y))
            bare = timed(lambda p=program, x=tokens, y=targets: p.step(x, y, optimize=False))
            took[program.name + " without optimizer"] = bare
        if index >= settings.warmup:
            for name, value in took.items():
                samples.setdefault(name, []).append(value)
    return samples


def report(settings: Settings, samples: dict[str, list[float]], found: dict[str, float], balance: float) -> str:
    median = {name: statistics.median(values) for name, values in samples.items()}
    forward, newton = median["F"], median["N"]
    ideals = {"dedicated": forward + newton / settings.world, "gather": forward + newton, "fsdp2": forward}
    gather = median["gather-then-compute"] - median["gather-then-compute without optimizer"]
    tokens = settings.batch * settings.context
    lines = [
        f"{settings.world} ranks, 1 thread each; {settings.layers} layers of width {settings.width}; "
        f"{tokens} tokens per rank; {settings.rounds} interleaved rounds; medians in ms",
        f"F (forward + backward, no communication) {forward:.1f}   N (Newton-Schulz of all matrices on one rank) "
        f"{newton:.1f}   planned max/mean load {balance:.3f}",
        "",
        f"{'program':<22}{'step':>9}{'ideal':>9}{'over':>7}{'exposed':>9}"
        f"{'of gather':>11}{'of AdamW':>10}{'error':>10}",
    ]
    for name in found:
        ideal = ideals[name.split()[0].split("-")[0]]
        exposed = median[name] - median[name + " without optimizer"]
        lines.append(
            f"{name:<22}{median[name]:>9.1f}{ideal:>9.1f}{median[name] / ideal:>7.2f}{exposed:>9.1f}"
            f"{exposed / gather:>11.2f}{median[name] / median['fsdp2 + adamw']:>10.2f}{found[name]:>10.1e}"
        )
    lines.append("")
    lines.append("exposed: step minus the same step without optimizer; of gather: as a part of gather-then-compute's")
    return "\n".join(lines)


def worker(rank: int, settings: Settings, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=settings.world)
    mesh = init_device_mesh("cpu", (settings.world,))
    torch.manual_seed(settings.seed)
    initial = GPT(GPTConfig(settings.layers, settings.width, settings.heads, settings.context))
    names = ["dedicated", "dedicated keep", "gather-then-compute", "fsdp2 + adamw"]
    programs = [build(name, initial, mesh, settings) for name in names]
    plan = programs[0].model._dmuon_dedication.plan
    found = errors(programs, initial, settings, rank)
    samples = measure(programs, initial, settings, rank)
    if rank == 0:
        print(report(settings, samples, found, plan.balance), flush=True)
        if settings.json:
            result = {
                "settings": asdict(settings),
                "cpu": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
                "cost_source": plan.cost_source.replace(str(Path.home()), "~"),
                "samples_ms": samples,
                "errors": found,
            }
            Path(settings.json).write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Settings()).items():
        kind = str if default is None else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default {default}")
    settings = Settings(**vars(parser.parse_args(argv)))
    for name in ("world", "layers", "width", "heads", "context", "batch", "rounds"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if settings.json:
        Path(settings.json).parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (settings, os.path.join(folder, "store")), nprocs=settings.world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
