"""Simulated training steps: the error against the real runtime on CPU ranks, and scaling to 1024 GPUs.

python bench/simulate.py --validate
python bench/simulate.py --fit
python bench/simulate.py --table config.json ... --json bench/results/scaling-h200.json
python bench/simulate.py --scaling config.json --hardware h200 --out docs/scaling-llama-3-8b.png
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from common.fit import fit
from common.fit import report as fit_report
from common.programs import Sizes
from common.ranks import run_ranks
from common.results import write_json
from common.scaling import Grid, scaling
from common.validation import report, validate

from dmuon.model.config import read_model
from dmuon.planning.cost_cache import CostCache
from dmuon.simulation.engine import Noise
from dmuon.simulation.hardware import HARDWARE, Hardware
from dmuon.simulation.network import Topology
from dmuon.simulation.plot import draw_scaling, draw_timeline
from dmuon.simulation.programs import PROGRAMS, simulate
from dmuon.simulation.scenario import Machine, Scenario
from dmuon.simulation.wave_model import wave_costs
from dmuon.simulation.workload import Workload
from dmuon.solver import CostTable, Matrix, Shape, SolveOptions, plan

_FIT = Path(__file__).parent / "results" / "simulation-fit.json"
_RESULT = Path(__file__).parent / "results" / "simulation-cpu-2ranks.json"


@dataclass(frozen=True, slots=True)
class Point:
    """Milliseconds per step of each program in one grid: undisturbed, with noise, with a straggler besides."""

    ranks: int
    replicate: int
    alone: dict[str, float]
    noisy: dict[str, float]
    straggling: dict[str, float]


def worker(rank: int, sizes: Sizes, quantile: float, out: Path) -> None:
    result = validate(rank, sizes, quantile)
    if rank == 0:
        print(report(result), flush=True)
        write_json(out, result)


def scenarios(args: argparse.Namespace, hardware: Hardware) -> list[Scenario]:
    """Per world size one flat grid and, beyond one node, one with a replica per node."""
    workload = Workload.from_config(args.scaling, tokens=args.tokens, sequence=args.sequence, recompute=args.recompute)
    matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read_model(args.scaling)]
    costs = _costs(args.costs, Counter(m.shape for m in matrices), hardware)
    machine = Machine.of(hardware, args.efficiency)
    result = []
    for world in args.worlds:
        owners = plan(matrices, world, costs, SolveOptions(method="greedy"))
        for replicate in sorted({1, max(1, world // hardware.gpus_per_node)}):
            topology = Topology(world, hardware.gpus_per_node, replicate)
            result.append(Scenario(workload, owners, costs, machine, topology))
    return result


def point(scenario: Scenario, args: argparse.Namespace) -> Point:
    world = scenario.topology.world
    slow = {world // 2: args.straggler}

    def under(*noises: Noise | None) -> dict[str, float]:
        steps = {name: [simulate(name, scenario, noise, steps=4).step_s for noise in noises] for name in PROGRAMS}
        return {name: 1e3 * float(np.mean(seconds)) for name, seconds in steps.items()}

    noisy = under(*(Noise(args.noise, seed=seed) for seed in range(args.seeds)))
    straggling = under(*(Noise(args.noise, slow, seed) for seed in range(args.seeds)))
    return Point(world, scenario.topology.replicate, under(None), noisy, straggling)


def scaling_table(points: list[Point], args: argparse.Namespace) -> str:
    lines = [
        f"ms per step; noise {args.noise:.0%} per operation, mean of {args.seeds} seeds; "
        f"straggler: one rank {args.straggler:g} times as slow, with noise; vs AdamW: overhead of dedicated",
        f"{'ranks':>6}{'grid':>10}" + "".join(f"{name:>16}" for name in PROGRAMS)
        + f"{'vs AdamW':>10}{'noise':>8}{'straggler':>11}{'vs gather':>11}",
    ]  # fmt: skip
    for p in points:
        over = [times["dedicated"] / times["adamw"] - 1 for times in (p.alone, p.noisy, p.straggling)]
        lines.append(
            f"{p.ranks:>6}{f'{p.replicate} × {p.ranks // p.replicate}':>10}"
            + "".join(f"{p.alone[name]:>16.1f}" for name in PROGRAMS)
            + f"{over[0]:>+10.1%}{over[1]:>+8.1%}{over[2]:>+11.1%}{p.alone['gather'] / p.alone['dedicated']:>10.2f}×"
        )
    return "\n".join(lines)


def run_scaling(args: argparse.Namespace) -> None:
    hardware = HARDWARE[args.hardware]
    cases = scenarios(args, hardware)
    points = [point(scenario, args) for scenario in cases]
    print(f"{args.scaling.stem} on {hardware.device.name}, {args.tokens:,} tokens per rank (replicate × shard)")
    print(scaling_table(points, args), flush=True)
    title = f"{args.scaling.stem}, {hardware.device.name}, {args.tokens:,} tokens per rank"
    curves: dict[str, dict[int, float]] = {}
    for p in points:
        grids = [""] if p.replicate == 1 else []
        if p.replicate > 1 or p.ranks <= hardware.gpus_per_node:
            grids.append(", one replica per node")
        for name in ("dedicated", "adamw", "gather"):
            for grid in grids:
                curves.setdefault(name + grid, {})[p.ranks] = p.alone[name] / 1e3
    worlds = sorted({p.ranks for p in points})
    draw_scaling(worlds, {n: [c[w] for w in worlds] for n, c in curves.items()}, args.out, title=title)
    timeline = args.out.with_name(f"{args.out.stem}-timeline{args.out.suffix}")
    flat = [c for c in cases if c.topology.replicate == 1]
    case = next((c for c in reversed(flat) if c.topology.world <= args.timeline), flat[0])
    noise = Noise(args.noise, {case.topology.world // 2: args.straggler})
    draw_timeline(
        simulate("dedicated", case, noise), timeline, title=f"dedicated: {title}, {case.topology.world} ranks"
    )
    write_json(
        _RESULT.with_name(f"{args.out.stem}.json"),
        {
            "model": args.scaling.stem,
            "hardware": args.hardware,
            "settings": {k: v for k, v in vars(args).items() if isinstance(v, (int, float, list)) and k != "validate"},
            "costs": args.costs,
            "date": time.strftime("%Y-%m-%d"),
            "numpy": np.__version__,
            "points_ms": [asdict(p) for p in points],
        },
    )


def _costs(source: str, counts: Mapping[Shape, int], hardware: Hardware) -> CostTable:
    return wave_costs(hardware.device, counts) if source == "wave" else CostCache.load(source).table(counts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--validate", action="store_true", help="hold the simulation against CPU ranks")
    mode.add_argument("--fit", action="store_true", help="fit dmuon/simulation/terms.py to published and real steps")
    mode.add_argument("--table", type=Path, nargs="+", metavar="MODEL.json", help="what is recommended at every size")
    mode.add_argument("--scaling", type=Path, metavar="MODEL.json", help="predict 8 … 1024 ranks for a config.json")
    parser.add_argument("--out", type=Path, help="JSON of --validate; PNG of --scaling, its JSON goes to bench/results")
    parser.add_argument("--json", type=Path, help="of --table (default: bench/results/scaling-HARDWARE.json)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of --validate (default 15)")
    parser.add_argument("--quantile", type=float, default=0.5, help="of samples of --validate (default 0.5, medians)")
    for name in ("layers", "width", "context", "batch"):
        default = getattr(Sizes(), name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of --validate (default {default})")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h200", help="preset (default h200)")
    parser.add_argument("--costs", default="wave", metavar="wave|PATH", help="the wave model, or a cost cache")
    parser.add_argument("--efficiency", type=float, help="part of the peak that forward and backward reach")
    parser.add_argument("--tokens", type=int, default=8192, help="per rank and step (default 8192)")
    parser.add_argument("--sequence", type=int, default=4096, help="sequence length (default 4096)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--noise", type=float, default=0.03, help="sigma of log duration (default 0.03)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the noise (default 3)")
    parser.add_argument("--straggler", type=float, default=1.1, help="how many times as slow one rank is (default 1.1)")
    parser.add_argument("--timeline", type=int, default=64, help="ranks of the timeline, at most (default 64)")
    args = parser.parse_args(argv)
    for name in ("rounds", "layers", "width", "context", "batch", "seeds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if not 0 <= args.quantile <= 1:
        parser.error("--quantile must be from 0 to 1")
    try:
        if args.validate:
            sizes = {name: getattr(args, name) for name in ("layers", "width", "context", "batch", "rounds")}
            settings = Sizes(**sizes, warmup=1)
            run_ranks(settings.world, worker, settings, args.quantile, args.out or _RESULT)
        elif args.fit:
            result = fit()
            print(fit_report(result), flush=True)
            write_json(args.out or _FIT, {"date": time.strftime("%Y-%m-%d"), **result})
        elif args.table:
            settings = Grid(
                args.hardware, tuple(args.worlds), args.tokens, args.sequence, args.recompute, args.efficiency
            )
            write_json(
                args.json or _RESULT.with_name(f"scaling-{args.hardware}.json"),
                {"date": time.strftime("%Y-%m-%d"), **scaling(args.table, settings)},
            )
        else:
            args.out = args.out or Path(f"scaling-{args.scaling.stem}-{args.hardware}.png")
            run_scaling(args)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
