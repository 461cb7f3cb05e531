"""``dmuon-plan``: what would the owners of a model be, and how long would the slowest take?"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from dmuon.model_config import read_model
from dmuon.solver import CostTable, Matrix, Method, Plan, Shape, SolveOptions, plan

__all__ = ["main"]

_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan for a model's ``config.json`` at a world size; the exit status is 2 for input that is not valid."""
    args = _parser().parse_args(argv)
    try:
        matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read_model(args.model)]
        options = SolveOptions(method=args.method, time_limit_s=args.time_limit)
        costs = _costs(args.costs, {m.shape for m in matrices})
        result = plan(matrices, args.world, costs, options)
    except (OSError, ValueError) as error:
        print(f"dmuon-plan: {error}", file=sys.stderr)
        return _BAD_INPUT
    print(result.report())
    if args.compare:
        print()
        print(_compare(matrices, args.world, costs, options))
    if args.json is not None:
        try:
            _write_json(args.json, result)
        except OSError as error:
            print(f"dmuon-plan: --json {args.json}: {error}; name a file in a folder you can write", file=sys.stderr)
            return _BAD_INPUT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dmuon-plan", description="Assign a model's matrices to owner ranks.")
    parser.add_argument("model", type=Path, metavar="MODEL.json", help="a model's config.json")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--costs", default="flops", metavar="flops|PATH", help="estimate from FLOPs, or a cost cache (default: flops)"
    )
    parser.add_argument("--method", choices=get_args(Method), default="auto", help="how to solve (default: auto)")
    parser.add_argument(
        "--time-limit", type=float, default=10.0, metavar="S", help="seconds for the MILP (default: 10)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the plan here as well")
    parser.add_argument("--compare", action="store_true", help="show what each method reaches, and in what time")
    return parser


def _costs(source: str, shapes: set[Shape]) -> CostTable:
    if source == "flops":
        return CostTable.from_flops(shapes)
    from dmuon.cost_cache import CostCache

    return CostCache.load(source).table(sorted(shapes))


def _compare(matrices: Sequence[Matrix], world: int, costs: CostTable, options: SolveOptions) -> str:
    """A row per method: makespan, gap, stage, seconds."""
    lines = [f"{'method':<8} {'makespan':>14} {'gap':>8} {'seconds':>8}  stage"]
    for method in get_args(Method):
        began = time.perf_counter()
        result = plan(matrices, world, costs, replace(options, method=method))
        took = time.perf_counter() - began
        lines.append(
            f"{method:<8} {result.makespan_ns / 1e6:>11.3f} ms {result.gap:>8.2%} {took:>8.2f}  {result.stage}"
        )
    return "\n".join(lines)


def _write_json(path: Path, result: Plan) -> None:
    """Write beside ``path``, then rename, so that a reader never sees half a plan."""
    content: dict[str, Any] = result.to_json()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


if __name__ == "__main__":
    raise SystemExit(main())
