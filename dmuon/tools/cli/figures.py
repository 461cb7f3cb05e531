"""Plans and measured costs as pictures and as tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dmuon.planning.cost_cache import CostCache, Entries
from dmuon.planning.device_key import NsOptions
from dmuon.platform.files import new_figure
from dmuon.solver import Plan


def cost_table(entries: Entries, options: NsOptions, device: torch.device) -> str:
    """One line per shape and batch size: times, rate at whole products, spread, samples, and how it ran."""
    head = f"{'shape':>14} {'batch':>6} {'ms':>11} {'ms each':>11} {'GFLOP/s':>10} {'spread':>7} {'samples':>8}"
    lines = [f"{head}  variant"]
    for (m, n), timings in sorted(entries.items()):
        flops = options.flops((m, n), device)
        for k, t in sorted(timings.items()):
            each, spread = t.median_ns / k / 1e6, (t.p90_ns - t.p10_ns) / t.median_ns
            lines.append(
                f"{f'{m}x{n}':>14} {k:>6} {t.median_ns / 1e6:>11.3f} {each:>11.3f} {k * flops / t.median_ns:>10.4g} "
                f"{spread:>6.1%} {t.n:>8}  {t.variant or 'by rule'}"
            )
    return "\n".join(lines)


def draw_costs(cache: CostCache, options: NsOptions) -> Any:
    """A figure of T(k) per shape, and dashed beside it the time of its operations at the best rate of the whole cache.

    Raises:
        ValueError: the cache holds no timings, or matplotlib is not installed.
    """
    if not cache.entries:
        raise ValueError("the cost cache holds no timings to draw; measure some with dmuon-profile --shapes")
    figure = new_figure(9, 5.5)
    device = torch.device("cpu")  # which decides the dtype alone, and the cache's key has one
    flops = {shape: options.flops(shape, device) for shape in sorted(cache.entries)}
    rate = max(k * flops[shape] / t.median_ns for shape, timings in cache.entries.items() for k, t in timings.items())
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
    return figure


def draw_plan(plan: Plan, title: str) -> Any:
    """A figure of what each rank owns and how long it takes, and of the largest owner of each block.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = new_figure(11, 6.5)
    loads, blocks = figure.subplots(2, 1)
    order = np.argsort(-np.array(plan.loads_ns), kind="stable")
    bottom = np.zeros(plan.world)
    for shape in sorted({m.shape for m in plan.matrices}, key=lambda s: -s[0] * s[1]):
        owned = np.array([row.get(shape, 0) for row in plan.counts])[order]
        loads.bar(np.arange(plan.world), owned, bottom=bottom, width=1.0, label=f"{shape[0]}×{shape[1]}")
        bottom += owned
    loads.set(xlabel="rank, most loaded first", ylabel="matrices owned")
    loads.legend(fontsize="small", ncols=4)
    times = loads.twinx()
    times.step(np.arange(plan.world), np.array(plan.loads_ns)[order] / 1e6, where="mid", color="black", label="load")
    times.axhline(plan.bound_ns / 1e6, color="black", linestyle=":", label="proven bound")
    times.set(ylabel="ms", ylim=(0, 1.1 * plan.makespan_ns / 1e6))
    times.legend(fontsize="small", loc="lower left")
    balance = list(plan.block_balance.values())
    blocks.plot([most / 2**20 for most, _ in balance], ".", label="largest owner")
    blocks.plot([even / 2**20 for _, even in balance], "-", color="black", label="even share")
    blocks.set(xlabel="block", ylabel="MiB", ylim=(0, None))
    blocks.legend(fontsize="small")
    figure.suptitle(f"{title}: makespan {plan.makespan_ns / 1e6:.3f} ms, gap {plan.gap:.2%}, {plan.stage}")
    return figure
