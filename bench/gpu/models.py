"""Newton–Schulz of all matrices of a model on one device, shape by shape, in batches as training makes them."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels import (
    Variant,
    batch_size,
    choose_variant,
    coefficient_sequence,
    drop_graphs,
    normalize,
    orthogonalize,
    run,
)
from dmuon.model.config import read_model
from gpu.journal import Journal
from gpu.settings import Settings, relative

MODELS = ("qwen2.5-7b", "llama-3-8b", "pi0", "gpt2-1.5b")
POLAR = coefficient_sequence("polar_express", 5)
(CLASSIC,) = coefficient_sequence("classic", 1)
OTHERS = ("cuBLAS standard", "cuBLAS gram", "torch.optim.Muon", "gram-newton-schulz")


def time_models(settings: Settings, journal: Journal, deadline: float) -> None:
    rows: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}
    for name in MODELS:
        with journal.guarded(name):
            counts = Counter(
                tuple(sorted((max(8, m.rows // settings.scale), max(8, m.cols // settings.scale))))
                for m in read_model(settings.models / f"{name}.json")
            )
            batches = {(m, n): batch_size((m, n), count, settings.device) for (m, n), count in sorted(counts.items())}
            for shape, k in batches.items():
                if (shape, k) not in rows and time.monotonic() <= deadline:
                    with journal.guarded(f"{k} of {shape[0]}x{shape[1]}"):
                        rows[shape, k] = _time_shape(settings, journal, shape, k)
            found = {shape: rows.get((shape, k)) for shape, k in batches.items()}
            missing = [f"{m}x{n}" for (m, n), row in found.items() if row is None or "dmuon" not in row["ms"]]
            if missing:
                print(f"{name}: left out, without times of {', '.join(missing)}", flush=True)
                continue
            row = _sum(name, {shape: (counts[shape], row) for shape, row in found.items() if row is not None})
            ratios = ", ".join(f"{program} {ratio:.2f}" for program, ratio in row["over_dmuon"].items())
            journal.add("models", row, f"{name}: dmuon {row['ms']['dmuon']:.2f} ms; times that: {ratios}")


def _sum(name: str, shapes: dict[tuple[int, int], tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Of the programs that were timed for every shape."""
    programs = [p for p in ("dmuon", *OTHERS) if all(p in row["ms"] for _, row in shapes.values())]
    total = {p: sum(row["ms"][p] * count / row["k"] for count, row in shapes.values()) for p in programs}
    return {
        "model": name,
        "ms": total,
        "over_dmuon": {p: milliseconds / total["dmuon"] for p, milliseconds in total.items()},
        "shapes": {f"{m}x{n} by {row['k']}": count for (m, n), (count, row) in shapes.items()},
    }


def _time_shape(settings: Settings, journal: Journal, shape: tuple[int, int], k: int) -> dict[str, Any]:
    what = f"{k} of {shape[0]}x{shape[1]}"
    rule = choose_variant(shape, k, POLAR, torch.float16, settings.device)
    x = settings.gaussian(k, *shape)
    exact = orthogonalize(x[:1].double(), method="standard")
    programs = _programs(settings, x, rule)
    errors = {}
    for name in ("dmuon", *OTHERS[:2]):  # others use other coefficients: theirs are no errors against ours
        with journal.guarded(f"{what}: {name}, error"):
            errors[name] = relative(programs[name]()[:1], exact)
    times = settings.medians(programs, journal, what, OTHERS)
    row = {"shape": shape, "k": k, "ms": times, "errors": errors, "variant": str(rule)}
    journal.add("shapes", row, f"{what}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()))
    drop_graphs()
    return row


def _programs(settings: Settings, x: Tensor, rule: Variant) -> dict[str, Callable[[], Tensor]]:
    shape, k = (x.shape[1], x.shape[2]), len(x)

    def ours(variant: Variant) -> Callable[[], Tensor]:
        return lambda: run(normalize(x, torch.float16, 0.0)[0], variant, POLAR, torch.float16)

    def cublas(method: Any) -> Callable[[], Tensor]:
        return ours(choose_variant(shape, k, POLAR, torch.float16, settings.device, method=method, backend="torch"))

    return {
        "dmuon": ours(rule),
        "cuBLAS standard": cublas("standard"),
        "cuBLAS gram": cublas("gram"),
        **_peers(x),
    }


def _peers(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Public routines, as far as they are installed."""
    found: dict[str, Callable[[], Tensor]] = {}
    try:
        theirs = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz
        found["torch.optim.Muon"] = lambda: torch.stack([theirs(m, CLASSIC, 5, 1e-7) for m in x])
    except (ImportError, AttributeError):
        pass
    try:
        routine = importlib.import_module("gram_newton_schulz").GramNewtonSchulz()
        found["gram-newton-schulz"] = lambda: routine(x)
    except (ImportError, AttributeError):
        pass
    return found
