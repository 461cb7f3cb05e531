"""``dmuon-profile``: time the Muon update of a model's matrices on this device, and write a cost cache."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from dmuon.cost_cache import CostCache, Shape, Timing, user_cache_path
from dmuon.kernels import PRESETS
from dmuon.model_config import read_model
from dmuon.profiler import NsOptions, device_key, measure, useful_batch_sizes

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _Bad(Exception):
    """Names the argument and the remedy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 after a message on stderr, with nothing written."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (_Bad, ValueError, OSError) as error:
        print(f"dmuon-profile: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dmuon-profile", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL.json", help="a model's config.json: times all its matrices")
    parser.add_argument("--shapes", default="", help="shapes to time, such as 1024x4096,4096x4096")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="storage dtype (default: fp32 on cpu, else fp16)")
    parser.add_argument("--coefficients", choices=PRESETS, default="polar_express", help="Newton–Schulz preset")
    parser.add_argument("--steps", default="5", help="Newton–Schulz steps (default: 5)")
    parser.add_argument("--max-batch", default="16", help="largest number of matrices per batch (default: 16)")
    parser.add_argument("--budget", default="120", help="seconds to measure at most (default: 120)")
    parser.add_argument("--out", help="file to write or add to (default: the user's cache)")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    options = NsOptions(arguments.coefficients, _positive_int(arguments.steps, "--steps"), _DTYPES.get(arguments.dtype))
    limit = _positive_int(arguments.max_batch, "--max-batch")
    budget_s = _positive_seconds(arguments.budget)
    key = device_key(device, options)
    path = Path(arguments.out) if arguments.out else user_cache_path(key)
    if path.exists():  # before minutes of measuring
        CostCache.load(path).merge(CostCache(key, {}), f"cost cache {path}")
    elif arguments.out and not path.parent.is_dir():
        raise _Bad(f"--out {path}: no such folder {path.parent}; create it")
    counts = _counts(arguments.model, arguments.shapes)
    work = {shape: useful_batch_sizes(shape, limit, device) for shape in counts}
    with tqdm(total=sum(map(len, work.values())), desc=f"timing on {key.device}", unit="batch") as bar:

        def progress(shape: Shape, k: int) -> None:
            bar.set_postfix_str(f"{shape[0]}x{shape[1]} x{k}", refresh=False)
            bar.update()

        entries = measure(work, device=device, options=options, budget_s=budget_s, progress=progress)
    left_out = [f"{m}x{n}" for m, n in sorted(work) if 1 not in entries.get((m, n), {})]
    if not entries:
        raise _Bad(f"nothing fitted --budget {arguments.budget}; allow more seconds")
    CostCache(key, entries).save(path)
    print(_report(entries))
    if left_out:
        print(f"not timed within --budget {arguments.budget}, planned by estimate: {', '.join(left_out)}")
    print(f"wrote {path}")
    return 0


def _counts(model: str | None, shapes: str) -> Counter[Shape]:
    counts: Counter[Shape] = Counter()
    if model is not None:
        counts.update((min(m.rows, m.cols), max(m.rows, m.cols)) for m in read_model(model))
    for text in filter(None, (part.strip() for part in shapes.split(","))):
        match = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text)
        if not match:
            raise _Bad(f"--shapes: {text!r} is not like 1024x4096")
        small, large = sorted((int(match[1]), int(match[2])))
        counts[small, large] += 1
    if not counts:
        raise _Bad("no matrices to time; pass a MODEL.json or --shapes 1024x4096,...")
    return counts


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _Bad(f"--device: {name!r} is no device; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise _Bad(f"--device: {name!r} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise _Bad(f"--device: {name!r} is not there, {torch.cuda.device_count()} CUDA devices are; use --device cpu")
    return device


def _positive_int(text: str, name: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise _Bad(f"{name}: {text!r} is no positive integer")
    return int(text)


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _Bad(f"--budget: {text!r} is no positive number of seconds")
    return seconds


def _report(entries: dict[Shape, dict[int, Timing]]) -> str:
    lines = [f"{'shape':>14} {'batch':>6} {'ms':>11} {'ms each':>11} {'spread':>7} {'samples':>8}"]
    for (m, n), timings in sorted(entries.items()):
        for k, t in timings.items():
            each, spread = t.median_ns / k / 1e6, (t.p90_ns - t.p10_ns) / t.median_ns
            lines.append(f"{f'{m}x{n}':>14} {k:>6} {t.median_ns / 1e6:>11.3f} {each:>11.3f} {spread:>6.1%} {t.n:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
