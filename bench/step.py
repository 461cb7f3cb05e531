"""What a step costs: dedicated Muon in every mode, gather-then-compute Muon, and FSDP2 + AdamW, beside ideals.

All programs live in one process tree and take turns, so that drift of the machine hits them alike. Printed are
medians over rounds and ratios of medians; the error column is the largest relative difference of any weight from a
single-process run of the same steps (for AdamW from a single-process AdamW).

With F = forward + backward of one rank without communication, N = one rank's Newton-Schulz time for all matrices and
W ranks, the ideal step is F + N/W for dedicated owners, F + N when every rank computes everything, and F for AdamW.
Exposed is a step minus the same step without optimizer; ``of N/W`` is that over the ideal share of Newton-Schulz.

    python bench/step.py --world 2 --rounds 15
    python bench/step.py --world 2 --rounds 15 --programs sweep     # transports, prefetching, outstanding reductions
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
from dataclasses import asdict, dataclass, field
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.model.routing import route_parameters

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
    programs: str = "modes"
    json: str | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """How a dedicated model is laid out and communicates.

    Attributes:
        dims: mesh dimension of data parallelism, ``tp`` for tensor parallelism over all ranks instead.
    """

    dims: str = "shard"
    keep: bool = False
    overlap: bool = False
    comm: dmuon.CommOptions = field(default_factory=dmuon.CommOptions)


MODES = {
    "dedicated": Mode(),
    "dedicated keep": Mode(keep=True),
    "dedicated overlap": Mode(overlap=True),
    "dedicated keep overlap": Mode(keep=True, overlap=True),
    "dedicated ddp": Mode(dims="replicate"),
    "dedicated tp": Mode(dims="tp"),
}
SWEEP = {
    "dedicated": Mode(),
    "dedicated reductions 1": Mode(comm=dmuon.CommOptions(outstanding_reductions=1)),
    "dedicated reductions 4": Mode(comm=dmuon.CommOptions(outstanding_reductions=4)),
    "dedicated prefetch 0": Mode(comm=dmuon.CommOptions(prefetch=0)),
    "dedicated prefetch 2": Mode(comm=dmuon.CommOptions(prefetch=2)),
    "dedicated broadcast": Mode(comm=dmuon.CommOptions(transport="broadcast")),
    "dedicated single": Mode(comm=dmuon.CommOptions(transport="single")),
    "dedicated merged": Mode(comm=dmuon.CommOptions(merge_bytes=2**23)),
    "dedicated waiting": Mode(comm=dmuon.CommOptions(asynchronous=False)),
}
PROGRAMS = {"modes": MODES, "sweep": SWEEP}


@dataclass(slots=True)
class Program:
    """One way to train: forward and backward, and the optimizers that follow.

    Attributes:
        shared: all ranks see the whole batch, as tensor parallelism wants it.
    """

    name: str
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    reference: str
    shared: bool = False

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


def split(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism over all ranks: heads and hidden units."""
    for block in model.blocks:
        columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        plan = {name: ColwiseParallel() for name in columns} | {
            name: RowwiseParallel() for name in ("attention.o", "mlp.down")
        }
        parallelize_module(block, mesh, plan)
        block.attention.heads //= mesh.size()


def build_dedicated(name: str, mode: Mode, model: GPT, settings: Settings) -> Program:
    world = settings.world
    if mode.dims == "tp":
        both = init_device_mesh("cpu", (1, world), mesh_dim_names=("shard", "tp"))
        split(model, both["tp"])
        mesh = both["shard"]
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(mode.dims,))
    dmuon.dedicate_params(model, mesh, reshard_after_forward=not mode.keep, costs=settings.costs, comm=mode.comm)
    if mode.dims == "shard":
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not mode.keep)
        dmuon.fully_shard(model, mesh=mesh)
    return Program(
        name, model, [dmuon.Muon(model, lr=LR, overlap_backward=mode.overlap)], "muon", shared=mode.dims == "tp"
    )


def build(name: str, initial: GPT, mesh: DeviceMesh, settings: Settings) -> Program:
    model = copy.deepcopy(initial)
    matrices = {r.fqn for r in route_parameters(model) if r.muon}
    mode = PROGRAMS[settings.programs].get(name)
    if mode is not None:
        return build_dedicated(name, mode, model, settings)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if name == "fsdp2 + adamw":
        return Program(name, model, [adamw(list(model.parameters()))], "adamw")
    named = list(model.named_parameters())
    muon = GatherMuon([p for n, p in named if n in matrices], lr=LR)
    return Program(name, model, [muon, adamw([p for n, p in named if n not in matrices])], "muon")


def data(settings: Settings, step: int, rank: int | None, shared: bool = False) -> tuple[Tensor, Tensor]:
    """Random bytes of one rank, or of all ranks together (no rank given, or ``shared``)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (settings.world, settings.batch, settings.context + 1), generator=generator)
    mine = tokens.flatten(0, 1) if rank is None or shared else tokens[rank]
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
            program.step(*data(settings, step, rank, program.shared))
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
            x, y = data(settings, 1000 + index, rank, program.shared)
            took[program.name] = timed(lambda p=program, x=x, y=y: p.step(x, y))
            bare = timed(lambda p=program, x=x, y=y: p.step(x, y, optimize=False))
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
        f"{'program':<24}{'step':>9}{'ideal':>9}{'over':>7}{'exposed':>9}{'of N/W':>8}"
        f"{'of gather':>11}{'of AdamW':>10}{'error':>10}",
    ]
    for name in found:
        ideal = ideals[name.split()[0].split("-")[0]]
        # With overlap, backward orthogonalizes whether or not a step follows: its own would hide that.
        exposed = median[name] - median[name.replace(" overlap", "") + " without optimizer"]
        lines.append(
            f"{name:<24}{median[name]:>9.1f}{ideal:>9.1f}{median[name] / ideal:>7.2f}{exposed:>9.1f}"
            f"{exposed * settings.world / newton:>8.2f}"
            f"{exposed / gather:>11.2f}{median[name] / median['fsdp2 + adamw']:>10.2f}{found[name]:>10.1e}"
        )
    lines.append("")
    lines.append("exposed: step minus the same step without optimizer (and without overlap); of gather: as a part of")
    lines.append("gather-then-compute's; of N/W: over the ideal share of Newton-Schulz")
    return "\n".join(lines)


def worker(rank: int, settings: Settings, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=settings.world)
    mesh = init_device_mesh("cpu", (settings.world,))
    torch.manual_seed(settings.seed)
    initial = GPT(GPTConfig(settings.layers, settings.width, settings.heads, settings.context))
    names = [*PROGRAMS[settings.programs], "gather-then-compute", "fsdp2 + adamw"]
    programs = [build(name, initial, mesh, settings) for name in names]
    plan = dedications(programs[0].model)[0].plan
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
    if settings.programs not in PROGRAMS:
        parser.error(f"--programs must be one of {', '.join(PROGRAMS)}")
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
