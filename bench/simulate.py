"""Predicted training steps and products: the error against published ones, and scaling to 1024 GPUs.

python bench/simulate.py --fit        # the terms of a machine fitted to published steps, and every case
python bench/simulate.py --products   # published products beside those of the wave model
python bench/simulate.py --table config.json ... --json bench/results/scaling-h200.json
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common.fit import fit, planned, report
from common.harness import Record, run
from common.options import Options, option
from common.published import PRODUCTS
from common.results import columns

from dmuon.model.config import read_model
from dmuon.tools.cli.plan import OWN, Way, best, meshes, predict
from dmuon.tools.hardware import HARDWARE, Product, Topology, product_s
from dmuon.tools.simulation import EFFICIENCY, ERROR, Scenario, Workload


@dataclass(frozen=True, slots=True)
class Settings(Options):
    """``efficiency`` is the part of the peak that forward and backward reach, ``tokens`` are per rank and step."""

    fit: bool = False
    products: bool = False
    table: tuple[str, ...] = ()
    hardware: str = option("h200", choices=sorted(HARDWARE))
    efficiency: float = EFFICIENCY
    tokens: int = 8192
    sequence: int = 4096
    worlds: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)


def products() -> Record:
    """Published products beside those of the wave model, in microseconds, with the ratio of the predicted time."""
    rows = []
    for case in PRODUCTS:
        device = HARDWARE[case.device].device
        found = [
            (product_s(device, Product(case.m, case.k, case.m, halves=halves), 1) + device.launch_s) * 1e6
            for halves in (False, True)
        ]
        published = case.whole_us, case.half_us
        ratios = [model / us for model, us in zip(found, published, strict=True)]
        rows.append({**asdict(case), "model_us": found, "ratio_whole": ratios[0], "ratio_half": ratios[1]})
    means = {
        device: [
            math.exp(fmean(math.log(row[key]) for row in rows if row["device"] == device and row["m"] >= 4096))
            for key in ("ratio_whole", "ratio_half")
        ]
        for device in dict.fromkeys(case.device for case in PRODUCTS)
    }
    return {"products": rows, "ratios": means}


def scaling(settings: Settings) -> Record:
    """What is recommended for each model at each number of ranks, and its cost over the best AdamW's."""
    rows, machine = [], HARDWARE[settings.hardware]
    options = {"tokens": settings.tokens, "sequence": settings.sequence}
    for path in map(Path, settings.table):
        workload, matrices = Workload.from_config(path, **options), read_model(path)
        for world in settings.worlds:
            owners, costs = planned(matrices, machine, world)
            topology = Topology(world, machine.gpus_per_node)
            scenario = Scenario(workload, owners, costs, machine, topology, efficiency=settings.efficiency)
            ways = predict(scenario, meshes(topology))
            adamw, taken = best(ways, "adamw"), best(ways)
            rows.append(
                {
                    "model": path.stem,
                    "ranks": world,
                    "adamw_ms": 1e3 * adamw.step_s,
                    "adamw_fits": adamw.fits,
                    "overhead": taken.step_s / adamw.step_s - 1,
                    "verdict": taken.over(adamw) if taken.fits else "does not fit",
                    "mesh": _place(taken),
                    "residency": taken.program,
                    "code": "\n".join(taken.code()),
                    "ways": [_told(way) for way in ways if way.program in OWN],
                }
            )
    return {"error": ERROR, "rows": rows}


def _place(way: Way) -> str:
    """The mesh, and whether weights are kept."""
    return way.mesh + (", kept" if way.scenario.kept else "")


def _told(way: Way) -> dict[str, Any]:
    place = {"mesh": _place(way), "residency": way.program}
    return {**place, "step_ms": 1e3 * way.step_s, "gib": way.nbytes / 2**30, "fits": way.fits}


def measure(settings: Settings) -> Record:
    if settings.fit:
        return fit()
    if settings.products:
        return products()
    return scaling(settings)


def table(record: Record) -> str:
    if "cases" in record:
        return report(record)
    if "products" not in record:
        rows = {f"{row['model']} {row['ranks']}": row for row in record["rows"]}
        return columns(rows, {"adamw_ms": ".1f", "mesh": "", "residency": "", "verdict": ""}, "model, ranks")
    rows = {}
    for row in record["products"]:
        name = "PyTorch H100" if "pytorch" in row["source"] else f"flash {row['source'].split()[-1]}"
        rows[f"{name}, {row['m']} x {row['k']}"] = row
    shown = {"whole_us": ".1f", "ratio_whole": ".2f", "half_us": ".1f", "ratio_half": ".2f"}
    means = (
        f"{device}, 4096 and more, geometric mean: cuBLAS {whole:.2f}, halves {half:.2f}"
        for device, (whole, half) in record["ratios"].items()
    )
    return "\n".join([columns(rows, shown, "published us, and predicted over published"), "", *means])


def fault(settings: Settings) -> str:
    modes = settings.fit + settings.products + bool(settings.table)
    if not 0 < settings.efficiency <= 1:
        return f"--efficiency {settings.efficiency}: give the part of the peak, above 0 and at most 1"
    return "" if modes == 1 else "give one of --fit, --products and --table MODEL.json ..."


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, measure, table, fault=fault))
