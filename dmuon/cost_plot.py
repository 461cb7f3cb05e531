"""Measured costs for people: a table, and a plot of time over batch size beside what the FLOPs alone would take."""

from __future__ import annotations

import io

import torch

from dmuon.cost_cache import CostCache, Entries, Shape
from dmuon.kernels import newton_schulz_flops
from dmuon.profiler import NsOptions

__all__ = ["cost_table", "draw_costs"]


def cost_table(entries: Entries, options: NsOptions, device: torch.device) -> str:
    """One line per shape and batch size: times, rate at whole products, spread, samples, and how it ran."""
    head = f"{'shape':>14} {'batch':>6} {'ms':>11} {'ms each':>11} {'GFLOP/s':>10} {'spread':>7} {'samples':>8}"
    lines = [f"{head}  variant"]
    for (m, n), timings in sorted(entries.items()):
        flops = _flops((m, n), options, device)
        for k, t in sorted(timings.items()):
            each, spread = t.median_ns / k / 1e6, (t.p90_ns - t.p10_ns) / t.median_ns
            lines.append(
                f"{f'{m}x{n}':>14} {k:>6} {t.median_ns / 1e6:>11.3f} {each:>11.3f} {k * flops / t.median_ns:>10.4g} "
                f"{spread:>6.1%} {t.n:>8}  {t.variant or 'by rule'}"
            )
    return "\n".join(lines)


def draw_costs(cache: CostCache, options: NsOptions) -> bytes:
    """A PNG of T(k) per shape, and dashed beside it the time of its operations at the best rate of the whole cache.

    Raises:
        ValueError: the cache holds no timings, or matplotlib is not installed.
    """
    if not cache.entries:
        raise ValueError("the cost cache holds no timings to draw; measure some with dmuon-profile --shapes")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib; install it with pip install 'dmuon[bench]'") from None
    device = torch.device("cpu")  # which decides the dtype alone, and the cache's key has one
    flops = {shape: _flops(shape, options, device) for shape in sorted(cache.entries)}
    rate = max(k * flops[shape] / t.median_ns for shape, timings in cache.entries.items() for k, t in timings.items())
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for (m, n), operations in flops.items():
        timings = sorted(cache.entries[m, n].items())
        sizes = [k for k, _ in timings]
        medians = [t.median_ns / 1e6 for _, t in timings]
        line = axes.plot(sizes, medians, marker="o", label=f"{m}×{n}")[0]
        axes.fill_between(
            sizes,
            [t.p10_ns / 1e6 for _, t in timings],
            [t.p90_ns / 1e6 for _, t in timings],
            color=line.get_color(),
            alpha=0.2,
        )
        ideal = [k * operations / rate / 1e6 for k in sizes]
        # A marker too, for a shape with a single batch size.
        axes.plot(sizes, ideal, color=line.get_color(), linestyle="--", marker="_", linewidth=1)
    axes.plot([], [], color="gray", linestyle="--", label=f"FLOPs at {rate:.4g} GFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({k for timings in cache.entries.values() for k in timings})
    axes.set_xticks(batches, [str(k) for k in batches])
    axes.grid(alpha=0.3)
    axes.set_xlabel("matrices per batch, k")
    axes.set_ylabel("time of one update of the batch, T(k), in ms")
    key = cache.key
    axes.set_title(f"{key.device}, {key.dtype}, {key.coefficients}, {key.steps} steps", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8, ncols=1 + len(flops) // 24)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def _flops(shape: Shape, options: NsOptions, device: torch.device) -> int:
    return int(newton_schulz_flops(shape, options.coefficients, options.steps, options.dtype, device))
