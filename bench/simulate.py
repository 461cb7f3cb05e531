"""Predicted training steps: the error against the real runtime on CPU ranks, and scaling to 1024 GPUs.

python bench/simulate.py --validate
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
from common.programs import Sizes
from common.ranks import run_ranks
from common.results import write_json
from common.scaling import Grid, scaling
from common.validation import report, validate

from dmuon.tools.simulation.hardware import HARDWARE

_FIT = Path(__file__).parent / "results" / "simulation-fit.json"
_RESULT = Path(__file__).parent / "results" / "simulation-cpu-2ranks.json"


def worker(rank: int, sizes: Sizes, quantile: float, out: Path) -> None:
    result = validate(rank, sizes, quantile)
    if rank == 0:
        print(report(result), flush=True)
        write_json(out, result)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--validate", action="store_true", help="hold predictions against CPU ranks")
    mode.add_argument("--fit", action="store_true", help="fit the terms of a machine to published and real steps")
    mode.add_argument("--table", type=Path, nargs="+", metavar="MODEL.json", help="what is recommended at every size")
    parser.add_argument("--out", type=Path, help="JSON of --validate and --fit")
    parser.add_argument("--json", type=Path, help="of --table (default: bench/results/scaling-HARDWARE.json)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of --validate (default 15)")
    parser.add_argument("--quantile", type=float, default=0.5, help="of samples of --validate (default 0.5, medians)")
    for name in ("layers", "width", "context", "batch"):
        default = getattr(Sizes(), name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of --validate (default {default})")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h200", help="preset (default h200)")
    parser.add_argument("--efficiency", type=float, help="part of the peak that forward and backward reach")
    parser.add_argument("--tokens", type=int, default=8192, help="per rank and step (default 8192)")
    parser.add_argument("--sequence", type=int, default=4096, help="sequence length (default 4096)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    args = parser.parse_args(argv)
    for name in ("rounds", "layers", "width", "context", "batch"):
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
        else:
            settings = Grid(
                args.hardware, tuple(args.worlds), args.tokens, args.sequence, args.recompute, args.efficiency
            )
            write_json(
                args.json or _RESULT.with_name(f"scaling-{args.hardware}.json"),
                {"date": time.strftime("%Y-%m-%d"), **scaling(args.table, settings)},
            )
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
