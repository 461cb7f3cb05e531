"""``dmuon-profile``: time the Muon update of a model's matrices on this device, and write, merge, check or show caches.

Without --merge, --check or --show it measures, and writes a cost cache.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dmuon.kernels import MIXED, PRESETS, Storage, user_cache_directory
from dmuon.model.config import read_model
from dmuon.planning.cost_cache import (
    CacheKey,
    CostCache,
    Entries,
    parse_shape,
    user_cache_files,
    user_cache_path,
)
from dmuon.planning.device_key import NsOptions, device_key, options_of
from dmuon.planning.profiler import MAX_BATCH, build_kernels, measure, settled, timing_bar, useful_batch_sizes
from dmuon.platform.files import save_png
from dmuon.solver import Shape
from dmuon.tools.cli.arguments import FAILED, BadArgument, Parser, count, removed, require_target, seconds
from dmuon.tools.cli.figures import cost_table, draw_costs

_DTYPES: Mapping[str, Storage] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "mixed": MIXED}
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
_REMOVED = {"--quack": "leave it out: an installed quack is tried wherever it can run"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 where --check finds no agreement, or 2 after a message on stderr, with nothing written."""
    modes = {"measure": _measure, "merge": _merge, "check": _check, "show": _show}
    return _parser().run(argv, lambda arguments: modes[_mode(arguments)](arguments))


def _parser() -> Parser:
    parser = Parser("dmuon-profile", __doc__ or "", argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's config.json, or the folder of it: times all its matrices"
    )
    parser.add_argument("--shapes", help="shapes to time, such as 1024x4096,4096x4096")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="storage dtype (default: fp32 on cpu, else fp16)")
    parser.add_argument("--coefficients", choices=PRESETS, help="Newton–Schulz preset (default: polar_express)")
    parser.add_argument("--steps", type=count, help="Newton–Schulz steps (default: 5)")
    parser.add_argument(
        "--max-batch", type=count, help=f"largest number of matrices per batch (default and most: {MAX_BATCH})"
    )
    parser.add_argument("--budget", type=seconds, help="seconds to measure (default: 120, --check 20)")
    for name, instead in _REMOVED.items():
        parser.add_argument(name, nargs="?", const="", type=removed(instead), help=argparse.SUPPRESS)
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
    parser.add_argument("--png", type=Path, help="with --show: plot to write, time over batch size (needs matplotlib)")
    return parser


