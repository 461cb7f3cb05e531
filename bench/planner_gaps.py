"""How far plans are from a proven bound, and common rules from the plans, over real models and world sizes.

For each model and number of ranks: the gap of the plan and of the solver-free plan, their seconds on one core, what
found the plan, and the makespans of LPT (on the cost of one matrix) and round robin as multiples of the plan's.

    python bench/planner_gaps.py --models DIR [--costs h200 | a cost cache] [--scale 8] [--out bench/results/NAME]

``--scale`` divides all sides of all matrices, so that a cache that was measured on a small machine covers real
proportions; ``--list-shapes`` prints what to measure. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common.results import write_report
from common.rules import baseline

from dmuon.model.config import read_model
from dmuon.planning.cost_cache import CostCache
from dmuon.solver import CostTable, Matrix, SolveOptions, plan
from dmuon.tools.simulation.hardware import HARDWARE
from dmuon.tools.simulation.wave_model import describe, wave_costs

RANKS = (2, 3, 8, 16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    ranks: int
    matrices: int
    makespan_ms: float
    gap: float
    stage: str
    seconds: float
    greedy_gap: float
    greedy_seconds: float
    lpt: float
    round_robin: float
    spread: float


def matrices_of(path: Path, scale: int) -> list[Matrix]:
    return [Matrix(m.name, -(-m.rows // scale), -(-m.cols // scale), m.block) for m in read_model(path)]


def solve(name: str, matrices: Sequence[Matrix], ranks: int, costs: CostTable) -> Case:
    start = time.perf_counter()
    greedy = plan(matrices, ranks, costs, SolveOptions(method="greedy"))
    middle = time.perf_counter()
    result = plan(matrices, ranks, costs)
    end = time.perf_counter()
    rules = {rule: baseline(rule, matrices, ranks, costs).makespan_ns for rule in ("lpt", "round-robin")}
    largest, least = (sum(part) for part in zip(*result.block_balance.values(), strict=True))
    return Case(
        name,
        ranks,
        len(matrices),
        result.makespan_ns / 1e6,
        result.gap,
        result.stage,
        end - middle,
        greedy.gap,
        middle - start,
        rules["lpt"] / result.makespan_ns,
        rules["round-robin"] / result.makespan_ns,
        largest / least,
    )


def table(cases: Sequence[Case], title: str) -> str:
    within, worst = sum(c.gap <= 0.01 for c in cases), max(c.gap for c in cases)
    seconds, greedy = max(c.seconds for c in cases), max(c.greedy_seconds for c in cases)
    lines = [
        f"# {title}",
        "",
        f"Gap to a proven bound at most 1 % in {within} of {len(cases)} cases, at most {worst:.2%} in all.",
        f"A plan takes at most {seconds:.1f} s on one core, without a solver {greedy:.2f} s.",
        "The search stops at a gap of 1 %; smaller gaps were proven by the first bound. LPT (by the cost of one",
        "matrix) and round robin are multiples of the plan's makespan. Spread is the sum over blocks of the largest",
        "owner's bytes over an even share.",
        "",
        "| model | ranks | makespan ms | gap | found by | s | gap without solver | s | LPT | round robin | spread |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for c in cases:
        cells = [c.model, str(c.ranks), f"{c.makespan_ms:.3f}", f"{c.gap:.2%}", c.stage, f"{c.seconds:.2f}"]
        cells += [f"{c.greedy_gap:.2%}", *(f"{x:.2f}" for x in (c.greedy_seconds, c.lpt, c.round_robin, c.spread))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of config.json files of any names")
    parser.add_argument("--costs", default="h200", help=f"wave model of {', '.join(HARDWARE)}, or a cost cache")
    parser.add_argument("--scale", type=int, default=1, help="divide all sides by this (default: 1)")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="comma-separated")
    parser.add_argument("--list-shapes", action="store_true", help="print the shapes and stop")
    parser.add_argument("--out", type=Path, help="without suffix")
    arguments = parser.parse_args(argv)
    models = {p.stem: matrices_of(p, arguments.scale) for p in sorted(arguments.models.glob("*.json"))}
    if not models:
        parser.error(f"--models {arguments.models}: no *.json there")
    counts = {name: Counter(m.shape for m in matrices) for name, matrices in models.items()}
    if arguments.list_shapes:
        print(",".join(f"{m}x{n}" for m, n in sorted(set().union(*counts.values()))))
        return 0
    cache = None if arguments.costs in HARDWARE else CostCache.load(arguments.costs)
    source = describe(HARDWARE[arguments.costs].device) if cache is None else f"measured on {cache.key.device}"
    title = f"Plans, costs {source}" + (f", all sides divided by {arguments.scale}" if arguments.scale > 1 else "")
    cases = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for name, matrices in models.items():
            device = None if cache is not None else HARDWARE[arguments.costs].device
            costs = wave_costs(device, counts[name]) if device is not None else cache.table(counts[name])  # type: ignore[union-attr]
            for ranks in map(int, arguments.ranks.split(",")):
                cases.append(solve(name, matrices, ranks, costs))
                print(table(cases[-1:], "").splitlines()[-1], flush=True)
    text = table(cases, title)
    print("\n" + "\n".join(text.splitlines()[:4]))
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            print(f"warning: {warning.message}")
    if arguments.out is not None:
        document = {"title": title, "date": time.strftime("%Y-%m-%d"), "cases": [asdict(c) for c in cases]}
        write_report(arguments.out, document, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
