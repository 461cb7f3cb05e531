"""The symmetric product against cuBLAS, with a batch that fills the device, and with one matrix."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dmuon.kernels.symmetric_tiles import Work, default_config
from dmuon.kernels.symmetric_triton import symmetric_product
from gpu.journal import Journal
from gpu.settings import Settings

SIDES = (4096, 8192, 2048, 1024, 512)  # what carries the targets comes first: time may end
DEPTHS = (1, 4)  # inner dimension over side: squares of the Gram form, and XXᵀ of a wide matrix
CUBLAS = ("cuBLAS", "cuBLAS in place")


def time_products(settings: Settings, journal: Journal, deadline: float) -> None:
    if not settings.tiles:
        return
    sides = [max(16, side // settings.scale) for side in SIDES]
    for alone, m, depth in itertools.product((False, True), sides, DEPTHS):
        if time.monotonic() > deadline:
            return
        k = 1 if alone else max(2, 4 * 4096**2 // (settings.scale * m) ** 2)
        what = f"product {k}x{m}x{depth * m}"
        with journal.guarded(what):
            times = settings.medians(_programs(settings, k, m, depth), journal, what, CUBLAS)
            row, line = _row(k, m, depth * m, times)
            row["by_rule"] = _rule(settings, k, m, depth * m, 1 if depth == 1 else 0)
            journal.add("products", row, line)


def _rule(settings: Settings, k: int, m: int, p: int, addends: int) -> str:
    """The config that is taken without measurement."""
    if settings.device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(settings.device)
    work = Work(k, m, p, torch.float16, addends, properties.multi_processor_count)
    return str(default_config(work, (properties.major, properties.minor)))


def _programs(settings: Settings, k: int, m: int, depth: int) -> dict[str, Callable[[], object]]:
    x = (settings.gaussian(k, m, depth * m) / (depth * m) ** 0.5).half()
    out = torch.empty(k, m, m, dtype=torch.float16, device=settings.device)
    programs: dict[str, Callable[[], object]] = {}
    if depth == 1:
        r = x @ x.mT
        programs["cuBLAS"] = partial(torch.baddbmm, r, r, r, beta=0.5, alpha=0.5, out=out)  # copies r first
        programs["cuBLAS in place"] = partial(r.clone().baddbmm_, r, r, beta=0.5, alpha=0.5)  # tends to r², stays small
        ours = partial(symmetric_product, r, r, addends=[r], betas=[0.5], alpha=0.5, out=out, b_symmetric=True)
    else:
        programs["cuBLAS"] = partial(torch.bmm, x, x.mT, out=out)
        ours = partial(symmetric_product, x, x.mT, alpha=0.5, out=out)
    return programs | {str(config): partial(ours, config=config) for config in settings.configs(m, depth * m, x.dtype)}


def _row(k: int, m: int, p: int, times: dict[str, float]) -> tuple[dict[str, Any], str]:
    """What was measured, and a line for people; ``speedup`` over the faster way of cuBLAS."""
    row: dict[str, Any] = {"m": m, "p": p, "k": k, "ms": times}
    theirs = min((times[name] for name in CUBLAS if name in times), default=None)
    best = min((name for name in times if name not in CUBLAS), key=lambda name: times[name], default=None)
    if theirs is None or best is None:
        return row, f"product {k}x{m}x{p}: nothing to compare"
    row |= {
        "best": best,
        "speedup": theirs / times[best],
        "cublas_tflops": 2 * k * m * m * p / theirs / 1e9,
        "effective_tflops": 2 * k * m * m * p / times[best] / 1e9,
    }
    line = (
        f"product {k}x{m}x{p}: cuBLAS {theirs:.3f} ms, best {times[best]:.3f} ms, {row['speedup']:.2f} times as fast, "
        f"{row['effective_tflops']:.0f} TFLOP/s, {best}"
    )
    return row, line
