"""``dmuon-plan``: what would the owners of a model be, and how long would the slowest take?"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from dmuon.model_config import read_model
from dmuon.solver import CostTable, Matrix, Method, Plan, Shape, SolveOptions, baselines, plan

__all__ = ["main"]

_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan for a model's ``config.json`` at a world size; the exit status of invalid input is 2."""
    args = _parser().parse_args(argv)
    try:
        matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read_model(args.model)]
        costs = _costs(args.costs, {m.shape for m in matrices})
        result = plan(matrices, args.world, costs, SolveOptions(method=args.method, time_limit_s=args.time_limit))
        if args.json is not None:
            _write_json(args.json, result)
    except (OSError, ValueError) as error:
        print(f"dmuon-plan: {error}", file=sys.stderr)
        return _BAD_INPUT
    print(result.report())
    if args.compare:
        print("\n" + _compare(result, baselines(matrices, args.world, costs)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dmuon-plan", description="Assign a model's matrices to owner ranks.")
    parser.add_argument("model", type=Path, metavar="MODEL.json", help="a model's config.json")
    parser.add_argument("--world", type=_ranks, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--costs", default="flops", metavar="flops|PATH", help="estimate from FLOPs, or a cost cache (default: flops)"
    )
    parser.add_argument("--method", choices=get_args(Method), default="auto", help="how to solve (default: auto)")
    parser.add_argument(
        "--time-limit", type=_seconds, default=10.0, metavar="S", help="seconds for the MILP (default: 10)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the plan here as well")
    parser.add_argument("--compare", action="store_true", help="show what round robin and LPT would take instead")
    return parser


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give an integer of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time limit; give a positive number of seconds")
    return value


def _costs(source: str, shapes: set[Shape]) -> CostTable:
    if source == "flops":
        return CostTable.from_flops(shapes)
    from dmuon.cost_cache import CostCache

    return CostCache.load(source).table(sorted(shapes))


def _compare(result: Plan, others: Mapping[str, int]) -> str:
    """A row per way to assign: its makespan, and how many times the plan's that is."""
    rows = {**others, "this plan": result.makespan_ns, "lower bound": result.bound_ns}
    return "\n".join(
        f"{name:<12} {ns / 1e6:>12.3f} ms {ns / result.makespan_ns:>8.2f} times this plan" for name, ns in rows.items()
    )


def _write_json(path: Path, result: Plan) -> None:
    """Write beside ``path``, then rename, so that a reader never sees half a plan."""
    if not path.parent.is_dir():
        raise ValueError(f"--json {path}: there is no folder {path.parent}; create it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(result.to_json(), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
