"""Newton–Schulz on one GPU: correct against fp64, then tuned, then timed against cuBLAS and public routines.

    python bench/gpu_kernels.py --models DIR [--json bench/results/NAME.json] [--seconds 420]

Products with a symmetric result are timed alone, per size and depth; whole models as the sum over their matrices, one
batch after another. Times are medians of interleaved CUDA-graph replays between events, with the L2 cache overwritten
before each. Exit status 1 where a result is wrong, or with ``--check`` where a target is missed.

``--dry`` runs everything on whatever device there is, on tiny matrices, so that the script is known to work; with
``TRITON_INTERPRET=1`` also the kernels. It prints no figure worth keeping.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.clock import cold_samples, medians
from common.results import write_json
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon.kernels import (
    Variant,
    apply_update_,
    backend_fault,
    choose_variant,
    coefficient_sequence,
    normalized_momentum,
    orthogonalize,
    run,
)
from dmuon.kernels.normalization import normalize
from dmuon.kernels.symmetric_tiles import TileConfig, candidates
from dmuon.kernels.symmetric_triton import symmetric_product
from dmuon.model.config import read_model
from dmuon.planning.device_key import NsOptions
from dmuon.planning.profiler import fastest_variant, nearly_singular

MODELS = ("llama-3-8b", "qwen2.5-7b", "gpt2-1.5b", "pi0")
SIDES = (512, 1024, 2048, 4096, 8192)
DEPTHS = (1, 4)  # inner dimension over side: squares of the Gram form, and XXᵀ of a wide matrix
BATCH_ELEMENTS = 1 << 27  # of a model's batches: 8 matrices of 4096 x 4096
POLAR = coefficient_sequence("polar_express", 5)
(CLASSIC,) = coefficient_sequence("classic", 1)
CUBLAS = "cuBLAS"


@dataclass(frozen=True, slots=True)
class Settings:
    device: torch.device
    scale: int  # sides are divided by it
    seconds: float
    rounds: int
    models: Path

    @property
    def tiles(self) -> bool:
        return backend_fault("triton", self.device, torch.float16) is None

    @property
    def configs(self) -> Callable[[int, int, torch.dtype], Sequence[TileConfig]]:
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (9, 0)
        if self.scale > 1:
            return lambda m, p, dtype: (TileConfig(16, 16, 4, 2), TileConfig(16, 16, 4, 2, True))
        return lambda m, p, dtype: candidates(m, p, dtype, capability)

    def medians(self, programs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds of each, in turns: of graph replays on CUDA, CPU time elsewhere."""
        ready = {name: self._prepared(program) for name, program in programs.items()}
        cache_bytes = 1 << (28 if self.device.type == "cuda" else 20)
        return medians(cold_samples(ready, self.device, cache_bytes, self.rounds))

    def _prepared(self, program: Callable[[], object]) -> Callable[[], object]:
        program()  # compiles
        if self.device.type != "cuda":
            return program
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = program()

        def replay(_kept: object = kept) -> None:
            graph.replay()

        replay()
        return replay

    def gaussian(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, device=self.device, generator=generator).to(dtype)


# -- correct? -------------------------------------------------------------------------------------------------------


def check(settings: Settings) -> list[dict[str, Any]]:
    """Errors against fp64, each with the limit that it must keep."""
    rows = [*check_products(settings), *check_update(settings), *check_orthogonal(settings)]
    for row in rows:
        row["ok"] = bool(row["error"] <= row["limit"] and row.get("symmetric", True))
    return rows


