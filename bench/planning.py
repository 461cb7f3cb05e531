"""Does planning pay? The real ``dmuon.Muon.step`` of the same matrices under the owners of four planners.

Each rank is pinned to a core of its own and computes in one thread. The planners take turns, in rotating order; an
entry is the median over rounds of the slowest rank: of the wall time of a step from a common start, and of the CPU time
of the thread that computes. Gradients are fixed and random; nothing but ``step()`` is timed.

Three settings. The towers of pi0, their widths scaled down, with few layers: an owner gets a handful of matrices of
unequal shapes, as on many ranks at full size. The same with more layers, where the remainders of an uneven deal matter
less, and equal layers, where any even deal is as good: there, planning is not worth it.

    python bench/planning.py
    python bench/planning.py --model config.json --scale 8 --json bench/results/planning.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.clock import collect, in_turn, medians
from common.options import parse
from common.published import PI0
from common.ranks import over_ranks, run_ranks, share
from common.results import origin, without_home, write_json
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon
from dmuon import OwnerPlan
from dmuon.dedicated.buffer import BufferState
from dmuon.dedicated.dedication import dedications
from dmuon.dedicated.runtime import Runtime
from dmuon.model.config import read_model
from dmuon.planning.cost_lookup import find_costs
from dmuon.planning.owner_plan import FoundCosts
from dmuon.solver import CostTable, Matrix, Plan, baseline

OURS = "ours"
LIMIT = 1.02  # of the best: what counts as equal
MORE_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Settings:
    world: int = 2
    model: str | None = None
    scale: int = 8
    layers: int = 1
    rounds: int = 30
    warmup: int = 3
    costs: str | None = None
    json: str | None = None


class Block(nn.Module):
    """Some matrices; nothing runs forward here."""

    def __init__(self, matrices: list[Matrix]) -> None:
        super().__init__()
        for m in matrices:
            layer = nn.Linear(m.cols, m.rows, bias=False)
            self.add_module(m.name.removeprefix(m.block + ".").removesuffix(".weight").replace(".", "_"), layer)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Towers(nn.Module):
    """A ``ModuleList`` of blocks per tower."""

    def __init__(self, matrices: list[Matrix]) -> None:
        super().__init__()
        blocks: dict[str, list[Matrix]] = {}
        for m in matrices:
            blocks.setdefault(m.block, []).append(m)
        for name, members in blocks.items():
            tower = name.rpartition(".")[0].replace(".", "_")
            if tower not in self._modules:
                self.add_module(tower, nn.ModuleList())
            self._modules[tower].append(Block(members))


def model_matrices(settings: Settings, layers: int) -> list[Matrix]:
    """The matrices of the first ``layers`` blocks of every tower, both sides divided by ``scale``."""
    if settings.model is not None:
        found = read_model(settings.model)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(PI0))
            found = read_model(path)
    scale = settings.scale
    return [
        Matrix(m.name, max(1, m.rows // scale), max(1, m.cols // scale), m.block)
        for m in found
        if int(m.block.rpartition(".")[2]) < layers
    ]


def equal_layers(side: int = 256, layers: int = 12) -> list[Matrix]:
    return [
        Matrix(f"equal.{i}.{name}.weight", side, side, f"equal.{i}")
        for i in range(layers)
        for name in ("q", "k", "v", "o")
    ]


def named_by_module(matrices: list[Matrix]) -> list[Matrix]:
    """The same matrices under the names that they have in :class:`Towers`."""
    with torch.device("meta"):
        model = Towers(matrices)
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    named = [(n, p, next(b for b in blocks if n.startswith(b + "."))) for n, p in model.named_parameters()]
    return [Matrix(name, *param.shape, block) for name, param, block in named]


def plans(matrices: list[Matrix], world: int, costs: FoundCosts) -> dict[str, OwnerPlan]:
    """A plan per planner. All run the same batches; what they differ in is who owns what."""
    table = costs.table
    best = dmuon.solver.plan(matrices, world, table)
    flops = CostTable.from_flops({m.shape for m in matrices})
    found = {
        "round robin": baseline("round-robin", matrices, world, table),
        "LPT on FLOPs": baseline("lpt", matrices, world, flops),
        "LPT on T(1)": baseline("lpt", matrices, world, table),
        OURS: best,
    }
    return {name: OwnerPlan.from_solution(priced(p, table, best.bound_ns), costs) for name, p in found.items()}


def priced(plan: Plan, table: CostTable, bound_ns: int) -> Plan:
    """``plan`` with the loads that ``table`` predicts for its owners, whatever costs it was made with.

    The optimizer batches matrices as they are stored: a transpose is another batch.
    """
    batches = Counter((plan.owners[m.name], m.rows, m.cols) for m in plan.matrices)
    loads = [0] * plan.world
    for (rank, rows, cols), n in batches.items():
        loads[rank] += table.cost((min(rows, cols), max(rows, cols)), n)
    return replace(plan, loads_ns=tuple(loads), bound_ns=bound_ns)


@dataclass(slots=True)
class Program:
    """The towers under one plan, with gradients that stay."""

    name: str
    runtime: Runtime
    optimizer: dmuon.Muon

    @classmethod
    def build(cls, name: str, matrices: list[Matrix], plan: OwnerPlan, mesh: DeviceMesh) -> Program:
        torch.manual_seed(0)
        model = Towers(matrices)
        dmuon.dedicate_params(model, mesh, plan=plan)
        runtime = dedications(model)[0].runtime
        for entry in runtime.matrices():
            entry.set_grad(torch.randn_like(entry.master))
        return cls(name, runtime, dmuon.Muon(model, lr=1e-4))

    def step(self) -> tuple[float, float]:
        """Milliseconds of wall time and of this thread's CPU time; the largest over ranks."""
        dist.barrier()
        wall, cpu = time.perf_counter(), time.thread_time()
        self.optimizer.step()
        wall, cpu = over_ranks([1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)])
        for buffer in self.runtime.buffers:
            if buffer.state is not BufferState.FREED:
                buffer.free()  # what it started to publish must not run beside the next program
        return wall, cpu


