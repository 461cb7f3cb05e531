"""How far plans are from a proven bound, and common rules from the plans, over real models and world sizes.

For each model and number of ranks: the gap of the plan, its seconds on one core, what found it, and the makespans of
LPT (on the cost of one matrix) and round robin as multiples of the plan's. The search stops at a gap of 1 %; smaller
gaps were proven by the first bound.

    python bench/planner_gaps.py [--models DIR] [--costs h200]
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common.ablation import baseline
from common.harness import Record, run
from common.options import Options, option
from common.results import columns

from dmuon.model.config import read_model
from dmuon.solver import CostTable, Matrix, plan
from dmuon.tools.hardware import HARDWARE, wave_costs

COLUMNS = {"matrices": "d", "makespan_ms": ".3f", "gap": ".2%", "stage": "", "seconds": ".2f"}
COLUMNS |= {"lpt": ".2f", "round_robin": ".2f"}


@dataclass(frozen=True, slots=True)
class Settings(Options):
    models: str = "examples/models"
    costs: str = option("h200", choices=sorted(HARDWARE))
    ranks: tuple[int, ...] = (2, 3, 8, 16, 64, 256, 1024)


def models_of(settings: Settings) -> dict[str, list[Matrix]]:
    paths = sorted(Path(settings.models).glob("*.json"))
    return {path.stem: read_model(path) for path in paths}


def solve(matrices: Sequence[Matrix], ranks: int, costs: CostTable) -> Record:
    start = time.perf_counter()
    result = plan(matrices, ranks, costs)
    took = time.perf_counter() - start
    rules = {rule: baseline(rule, matrices, ranks, costs).makespan_ns for rule in ("lpt", "round-robin")}
    return {
        "matrices": len(matrices),
        "makespan_ms": result.makespan_ns / 1e6,
        "gap": result.gap,
        "stage": result.stage,
        "seconds": took,
        "lpt": rules["lpt"] / result.makespan_ns,
        "round_robin": rules["round-robin"] / result.makespan_ns,
    }


def measure(settings: Settings) -> Record:
    device, cases = HARDWARE[settings.costs].device, {}
    for name, matrices in models_of(settings).items():
        counts = Counter(m.shape for m in matrices)
        costs = wave_costs(device, counts)
        for ranks in settings.ranks:
            cases[f"{name} {ranks}"] = solve(matrices, ranks, costs)
    gaps = [case["gap"] for case in cases.values()]
    return {
        "cost_source": f"estimated: wave model of {device.name}",
        "count": len(gaps),
        "within": sum(gap <= 0.01 for gap in gaps),
        "largest_gap": max(gaps),
        "most_seconds": max(case["seconds"] for case in cases.values()),
        "cases": cases,
    }


def table(record: Record) -> str:
    return (
        f"Costs {record['cost_source']}. Gap to a proven bound at most 1 % in {record['within']} of {record['count']} "
        f"cases, at most {record['largest_gap']:.2%} in all, in at most {record['most_seconds']:.1f} s.\n\n"
        + columns(record["cases"], COLUMNS, "model, ranks")
    )


def fault(settings: Settings) -> str:
    return "" if models_of(settings) else f"--models {settings.models}: no *.json there"


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, measure, table, fault=fault))