def check_products(settings: Settings) -> Iterable[dict[str, Any]]:
    if not settings.tiles:
        return
    limits = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}
    for dtype, limit in limits.items():
        if settings.device.type == "cpu" and dtype == torch.bfloat16:
            continue  # the interpreter's bf16 is not the hardware's
        for m, p, k in ((1024, 1024, 2), (1000, 1000, 2), (777, 1999, 1), (1024, 4096, 3)):
            m, p = max(8, m // settings.scale), max(8, p // settings.scale)
            x = (settings.gaussian(k, m, p) / p**0.5).to(dtype)
            r = (x.double() @ x.double().mT).to(dtype)
            s = (r.double() @ r.double()).to(dtype)
            s = torch.tril(s) + torch.tril(s, -1).mT
            for config in settings.configs(m, p, dtype):
                if config.descriptors and (m * dtype.itemsize % 16 or p * dtype.itemsize % 16):
                    continue
                for name, a, b, c, flag in (("XXᵀ", x, x.mT, None, False), ("RS+R", r, s, r, True)):
                    exact = 0.5 * (a.double() @ b.double())
                    exact = exact if c is None else exact - 1.5 * c.double()
                    exact = torch.tril(exact) + torch.tril(exact, -1).mT  # fp16 factors commute nearly only
                    d = symmetric_product(a, b, c, alpha=0.5, beta=-1.5, b_symmetric=flag, config=config)
                    error = ((d.double() - exact).abs().max() / exact.abs().max()).item()
                    yield {
                        "what": f"{name} {k}x{m}x{p} {dtype} {config}",
                        "error": error,
                        "limit": limit,
                        "symmetric": torch.equal(d, d.mT),
                    }


def check_update(settings: Settings) -> Iterable[dict[str, Any]]:
    """The passes before and after Newton–Schulz, whatever runs them here."""
    k, m, n = 3, max(8, 1000 // settings.scale), max(8, 3001 // settings.scale)
    for dtype in (torch.float32, torch.bfloat16):
        grads = list(settings.gaussian(k, m, n, dtype=dtype).unbind(0))
        momentum = settings.gaussian(k, m, n, seed=1)
        exact = torch.stack(grads).double()
        average = torch.lerp(momentum.double(), exact, 0.05)
        wanted = torch.lerp(exact, average, 0.95)
        norms = wanted.flatten(1).norm(dim=1)
        x, found = normalized_momentum(grads, momentum, beta=0.95, nesterov=True, storage=torch.float32)
        yield {"what": f"momentum {dtype}", "error": relative(momentum, average), "limit": 1e-6}
        yield {"what": f"norms {dtype}", "error": relative(found, norms), "limit": 1e-6}
        yield {"what": f"normalized {dtype}", "error": relative(x, wanted / norms[:, None, None]), "limit": 1e-6}
    params = [settings.gaussian(m, n, seed=i) for i in range(k)]
    update = settings.gaussian(k, m, n, dtype=torch.float16, seed=9)
    wanted = torch.stack(params).double() * (1 - 0.02 * 0.1) - 0.02 * 0.5 * update.double()
    apply_update_(params, update, lr=0.02, weight_decay=0.1, scale=0.5)
    yield {"what": "weights", "error": relative(torch.stack(params), wanted), "limit": 1e-6}


def check_orthogonal(settings: Settings) -> Iterable[dict[str, Any]]:
    """Whole runs in fp16: distance to the fp64 standard form, and the largest singular value."""
    backends = ["torch", *(["triton"] if settings.tiles else [])]
    for m, n in ((1024, 1024), (1024, 1536), (1024, 4096), (4096, 1024)):
        m, n = max(8, m // settings.scale), max(8, n // settings.scale)
        x = torch.cat([settings.gaussian(1, m, n), *nearly_singular((m, n), settings.device)])
        exact = orthogonalize(x.double(), method="standard")
        for backend in backends:
            for method in ("standard", "gram"):
                found = orthogonalize(x, method=method, backend=backend, dtype=torch.float16)
                name = f"{method} {backend} {m}x{n}"
                yield {"what": f"{name} error", "error": relative(found[:1], exact[:1]), "limit": 2e-2}
                largest = torch.linalg.matrix_norm(found.double(), 2).max().item()
                yield {"what": f"{name} largest singular value", "error": largest, "limit": 1.18}


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# -- products -------------------------------------------------------------------------------------------------------


def time_products(settings: Settings, deadline: float) -> list[dict[str, Any]]:
    """The symmetric product against cuBLAS, with a batch that fills the device, and with one matrix."""
    rows = []
    sides = [max(16, side // settings.scale) for side in SIDES]
    for m, depth, alone in itertools.product(sides, DEPTHS, (True, False)):
        if time.monotonic() > deadline or not settings.tiles:
            break
        k = 1 if alone else max(2, 4 * 4096**2 // (settings.scale * m) ** 2)
        x = (settings.gaussian(k, m, depth * m) / (depth * m) ** 0.5).half()
        out = torch.empty(k, m, m, dtype=torch.float16, device=settings.device)
        programs: dict[str, Callable[[], object]] = {}
        if depth == 1:
            r = x @ x.mT
            programs[CUBLAS] = partial(torch.baddbmm, r, r, r, beta=0.5, alpha=0.5, out=out)
            ours = partial(symmetric_product, r, r, r, alpha=0.5, beta=0.5, out=out, b_symmetric=True)
        else:
            programs[CUBLAS] = partial(torch.bmm, x, x.mT, out=out)
            ours = partial(symmetric_product, x, x.mT, alpha=0.5, out=out)
        programs |= {str(config): partial(ours, config=config) for config in settings.configs(m, depth * m, x.dtype)}
        times = settings.medians(programs)
        best = min((name for name in times if name != CUBLAS), key=lambda name: times[name])
        rows.append(
            {
                "m": m,
                "p": depth * m,
                "k": k,
                "ms": times,
                "best": best,
                "speedup": times[CUBLAS] / times[best],
                "cublas_tflops": 2 * k * m * m * depth * m / times[CUBLAS] / 1e9,
                "effective_tflops": 2 * k * m * m * depth * m / times[best] / 1e9,
            }
        )
    return rows


# -- whole models ---------------------------------------------------------------------------------------------------


def time_models(settings: Settings, deadline: float) -> list[dict[str, Any]]:
    """Newton–Schulz of all matrices of a model on one device."""
    rows = []
    cache: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}
    for name in MODELS:
        path = settings.models / f"{name}.json"
        counts = Counter(
            tuple(sorted((max(8, m.rows // settings.scale), max(8, m.cols // settings.scale))))
            for m in read_model(path)
        )
        total: Counter[str] = Counter()
        variants = {}
        for (m, n), count in sorted(counts.items()):
            k = min(count, max(1, BATCH_ELEMENTS // (m * n)))
            if ((m, n), k) not in cache:
                if time.monotonic() > deadline:
                    break
                cache[(m, n), k] = time_shape(settings, (m, n), k)
            found = cache[(m, n), k]
            for program, milliseconds in found["ms"].items():
                total[program] += milliseconds * count / k
            variants[f"{m}x{n} by {k}"] = {"count": count, **found}
        else:
            ours = total["dmuon"]
            ratios = {program: milliseconds / ours for program, milliseconds in total.items()}
            rows.append({"model": name, "ms": dict(total), "over_dmuon": ratios, "shapes": variants})
            continue
        print(f"{name}: left out, --seconds are spent", file=sys.stderr)
    return rows


def time_shape(settings: Settings, shape: tuple[int, int], k: int) -> dict[str, Any]:
    x = settings.gaussian(k, *shape)
    exact = orthogonalize(x[:1].double(), method="standard")
    tuned = fastest_variant(shape, k, settings.device, NsOptions(dtype=torch.float16), seconds=settings.seconds / 40)
    rule = choose_variant(shape, k, POLAR, torch.float16, settings.device)
    torch_backend = {
        method: choose_variant(shape, k, POLAR, torch.float16, settings.device, method=method, backend="torch")
        for method in ("standard", "gram")
    }

    def ours(variant: Variant) -> Callable[[], Tensor]:
        eager = replace(variant, replay=False)  # here all are replayed
        return lambda: run(normalize(x, torch.float16, 0.0)[0], eager, POLAR, torch.float16)

    programs: dict[str, Callable[[], Tensor]] = {
        "dmuon": ours(tuned),
        "dmuon, rule": ours(rule),
        "cuBLAS standard": ours(torch_backend["standard"]),
        "cuBLAS gram": ours(torch_backend["gram"]),
        "torch.optim.Muon": lambda: torch.stack([_zeropower_via_newtonschulz(m, CLASSIC, 5, 1e-7) for m in x]),
        **peers(x),
    }
    # Others use other coefficients: theirs are no errors against ours, so only ours are compared.
    errors = {name: relative(programs[name]()[:1], exact) for name in list(programs)[:4]}
    return {"ms": settings.medians(dict(programs)), "errors": errors, "variant": str(tuned), "rule": str(rule)}


def peers(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Public routines that happen to be installed."""
    try:
        module = importlib.import_module("gram_newton_schulz")
    except ImportError:
        return {}
    routine = module.GramNewtonSchulz()
    return {"gram-newton-schulz": lambda: routine(x)}


# -- report ---------------------------------------------------------------------------------------------------------


def targets(products: list[dict[str, Any]], models: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What was aimed at, and whether it was reached; nothing of what was not measured."""
    result = []
    for row in products:
        aim = 1.6 if row["m"] >= 4096 else 1.3 if row["m"] >= 2048 else None
        if aim is not None and row["k"] > 1:
            result.append(
                (f"product {row['k']}x{row['m']}x{row['p']}: {row['speedup']:.2f} >= {aim}", row["speedup"] >= aim)
            )
    for row in models:
        slowest = row["over_dmuon"]["cuBLAS standard"]
        result.append((f"{row['model']}: cuBLAS standard takes {slowest:.2f} >= 1.00 of dmuon", slowest >= 1))
        if row["model"] == "qwen2.5-7b":
            ratio = row["over_dmuon"]["torch.optim.Muon"]
            result.append((f"qwen2.5-7b: torch.optim.Muon takes {ratio:.2f} >= 1.80 of dmuon", ratio >= 1.8))
    return result


def report(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, torch {result['torch']}, Triton {result['triton']}, {result['date']}"]
    wrong = [row for row in result["checks"] if not row["ok"]]
    lines.append(f"{len(result['checks'])} results against fp64, {len(wrong)} wrong")
    lines += [f"  WRONG {row['what']}: {row['error']:.3g}, limit {row['limit']:.3g}" for row in wrong]
    if result["products"]:
        lines.append(f"{'m':>6}{'p':>7}{'k':>5}{'cuBLAS ms':>11}{'best ms':>10}{'ratio':>7}{'TFLOP/s':>9}  tiles")
    for row in result["products"]:
        lines.append(
            f"{row['m']:>6}{row['p']:>7}{row['k']:>5}{row['ms'][CUBLAS]:>11.3f}{row['ms'][row['best']]:>10.3f}"
            f"{row['speedup']:>7.2f}{row['effective_tflops']:>9.0f}  {row['best']}"
        )
    for row in result["models"]:
        lines.append(f"{row['model']}: dmuon {row['ms']['dmuon']:.2f} ms")
        lines += [
            f"  {program:<20}{milliseconds:>10.2f} ms  {row['over_dmuon'][program]:.2f}"
            for program, milliseconds in row["ms"].items()
        ]
    lines += [f"{'met   ' if met else 'MISSED'} {text}" for text, met in result["targets"]]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of model configurations")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which nothing new is timed")
    parser.add_argument("--rounds", type=int, default=15, help="samples per median")
    parser.add_argument("--check", action="store_true", help="exit status 1 also where a target is missed")
    parser.add_argument("--dry", action="store_true", help="tiny matrices, any device")
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if not cuda and not arguments.dry:
        parser.error("no CUDA device; --dry runs the script without one")
    torch.set_num_threads(1)
    settings = Settings(
        torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        128 if arguments.dry else 1,
        arguments.seconds,
        2 if arguments.dry else arguments.rounds,
        arguments.models,
    )
    started = time.monotonic()
    checks = check(settings)
    products = time_products(settings, started + 0.5 * settings.seconds)
    models = time_models(settings, started + settings.seconds)
    triton = importlib.import_module("triton").__version__ if settings.tiles else "not used"
    result = {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "driver": Path("/proc/driver/nvidia/version").read_text().splitlines()[0] if cuda else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": triton,
        "date": date.today().isoformat(),
        "dry": arguments.dry,
        "seconds": round(time.monotonic() - started, 1),
        "checks": checks,
        "products": products,
        "models": models,
        "targets": targets(products, models),
    }
    print(report(result))
    if arguments.json:
        write_json(arguments.json, result)
    wrong = any(not row["ok"] for row in checks)
    missed = arguments.check and any(not met for _, met in result["targets"])
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
