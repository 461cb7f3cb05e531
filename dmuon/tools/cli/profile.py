"""``dmuon-profile``: time the Muon update of a model's matrices on this device, and write a cost cache."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dmuon.kernels import PRESETS
from dmuon.model.config import read_model
from dmuon.planning.cost_cache import CostCache, Entries, NsOptions, device_key, parse_shape, user_cache_path
from dmuon.planning.profiler import MAX_BATCH, build_kernels, measure, useful_batch_sizes
from dmuon.solver import Shape
from dmuon.tools.cli import BadArgument, Parser, count, removed, require_target, seconds

_DTYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_READ = "a cost cache is JSON with a timing for each shape and batch size, and to measure prints it as a table"
_REMOVED = {  # and what to write instead
    "--quack": "leave it out: an installed quack is tried wherever it can run",
    "--merge": "write one --out for all runs, which add to it",
    "--check": "measure again into another --out: whoever reads a cache refuses that of another device or version",
    "--show": _READ,
    "--png": _READ,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 after a message on stderr, with nothing written."""
    return _parser().run(argv, _measure)


def _parser() -> Parser:
    parser = Parser("dmuon-profile", __doc__ or "")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's config.json, or the folder of it: times all its matrices"
    )
    parser.add_argument("--shapes", default="", help="shapes to time, such as 1024x4096,4096x4096")
    device = "default: cuda where there is one; CUDA_VISIBLE_DEVICES says which of several"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=device)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="storage dtype (default: fp32 on cpu, else fp16)")
    parser.add_argument(
        "--coefficients", choices=PRESETS, default="polar_express", help="Newton–Schulz preset (default: polar_express)"
    )
    parser.add_argument("--steps", type=count, default=5, help="Newton–Schulz steps (default: 5)")
    parser.add_argument(
        "--max-batch",
        type=count,
        default=MAX_BATCH,
        help=f"largest number of matrices per batch (default and most: {MAX_BATCH})",
    )
    parser.add_argument("--budget", type=seconds, default=120.0, help="seconds to measure (default: 120)")
    parser.add_argument("--out", help="file to write or add to (default: the user's cache)")
    for name, instead in _REMOVED.items():
        parser.add_argument(name, nargs="?", const="", type=removed(instead), help=argparse.SUPPRESS)
    return parser


def _measure(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    options = NsOptions(arguments.coefficients, arguments.steps, _DTYPES.get(arguments.dtype))
    limit: int = arguments.max_batch
    if limit > MAX_BATCH:
        raise BadArgument(f"--max-batch: {limit} is more than {MAX_BATCH}; larger batches are run in parts")
    budget_s: float = arguments.budget
    key = device_key(device, options)
    path = Path(arguments.out) if arguments.out else user_cache_path(key)
    if arguments.out or path.exists():  # before minutes of measuring
        require_target("--out", path)
        if path.exists():
            CostCache.load(path).merge(CostCache(key, {}), f"cost cache {path}")
    work = {
        shape: useful_batch_sizes(shape, min(limit, count), device)
        for shape, count in _counts(arguments.model, arguments.shapes, limit).items()
    }
    build_kernels(work, device=device, options=options)
    print(f"timing on {key.device}, {budget_s:g} s at most", file=sys.stderr)
    entries = measure(work, device=device, options=options, budget_s=budget_s)
    if not entries:
        raise BadArgument(f"nothing fitted --budget {budget_s:g}; allow more seconds")
    CostCache(key, entries).save(path)
    print(_cost_table(entries, options, device))
    left_out = [f"{m}x{n}" for m, n in sorted(work) if 1 not in entries.get((m, n), {})]
    if left_out:
        print(f"not timed within --budget {budget_s:g}, planned by estimate: {', '.join(left_out)}")
    print(f"wrote {path}")
    return 0


def _cost_table(entries: Entries, options: NsOptions, device: torch.device) -> str:
    """One line per shape and batch size: times, rate at whole products, spread, samples, and how it ran."""
    head = f"{'shape':>14} {'batch':>6} {'ms':>11} {'ms each':>11} {'GFLOP/s':>10} {'spread':>7} {'samples':>8}"
    lines = [head]
    for (m, n), timings in sorted(entries.items()):
        flops = options.flops((m, n), device)
        for k, t in sorted(timings.items()):
            each, spread = t.median_ns / k / 1e6, (t.p90_ns - t.p10_ns) / t.median_ns
            lines.append(
                f"{f'{m}x{n}':>14} {k:>6} {t.median_ns / 1e6:>11.3f} {each:>11.3f} {k * flops / t.median_ns:>10.4g} "
                f"{spread:>6.1%} {t.n:>8}"
            )
    return "\n".join(lines)


def _counts(model: str | None, shapes: str, limit: int) -> Counter[Shape]:
    """Matrices per shape; of a shape that is named, ``limit``."""
    counts: Counter[Shape] = Counter()
    if model is not None:
        counts.update(matrix.shape for matrix in read_model(model))
    for text in filter(None, (part.strip() for part in shapes.split(","))):
        try:
            small, large = sorted(parse_shape(text))
        except ValueError as error:
            raise BadArgument(f"--shapes: {error}") from None
        counts[small, large] = limit
    if not counts:
        raise BadArgument("no matrices to time; pass a MODEL.json or --shapes 1024x4096,...")
    return counts


def _device(kind: str | None) -> torch.device:
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadArgument("--device cuda: no CUDA device is here; use --device cpu")
    return torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    sys.exit(main())
