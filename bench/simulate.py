"""Predicted training steps: the error against published ones, and scaling to 1024 GPUs.

python bench/simulate.py --fit
python bench/simulate.py --table config.json ... --json bench/results/scaling-h200.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from common.fit import fit
from common.fit import report as fit_report
from common.results import write_json
from common.scaling import Grid, scaling

from dmuon.tools.simulation.hardware import HARDWARE
from dmuon.tools.simulation.step import EFFICIENCY

_FIT = Path(__file__).parent / "results" / "simulation-fit.json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--fit", action="store_true", help="fit the terms of a machine to published steps")
    mode.add_argument("--table", type=Path, nargs="+", metavar="MODEL.json", help="what is recommended at every size")
    parser.add_argument("--out", type=Path, help="JSON of --fit")
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
