"""``dmuon-profile``: time the Muon update of a model's matrices on this device, and write, merge, check or show caches.

Without --merge, --check or --show it measures, and writes a cost cache.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dmuon.cli.figures import cost_table, draw_costs
from dmuon.kernels import PRESETS
from dmuon.model.config import read_model
from dmuon.planning.cost_cache import (
    CacheKey,
    CostCache,
    Entries,
    user_cache_directory,
    user_cache_files,
    user_cache_path,
)
from dmuon.planning.device_key import NsOptions, device_key, options_of
from dmuon.planning.profiler import MAX_BATCH, measure, settled, timing_bar, useful_batch_sizes
from dmuon.platform.files import write_bytes
from dmuon.solver import Shape

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_DISAGREES, _BAD_INPUT = 1, 2
_SAMPLE = 5  # entries that --check times again
_TOLERANCE = 1.5  # clocks and neighbours on the machine stay below this; another device or kernel rarely does
_RUN = ("dtype", "coefficients", "steps")
# Which arguments each mode reads: any other is refused rather than ignored.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "measure": ("model", "shapes", "device", *_RUN, "max_batch", "budget", "out"),
    "merge": ("merge", "out"),
    "check": ("check", "device", *_RUN, "budget"),
    "show": ("show", "device", *_RUN, "png"),
}


class _Bad(Exception):
    """Names the argument and the remedy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 where --check finds no agreement, or 2 after a message on stderr, with nothing written."""
    arguments = _parser().parse_args(argv)
    try:
        mode = _mode(arguments)
        if mode == "merge":
            return _merge(arguments)
        if mode == "check":
            return _check(arguments)
        if mode == "show":
            return _show(arguments)
        return _measure(arguments)
    except (_Bad, ValueError, OSError) as error:
        print(f"dmuon-profile: {error}", file=sys.stderr)
        return _BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dmuon-profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's config.json, or the folder of it: times all its matrices"
    )
    parser.add_argument("--shapes", help="shapes to time, such as 1024x4096,4096x4096")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="storage dtype (default: fp32 on cpu, else fp16)")
    parser.add_argument("--coefficients", choices=PRESETS, help="Newton–Schulz preset (default: polar_express)")
    parser.add_argument("--steps", help="Newton–Schulz steps (default: 5)")
    parser.add_argument("--max-batch", help=f"largest number of matrices per batch (default and most: {MAX_BATCH})")
    parser.add_argument("--budget", help="seconds to measure at most (default: 120, with --check 20)")
    parser.add_argument("--out", help="file to write or add to (default: the user's cache)")
    parser.add_argument(
        "--merge", nargs="+", metavar="CACHE", help="add caches of one key to --out; of equal entries the last wins"
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="CACHE",
        help="is this cache (default: the user's) valid on this device, and do up to "
        f"{_SAMPLE} entries, timed again, agree within a factor of {_TOLERANCE}? exit status 0 or 1",
    )
    parser.add_argument("--show", nargs="?", const="", metavar="CACHE", help="print a cache (default: the user's)")
    parser.add_argument("--png", help="with --show: plot to write, time over batch size (needs matplotlib)")
    return parser


def _mode(arguments: argparse.Namespace) -> str:
    """The mode; refuses arguments that it would not read."""
    given = [name for name, value in vars(arguments).items() if value is not None]
    modes = [name for name in _ARGUMENTS if name in given]
    if len(modes) > 1:
        raise _Bad(f"{_flag(modes[0])} and {_flag(modes[1])} exclude each other; run them one after the other")
    mode = modes[0] if modes else "measure"
    for name in given:
        if name not in _ARGUMENTS[mode]:
            where = f"does not go with --{mode}" if modes else "goes with --show only"
            raise _Bad(f"{_flag(name)} {where}; leave it out")
    if mode in ("check", "show") and getattr(arguments, mode):
        settled = [name for name in (*_RUN, *(["device"] if mode == "show" else [])) if name in given]
        if settled:
            raise _Bad(f"{_flag(settled[0])}: {getattr(arguments, mode)} says so itself; leave it out")
    return mode


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _measure(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    options = _options(arguments)
    limit = _positive_int(arguments.max_batch or str(MAX_BATCH), "--max-batch")
    if limit > MAX_BATCH:
        raise _Bad(f"--max-batch: {limit} is more than {MAX_BATCH}; larger batches are run in parts")
    budget_s = _positive_seconds(arguments.budget, 120.0)
    key = device_key(device, options)
    path = Path(arguments.out) if arguments.out else user_cache_path(key)
    if arguments.out or path.exists():  # before minutes of measuring
        _check_target("--out", path)
        _extended(path, CostCache(key, {}))
    work = {
        shape: useful_batch_sizes(shape, min(limit, count), device)
        for shape, count in _counts(arguments.model, arguments.shapes or "", limit).items()
    }
    with timing_bar(work, key.device) as progress:
        entries = measure(work, device=device, options=options, budget_s=budget_s, progress=progress)
    if not entries:
        raise _Bad(f"nothing fitted --budget {budget_s:g}; allow more seconds")
    CostCache(key, entries).save(path)
    print(cost_table(entries, options, device))
    left_out = [f"{m}x{n}" for m, n in sorted(work) if 1 not in entries.get((m, n), {})]
    if left_out:
        print(f"not timed within --budget {budget_s:g}, planned by estimate: {', '.join(left_out)}")
    larger = sum(k not in entries[shape] for shape, sizes in work.items() if shape in entries for k in sizes)
    if larger:
        print(f"not timed within --budget {budget_s:g} or the device's memory: {larger} larger batches")
    unsettled = sum(not settled(t) for timings in entries.values() for t in timings.values())
    if unsettled:
        print(
            f"{unsettled} of {sum(map(len, entries.values()))} timings spread by 3% or more; on an idle device fewer do"
        )
    print(f"wrote {path}")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    if not arguments.out:
        raise _Bad("--merge needs --out FILE, to say where the merged cache goes")
    out = Path(arguments.out)
    _check_target("--out", out)
    first, *rest = arguments.merge
    merged = CostCache.load(first)
    for path in rest:
        cache = CostCache.load(path)
        for field, (here, there) in cache.key.differences(merged.key).items():
            raise _Bad(
                f"cost cache {path}: key field {field!r} is {here!r}, but {there!r} in {first}; merge caches of one "
                "device, setting and version"
            )
        merged = merged.merge(cache)
    total = _extended(out, merged)
    merged.save(out)
    shapes, batches = len(total.entries), sum(map(len, total.entries.values()))
    print(f"wrote {out}: {batches} timings of {shapes} shapes")
    return 0


def _extended(path: Path, cache: CostCache) -> CostCache:
    """What saving ``cache`` at ``path`` will leave there; raises as saving would, before anything is written."""
    total = CostCache.load(path).merge(cache, f"cost cache {path}") if path.exists() else cache
    return CostCache.parse(total.to_json().encode(), str(path))


def _check(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    budget_s = _positive_seconds(arguments.budget, 20.0)
    path = _cache_path(arguments.check, arguments, device)
    cache = CostCache.load(path)
    if not cache.entries:
        raise _Bad(f"cost cache {path}: holds no timings to check; measure some with dmuon-profile --shapes")
    options = options_of(cache.key, path)
    here = device_key(device, options)
    match = cache.matches(here)
    differences = cache.key.differences(here) if match == "compatible" else cache.key.strict.differences(here.strict)
    changes = ", ".join(f"{field} {theirs!r}, here {ours!r}" for field, (theirs, ours) in differences.items())
    if match == "no":
        print(f"{path}: not valid on {device}: {changes}; choose another --device, or measure with dmuon-profile")
        return _DISAGREES
    print(f"{path}: valid on {device}, {'exactly' if match == 'exact' else f'measured with other versions: {changes}'}")
    work = _sample(cache.entries)
    with timing_bar(work, here.device) as progress:
        again = measure(work, device=device, options=options, budget_s=budget_s, progress=progress)
    if not again:
        raise _Bad(f"nothing fitted --budget {budget_s:g}; allow more seconds")
    print(f"{'shape':>14} {'batch':>6} {'recorded ms':>12} {'now ms':>12} {'ratio':>7}")
    agree = True
    for shape, sizes in sorted(work.items()):
        for k in sizes:
            name, recorded = f"{shape[0]}x{shape[1]}", cache.entries[shape][k].median_ns
            timing = again.get(shape, {}).get(k)
            if timing is None:
                print(f"{name:>14} {k:>6} {recorded / 1e6:>12.3f} {'not timed within --budget or memory':>20}")
                continue
            ratio = timing.median_ns / recorded
            agree = agree and 1 / _TOLERANCE <= ratio <= _TOLERANCE
            print(f"{name:>14} {k:>6} {recorded / 1e6:>12.3f} {timing.median_ns / 1e6:>12.3f} {ratio:>7.2f}")
    verdict = "agrees" if agree else "does not agree; measure anew with dmuon-profile, on an idle device"
    print(f"{verdict} (ratios from 1/{_TOLERANCE} to {_TOLERANCE} agree)")
    return 0 if agree else _DISAGREES


def _sample(entries: Entries) -> dict[Shape, list[int]]:
    """Some timings from the least work to the most, evenly."""
    items = sorted((k * m * m * n, (m, n), k) for (m, n), timings in entries.items() for k in timings)
    work: dict[Shape, list[int]] = {}
    for index in sorted({round(i * (len(items) - 1) / (_SAMPLE - 1)) for i in range(_SAMPLE)}):
        _, shape, k = items[index]
        work.setdefault(shape, []).append(k)
    return work


def _show(arguments: argparse.Namespace) -> int:
    png = None if arguments.png is None else Path(arguments.png)
    if png is not None:
        _check_target("--png", png)
        if png.suffix.lower() != ".png":
            raise _Bad(f"--png {png}: what is written is a PNG; let the name end in .png")
    path = _cache_path(arguments.show, arguments, None)
    cache = CostCache.load(path)
    options = options_of(cache.key, path)
    image = None if png is None else draw_costs(cache, options)
    key = cache.key
    versions = ", ".join(f"{name} {value}" for name in ("torch", "cuda", "driver") if (value := getattr(key, name)))
    print(f"{path}\n{key.device}, {key.dtype}, {key.coefficients}, {key.steps} steps; {versions}")
    print(cost_table(cache.entries, options, torch.device("cpu")))
    if png is not None and image is not None:
        write_bytes(png, image)
        print(f"wrote {png}")
    return 0


def _cache_path(given: str, arguments: argparse.Namespace, device: torch.device | None) -> str:
    """The cache that is named, else the user's for the device and the run that the arguments name."""
    if given:
        return given
    key: CacheKey = device_key(device or _device(arguments.device), _options(arguments))
    files = user_cache_files(key)
    if not files:
        raise _Bad(
            f"no cache for {key.device}, {key.dtype}, {key.coefficients}, {key.steps} steps in "
            f"{user_cache_directory()}; measure with dmuon-profile MODEL, or name a cache file"
        )
    return str(files[-1])


def _options(arguments: argparse.Namespace) -> NsOptions:
    steps = _positive_int(arguments.steps or "5", "--steps")
    return NsOptions(arguments.coefficients or "polar_express", steps, _DTYPES.get(arguments.dtype))


def _check_target(flag: str, path: Path) -> None:
    if path.is_dir():
        raise _Bad(f"{flag} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise _Bad(f"{flag} {path}: no such folder {path.parent}; create it")


def _counts(model: str | None, shapes: str, limit: int) -> Counter[Shape]:
    """Matrices per shape; of a shape that is named, ``limit``."""
    counts: Counter[Shape] = Counter()
    if model is not None:
        counts.update((min(m.rows, m.cols), max(m.rows, m.cols)) for m in read_model(model))
    for text in filter(None, (part.strip() for part in shapes.split(","))):
        match = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text)
        if not match:
            raise _Bad(f"--shapes: {text!r} is not like 1024x4096")
        small, large = sorted((int(match[1]), int(match[2])))
        counts[small, large] = limit
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


def _positive_seconds(text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _Bad(f"--budget: {text!r} is no positive number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