def measure(title: str, matrices: list[Matrix], mesh: DeviceMesh, settings: Settings, rank: int) -> dict[str, Any]:
    """Samples and predictions of all planners, in turns."""
    world = settings.world
    named = named_by_module(matrices)
    shapes = dict(Counter(m.shape for m in named))
    costs = find_costs(
        shapes,
        world=world,
        rank=rank,
        device=torch.device("cpu"),
        costs=settings.costs,
        budget_s=60.0,
        share=(lambda work: share(work())) if world > 1 else None,
    )
    sent = [{n: p.to_json() for n, p in plans(named, world, costs).items()} if rank == 0 else None]
    dist.broadcast_object_list(sent, src=0)  # a solver that stops at a time limit does not repeat itself
    chosen = {name: OwnerPlan.from_json(document, "sent by rank 0") for name, document in (sent[0] or {}).items()}
    programs = [Program.build(name, matrices, plan, mesh) for name, plan in chosen.items()]

    def sample(index: int) -> dict[tuple[str, str], float]:
        took: dict[tuple[str, str], float] = {}
        for program in in_turn(programs, index):
            took["wall", program.name], took["CPU", program.name] = program.step()
        return took

    samples = collect(settings.warmup, settings.rounds, sample)
    return {
        "title": title,
        "matrices": len(named),
        "shapes": {f"{small}x{large}": count for (small, large), count in sorted(shapes.items())},
        "batches": {f"{small}x{large}": size for (small, large), size in chosen[OURS].chunks.items()},
        "cost_source": without_home(costs.source),
        "bound_ms": chosen[OURS].solution.bound_ns / 1e6,
        "predicted_ms": {name: plan.solution.makespan_ns / 1e6 for name, plan in chosen.items()},
        "wall_ms": {name: samples["wall", name] for name in chosen},
        "cpu_ms": {name: samples["CPU", name] for name in chosen},
    }


def report(result: dict[str, Any]) -> str:
    """Medians, ratios to the best, and what follows for planning."""
    columns = {
        "predicted": result["predicted_ms"],
        "wall": medians(result["wall_ms"]),
        "CPU": medians(result["cpu_ms"]),
    }
    ratios = {
        column: {name: value / min(values.values()) for name, value in values.items()}
        for column, values in columns.items()
    }
    shapes = ", ".join(f"{count} of {shape}" for shape, count in result["shapes"].items())
    lines = [
        f"{result['title']}: {result['matrices']} matrices ({shapes})",
        f"medians in ms; costs: {result['cost_source']}; no owners can predict less than {result['bound_ms']:.1f}",
        f"{'planner':<14}" + "".join(f"{column:>11}{'of best':>9}" for column in columns),
    ]
    for name in result["predicted_ms"]:
        cells = (f"{columns[c][name]:>11.1f}{ratios[c][name]:>9.3f}" for c in columns)
        lines.append(f"{name:<14}" + "".join(cells))
    for column in ("wall", "CPU"):
        ours = ratios[column][OURS]
        lines.append(
            f"{column}: ours is {ours:.3f} of the best, {'within' if ours <= LIMIT else 'ABOVE'} the {LIMIT} allowed"
        )
    for name in columns["wall"]:
        if name != OURS:
            # What the clocks do not both say is noise.
            slower = min(columns[column][name] / columns[column][OURS] for column in ("wall", "CPU"))
            verdict = f"{slower:.2f} times as long" if slower > LIMIT else "not worth planning against"
            lines.append(f"{name}: {verdict}")
    return "\n".join(lines)


def pin(rank: int) -> str:
    """Put all threads of this process, and those that they will start, on a core of its own; says what came of it."""
    if not hasattr(os, "sched_setaffinity"):
        return "ranks are not pinned: this system has no sched_setaffinity"
    cores = sorted(os.sched_getaffinity(0))
    if rank >= len(cores):
        return f"rank {rank} is not pinned: there are {len(cores)} cores"
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[rank]})
    return f"rank {rank} is pinned to core {cores[rank]}"


def worker(rank: int, settings: Settings) -> None:
    notes = share(pin(rank))
    mesh = init_device_mesh("cpu", (settings.world,))
    unequal = "pi0's towers" if settings.model is None else Path(settings.model).name
    cases = {
        f"{unequal}, widths / {settings.scale}, the first {layers} layers of each": model_matrices(settings, layers)
        for layers in (settings.layers, MORE_LAYERS * settings.layers)
    }
    cases["equal layers"] = equal_layers()
    if rank == 0:
        print(f"{settings.world} ranks, 1 thread each; {'; '.join(notes)}; {settings.rounds} interleaved rounds")
    results = []
    for title, matrices in cases.items():
        results.append(measure(title, matrices, mesh, settings, rank))
        if rank == 0:
            print(f"\n{report(results[-1])}", flush=True)
    if rank == 0 and settings.json:
        write_json(settings.json, {"settings": asdict(settings), **origin(), "pinned": notes, "results": results})


def main(argv: list[str] | None = None) -> int:
    least = {**dict.fromkeys(("world", "scale", "layers", "rounds"), 1), "warmup": 0}
    parser, settings = parse(Settings, __doc__, argv, least=least)
    try:
        model_matrices(settings, settings.layers)
    except (OSError, ValueError) as error:
        parser.error(f"--model: {error}")
    run_ranks(settings.world, worker, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
