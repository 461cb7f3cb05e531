"""A plan as a picture: loads per rank, and how far each block's largest owner is from the least possible."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from dmuon.files import write_bytes
from dmuon.solver import Plan

__all__ = ["plot_plan"]


def plot_plan(plan: Plan, path: Path, title: str) -> None:
    """Write a PNG.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"a PNG needs matplotlib ({error}); install dmuon[bench]") from error
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    loads, blocks = figure.subplots(2, 1)
    order = np.argsort(-np.array(plan.loads_ns), kind="stable")
    bottom = np.zeros(plan.world)
    for shape in sorted({m.shape for m in plan.matrices}, key=lambda s: -s[0] * s[1]):
        held = np.array([row.get(shape, 0) for row in plan.counts])[order]
        loads.bar(np.arange(plan.world), held, bottom=bottom, width=1.0, label=f"{shape[0]}×{shape[1]}")
        bottom += held
    loads.set(xlabel="rank, most loaded first", ylabel="matrices owned")
    loads.legend(fontsize="small", ncols=4)
    times = loads.twinx()
    times.step(np.arange(plan.world), np.array(plan.loads_ns)[order] / 1e6, where="mid", color="black", label="load")
    times.axhline(plan.bound_ns / 1e6, color="black", linestyle=":", label="proven bound")
    times.set(ylabel="ms", ylim=(0, 1.1 * plan.makespan_ns / 1e6))
    times.legend(fontsize="small", loc="lower left")
    balance = list(plan.block_balance.values())
    blocks.plot([most / 2**20 for most, _ in balance], ".", label="largest owner")
    blocks.plot([least / 2**20 for _, least in balance], "-", color="black", label="least possible")
    blocks.set(xlabel="block", ylabel="MiB", ylim=(0, None))
    blocks.legend(fontsize="small")
    figure.suptitle(f"{title}: makespan {plan.makespan_ns / 1e6:.3f} ms, gap {plan.gap:.2%}, {plan.stage}")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_bytes(path, image.getvalue())