def _mode(arguments: argparse.Namespace) -> str:
    """The mode; refuses arguments that it would not read."""
    present = [name for name, value in vars(arguments).items() if value is not None]
    modes = [name for name in _ARGUMENTS if name in present]
    if len(modes) > 1:
        raise BadArgument(f"{_flag(modes[0])} and {_flag(modes[1])} exclude each other; run them one after the other")
    mode = modes[0] if modes else "measure"
    for name in present:
        if name not in _ARGUMENTS[mode]:
            reason = f"does not go with --{mode}" if modes else "goes with --show only"
            raise BadArgument(f"{_flag(name)} {reason}; leave it out")
    if mode in ("check", "show") and getattr(arguments, mode):
        fixed = [name for name in (*_RUN, *(["device"] if mode == "show" else [])) if name in present]
        if fixed:
            raise BadArgument(f"{_flag(fixed[0])}: {getattr(arguments, mode)} says so itself; leave it out")
    return mode


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _measure(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    options = _options(arguments)
    limit: int = arguments.max_batch or MAX_BATCH
    if limit > MAX_BATCH:
        raise BadArgument(f"--max-batch: {limit} is more than {MAX_BATCH}; larger batches are run in parts")
    budget_s: float = arguments.budget or 120.0
    key = device_key(device, options)
    path = Path(arguments.out) if arguments.out else user_cache_path(key)
    if arguments.out or path.exists():  # before minutes of measuring
        require_target("--out", path)
        _extended(path, CostCache(key, {}))
    work = {
        shape: useful_batch_sizes(shape, min(limit, count), device)
        for shape, count in _counts(arguments.model, arguments.shapes or "", limit).items()
    }
    build_kernels(work, device=device, options=options)
    with timing_bar(work, key.device) as progress:
        entries = measure(work, device=device, options=options, budget_s=budget_s, progress=progress)
    if not entries:
        raise BadArgument(f"nothing fitted --budget {budget_s:g}; allow more seconds")
    CostCache(key, entries).save(path)
    print(cost_table(entries, options, device))
    left_out = [f"{m}x{n}" for m, n in sorted(work) if 1 not in entries.get((m, n), {})]
    if left_out:
        print(f"not timed within --budget {budget_s:g}, planned by estimate: {', '.join(left_out)}")
    larger = sum(k not in entries[shape] for shape, sizes in work.items() if shape in entries for k in sizes)
    if larger:
        print(f"not timed within --budget {budget_s:g} or the device's memory: {larger} larger batches")
    unfinished = sum(t.unfinished for timings in entries.values() for t in timings.values())
    if unfinished:
        print(f"{unfinished} timings may not be of the fastest form: --budget {budget_s:g} was too short to try all")
    unsettled = sum(not settled(t) for timings in entries.values() for t in timings.values())
    if unsettled:
        print(
            f"{unsettled} of {sum(map(len, entries.values()))} timings spread by 3% or more; on an idle device fewer do"
        )
    print(f"wrote {path}")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    if not arguments.out:
        raise BadArgument("--merge needs --out FILE, to say where the merged cache goes")
    out = Path(arguments.out)
    require_target("--out", out)
    first, *rest = arguments.merge
    merged = CostCache.load(first)
    for path in rest:
        cache = CostCache.load(path)
        for field, (value, first_value) in cache.key.differences(merged.key).items():
            raise BadArgument(
                f"cost cache {path}: key field {field!r} is {value!r}, but {first_value!r} in {first}; merge caches of "
                "one device, setting and version"
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
    budget_s: float = arguments.budget or 20.0
    path = _cache_path(arguments.check, arguments, device)
    cache = CostCache.load(path)
    if not cache.entries:
        raise BadArgument(f"cost cache {path}: holds no timings to check; measure some with dmuon-profile --shapes")
    options = options_of(cache.key, path)
    key = device_key(device, options)
    match = cache.matches(key)
    differences = cache.key.differences(key) if match == "compatible" else cache.key.strict.differences(key.strict)
    changes = ", ".join(f"{field} {recorded!r}, here {own!r}" for field, (recorded, own) in differences.items())
    if match == "no":
        print(f"{path}: not valid on {device}: {changes}; choose another --device, or measure with dmuon-profile")
        return FAILED
    print(f"{path}: valid on {device}, {'exactly' if match == 'exact' else f'measured with other versions: {changes}'}")
    work = _sample(cache.entries)
    build_kernels(work, device=device, options=options)
    with timing_bar(work, key.device) as progress:
        again = measure(work, device=device, options=options, budget_s=budget_s, progress=progress)
    if not again:
        raise BadArgument(f"nothing fitted --budget {budget_s:g}; allow more seconds")
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
    return 0 if agree else FAILED


def _sample(entries: Entries) -> dict[Shape, list[int]]:
    """Some timings from the least work to the most, evenly."""
    items = sorted((k * m * m * n, (m, n), k) for (m, n), timings in entries.items() for k in timings)
    work: dict[Shape, list[int]] = {}
    for index in sorted({round(i * (len(items) - 1) / (_SAMPLE - 1)) for i in range(_SAMPLE)}):
        _, shape, k = items[index]
        work.setdefault(shape, []).append(k)
    return work


def _show(arguments: argparse.Namespace) -> int:
    png: Path | None = arguments.png
    if png is not None:
        require_target("--png", png, ".png")
    path = _cache_path(arguments.show, arguments, None)
    cache = CostCache.load(path)
    options = options_of(cache.key, path)
    figure = None if png is None else draw_costs(cache, options)
    key = cache.key
    versions = ", ".join(
        f"{name} {value}" for name in ("torch", "cuda", "driver", "compilers") if (value := getattr(key, name))
    )
    print(f"{path}\n{key.device}, {key.dtype}, {key.coefficients}, {key.steps} steps; {versions}")
    print(cost_table(cache.entries, options, torch.device("cpu")))
    if png is not None:
        save_png(figure, png)
        print(f"wrote {png}")
    return 0


def _cache_path(name: str, arguments: argparse.Namespace, device: torch.device | None) -> str:
    """The cache called ``name``, or if that is empty the user's for the device and the run that the arguments name."""
    if name:
        return name
    key: CacheKey = device_key(device or _device(arguments.device), _options(arguments))
    files = user_cache_files(key)
    if not files:
        raise BadArgument(
            f"no cache for {key.device}, {key.dtype}, {key.coefficients}, {key.steps} steps in "
            f"{user_cache_directory()}; measure with dmuon-profile MODEL, or name a cache file"
        )
    return str(files[-1])


def _options(arguments: argparse.Namespace) -> NsOptions:
    return NsOptions(arguments.coefficients or "polar_express", arguments.steps or 5, _DTYPES.get(arguments.dtype))


def _counts(model: str | None, shapes: str, limit: int) -> Counter[Shape]:
    """Matrices per shape; of a shape that is named, ``limit``."""
    counts: Counter[Shape] = Counter()
    if model is not None:
        counts.update((min(m.rows, m.cols), max(m.rows, m.cols)) for m in read_model(model))
    for text in filter(None, (part.strip() for part in shapes.split(","))):
        try:
            small, large = sorted(parse_shape(text))
        except ValueError as error:
            raise BadArgument(f"--shapes: {error}") from None
        counts[small, large] = limit
    if not counts:
        raise BadArgument("no matrices to time; pass a MODEL.json or --shapes 1024x4096,...")
    return counts


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadArgument(f"--device: {name!r} is no device; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise BadArgument(f"--device: {name!r} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadArgument(
            f"--device: {name!r} is not there, {torch.cuda.device_count()} CUDA devices are; use --device cpu"
        )
    return device


if __name__ == "__main__":
    sys.exit(main())
