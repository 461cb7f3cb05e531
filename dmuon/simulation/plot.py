"""Pictures of a simulation: what a few ranks do during one step, and how step time grows with ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmuon.platform.files import new_figure, save_png
from dmuon.simulation.engine import COMPUTE
from dmuon.simulation.programs import StepTrace

# By the name of an operation: the colour of its bars, and what the legend calls it.
_BARS = {
    "forward": ("#4c78a8", "forward"),
    "backward": ("#72b7b2", "backward"),
    "head": ("#3f5f8a", "output head"),
    "ns": ("#e45756", "Newton–Schulz"),
    "adamw": ("#b279a2", "AdamW"),
    "pack": ("#bab0ac", "pack gradients"),
    "copy-out": ("#d7d2cd", "copy"),
    "copy": ("#d7d2cd", "copy"),
    "fill": ("#54a24b", "fill (owners broadcast)"),
    "publish": ("#2f7a3b", "publish over replicas"),
    "copies": ("#2f7a3b", "copies of updates"),
    "reduce": ("#9d755d", "reduce to owners"),
    "reduce over replicas": ("#6b4c3b", "reduce over replicas"),
    "votes": ("#ffbf79", "votes"),
    "all-gather": ("#88d27a", "FSDP2 all-gather"),
    "gather momentum": ("#f2cf5b", "gather momentum"),
    "reduce-scatter": ("#d8b5a5", "FSDP2 reduce-scatter"),
    "all-reduce": ("#f58518", "FSDP2 all-reduce"),
}
_LANES = (
    COMPUTE, "fill", "publish", "reduce", "reduce over replicas", "FSDP2 gather", "FSDP2 reduce", "FSDP2 all-reduce",
)  # fmt: skip
_OVERHEAD_SHOWN = (-3, 30)  # percent: beyond it what counts would be flat
_LEAST_WIDTH = 8e-4  # of the picture: shorter bars would vanish
_PROGRAM_COLOURS = {"dedicated": "#4c78a8", "dedicated keep": "#72b7b2", "gather": "#e45756", "adamw": "#7f7f7f"}


def pick_ranks(trace: StepTrace) -> dict[int, str]:
    """The ranks that compute longest, median and shortest during the step, with what to call them."""
    start, end = trace.window
    busy = sum(
        (np.clip(s.end, start, end) - np.clip(s.start, start, end) for s in trace.spans if s.stream == COMPUTE),
        start=np.zeros_like(trace.spans[0].end),
    )
    order = np.argsort(busy, kind="stable")[::-1]
    chosen: dict[int, str] = {}
    for position, name in ((0, "slowest"), (len(order) // 2, "median"), (len(order) - 1, "fastest")):
        chosen.setdefault(int(order[position]), name)
    return chosen


def draw_timeline(
    trace: StepTrace, path: str | Path, *, title: str = "", ranks: Mapping[int, str] | None = None
) -> None:
    """Draw one step of a few ranks, a lane per stream, as a PNG; time 0 is the end of the update before.

    The beginning of the next step is shown too: it is there that publication shows.

    Args:
        ranks: rank to what to call it; default :func:`pick_ranks`.

    Raises:
        ValueError: a rank that was not simulated, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    chosen = dict(ranks) if ranks is not None else pick_ranks(trace)
    world = len(trace.spans[0].end)
    for rank in chosen:
        if not 0 <= rank < world:
            raise ValueError(f"ranks: there is no rank {rank} among {world}; use 0 … {world - 1}")
    begin, end = trace.window
    margin = 0.12 * (end - begin)
    shown = [s for s in trace.spans if s.end.max() > begin - margin / 3 and s.start.min() < end + margin]
    used = {s.stream for s in shown if np.any(s.end > s.start)}
    lanes = [lane for lane in _LANES if lane in used]
    least = _LEAST_WIDTH * (end - begin)
    scale, unit = (1e3, "ms") if end - begin < 10 else (1.0, "s")
    figure = new_figure(13, 1.4 + 0.34 * len(chosen) * (len(lanes) + 0.7), layout="tight")
    axis = figure.subplots()
    ticks: list[tuple[float, str]] = []
    drawn: set[str] = set()
    for place, (rank, name) in enumerate(chosen.items()):
        for index, lane in enumerate(lanes):
            row = place * (len(lanes) + 0.7) + index
            ticks.append((row, f"rank {rank} ({name})  {lane}" if index == 0 else lane))
            for span in shown:
                first, last = span.start[rank], span.end[rank]
                if span.stream != lane or last <= first:
                    continue
                drawn.add(span.name)
                colour = _BARS[span.name][0]
                bar = [((first - begin) * scale, max(last - first, least) * scale)]
                outline = "white" if lane == COMPUTE else colour
                axis.broken_barh(bar, (row - 0.4, 0.8), facecolors=colour, edgecolor=outline, linewidth=0.2)
    for edge in (0.0, (end - begin) * scale):
        axis.axvline(edge, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(-margin / 3 * scale, (end - begin + margin) * scale)
    axis.set_yticks([row for row, _ in ticks], [text for _, text in ticks], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"{unit}; dotted: the slowest rank has finished its update")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    texts: dict[str, str] = {}
    for name, (colour, text) in _BARS.items():
        if name in drawn:
            texts.setdefault(text, colour)
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=text) for text, colour in texts.items()]
    axis.legend(handles=handles, ncols=6, loc="lower center", bbox_to_anchor=(0.45, 1.0), frameon=False, fontsize=8)
    _save(figure, (axis,), path)


def draw_scaling(
    worlds: Sequence[int], steps_s: Mapping[str, Sequence[float]], path: str | Path, *, title: str = ""
) -> None:
    """Draw seconds per step and the overhead over AdamW against ranks, a line per program, as a PNG.

    Args:
        steps_s: program, perhaps with a variant after ", " (dashed), to its seconds at each of ``worlds``. Overheads
            are against ``adamw`` of the same variant.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = new_figure(12, 4.5, layout="tight")
    left, right = figure.subplots(1, 2)
    for name, seconds in steps_s.items():
        program, _, variant = name.partition(", ")
        look = {
            "color": _PROGRAM_COLOURS[program],
            "linestyle": "--" if variant else "-",
            "marker": "o",
            "markersize": 4,
            "label": name,
        }
        left.plot(worlds, [1e3 * s for s in seconds], **look)
        base = steps_s.get(f"adamw, {variant}" if variant else "adamw")
        if program.startswith("dedicated") and base is not None:
            right.plot(worlds, [100 * (s / b - 1) for s, b in zip(seconds, base, strict=True)], **look)
    left.set_ylim(bottom=0)
    left.set_ylabel("ms per step, predicted")
    right.set_ylabel("dedicated over adamw, %, predicted")
    right.set_ylim(*_OVERHEAD_SHOWN)
    right.axhline(1, color="black", linewidth=0.8, linestyle=":")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(worlds, [str(world) for world in worlds])
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(figure, (left, right), path)


def _save(figure: Any, axes: tuple[Any, ...], path: str | Path) -> None:
    for axis in axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, path)
