"""Predicted training steps and products: the error against published ones, and scaling to 1024 GPUs.

python bench/simulate.py --fit
python bench/simulate.py --products
python bench/simulate.py --table config.json ... --json bench/results/scaling-h200.json
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from common.fit import fit
from common.fit import report as fit_report
from common.published import PRODUCTS
from common.results import write_json
from common.scaling import Grid, scaling

from dmuon.tools.simulation.hardware import HARDWARE, hardware
from dmuon.tools.simulation.step import EFFICIENCY
from dmuon.tools.simulation.wave_model import Product, product_s

_FIT = Path(__file__).parent / "results" / "simulation-fit.json"


def products() -> dict[str, Any]:
    """Published products beside those of the wave model, in microseconds, with the ratio of the predicted time."""
    rows = []
    print(f"{'':14}{'m':>6}{'k':>7}{'cuBLAS':>9}{'model':>8}{'ratio':>7}{'halves':>9}{'model':>8}{'ratio':>7}")
    for case in PRODUCTS:
        device = hardware(case.device).device
        found = [
            (product_s(device, Product(case.m, case.k, case.m, halves=halves), 1) + device.launch_s) * 1e6
            for halves in (False, True)
        ]
        rows.append({**asdict(case), "model_us": found})
        told = "".join(
            f"{published:9.1f}{model:8.1f}{model / published:7.2f}"
            for published, model in zip((case.whole_us, case.half_us), found, strict=True)
        )
        name = "PyTorch H100" if "pytorch" in case.source else f"flash {case.source.split()[-1]}"
        print(f"{name:14}{case.m:6}{case.k:7}{told}")
    ratios = {}
    for device in dict.fromkeys(case.device for case in PRODUCTS):
        large = [row for row in rows if row["device"] == device and row["m"] >= 4096]
        ratios[device] = [
            math.exp(fmean(math.log(row["model_us"][i] / row[key]) for row in large))
            for i, key in enumerate(("whole_us", "half_us"))
        ]
        print(
            f"{device}, 4096 and more, geometric mean: cuBLAS {ratios[device][0]:.2f}, halves {ratios[device][1]:.2f}"
        )
    return {"products": rows, "ratios": ratios}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--fit", action="store_true", help="fit the terms of a machine to published steps")
    mode.add_argument("--products", action="store_true", help="the model of products beside published times")
    mode.add_argument("--table", type=Path, nargs="+", metavar="MODEL.json", help="what is recommended at every size")
    parser.add_argument("--out", type=Path, help="JSON of --fit or --products")
    parser.add_argument("--json", type=Path, help="of --table (default: bench/results/scaling-HARDWARE.json)")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h200", help="preset (default h200)")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, help="part of the peak that is reached")
    parser.add_argument("--tokens", type=int, default=8192, help="per rank and step (default 8192)")
    parser.add_argument("--sequence", type=int, default=4096, help="sequence length (default 4096)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    args = parser.parse_args(argv)
    try:
        if args.fit:
            result = fit()
            print(fit_report(result), flush=True)
            write_json(args.out or _FIT, {"date": time.strftime("%Y-%m-%d"), **result})
        elif args.products:
            write_json(
                args.out or _FIT.with_name("products-published.json"), {"date": time.strftime("%Y-%m-%d"), **products()}
            )
        else:
            settings = Grid(
                args.hardware, tuple(args.worlds), args.tokens, args.sequence, args.recompute, args.efficiency
            )
            write_json(
                args.json or _FIT.with_name(f"scaling-{args.hardware}.json"),
                {"date": time.strftime("%Y-%m-%d"), **scaling(args.table, settings)},
            )
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
