"""Metrics of training runs: a JSONL file, a table, and a plot of loss against step and wall time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from dmuon.platform.files import new_figure, save_png

Record = dict[str, Any]
WARMUP_STEPS = 5  # not timed: allocation, first use of each kernel
BASELINE = "adamw"


@dataclass(frozen=True, slots=True)
class Run:
    """One optimizer on one seed: its step records, its evaluations and its result record, if it ended."""

    optimizer: str
    seed: int
    steps: list[Record]
    evaluations: list[Record]
    result: Record | None

    @property
    def step_ms(self) -> float:
        return _median_ms(self.steps, "step_ms")

    @property
    def optimizer_ms(self) -> float:
        return _median_ms(self.steps, "optimizer_ms")

    @property
    def loss(self) -> float:
        """Final validation loss, in nats per byte."""
        return float(self.evaluations[-1]["val_loss"])


def append(path: Path, records: Iterable[Record]) -> None:
    """Appends one line per record, on disk when it returns."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """The records of a metrics file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rewind(path: Path, optimizer: str, seed: int, step: int) -> None:
    """Removes what a run recorded after `step`, which a resumed run records again."""
    kept = [
        record
        for record in read(path)
        if (record["optimizer"], record["seed"]) != (optimizer, seed)
        or (record["step"] <= step and record["event"] != "result")
    ]
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    append(temporary, kept)
    os.replace(temporary, path)


def find_run(records: Iterable[Record], optimizer: str, seed: int) -> Run:
    """The records of one run."""
    events: dict[str, list[Record]] = {"step": [], "eval": [], "result": []}
    for record in records:
        if (record["optimizer"], record["seed"]) == (optimizer, seed):
            events[record["event"]].append(record)
    return Run(optimizer, seed, events["step"], events["eval"], next(iter(events["result"]), None))


def format_table(runs: Sequence[Run]) -> str:
    """The comparison: one row per run, and means and per-seed differences when there are several seeds."""
    header = ("optimizer", "seed", "val loss", "ms/step", "optimizer ms", "overhead", "owner balance")
    rows = [header]
    seeds = sorted({run.seed for run in runs})
    by_key = {(run.optimizer, run.seed): run for run in runs}
    for run in sorted(runs, key=lambda run: run.seed):
        balance = run.result["balance"] if run.result else None
        rows.append(
            (
                run.optimizer,
                str(run.seed),
                f"{run.loss:.4f}",
                f"{run.step_ms:.1f}",
                f"{run.optimizer_ms:.1f}",
                _overhead(run.step_ms, by_key.get((BASELINE, run.seed))),
                "-" if balance is None else f"{balance:.3f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if len(seeds) > 1:
        lines += ["", *_format_seeds(runs, by_key, seeds)]
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes a PNG: training and validation loss against step, and against training time."""
    figure = new_figure(12, 4.5, layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    optimizers = list(dict.fromkeys(run.optimizer for run in runs))
    first_seed = runs[0].seed
    for run in runs:
        color = f"C{optimizers.index(run.optimizer)}"
        label = run.optimizer if run.seed == first_seed else None
        for axis, key in zip(axes, ("step", "train_seconds"), strict=True):
            axis.plot(_column(run.steps, key), _column(run.steps, "loss"), color=color, alpha=0.25, lw=1)
            axis.plot(
                _column(run.evaluations, key),
                _column(run.evaluations, "val_loss"),
                color=color,
                marker="o",
                ms=3,
                label=label,
            )
    axes[0].set(xlabel="step", ylabel="loss (nats per byte)", title="thin: training, dots: validation")
    axes[1].set(xlabel="training time (s)")
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    save_png(figure, path)


def _column(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records]


def _median_ms(steps: Sequence[Record], key: str) -> float:
    return median(_column(steps[WARMUP_STEPS:] or steps, key))


def _overhead(step_ms: float, baseline: Run | None) -> str:
    return "-" if baseline is None else f"{step_ms / baseline.step_ms - 1:+.1%}"


def _format_seeds(runs: Sequence[Run], by_key: dict[tuple[str, int], Run], seeds: list[int]) -> list[str]:
    lines = []
    for optimizer in dict.fromkeys(run.optimizer for run in runs):
        chosen = [by_key[optimizer, seed] for seed in seeds]
        losses = [run.loss for run in chosen]
        lines.append(
            f"{optimizer}: mean val loss {mean(losses):.4f} (sd {stdev(losses):.4f}), "
            f"{mean(run.step_ms for run in chosen):.1f} ms/step over {len(seeds)} seeds"
        )
        if optimizer != BASELINE and (BASELINE, seeds[0]) in by_key:
            differences = [by_key[optimizer, s].loss - by_key[BASELINE, s].loss for s in seeds]
            each = ", ".join(f"{s}: {d:+.4f}" for s, d in zip(seeds, differences, strict=True))
            lines.append(f"{optimizer} - {BASELINE} by seed: {each}; mean {mean(differences):+.4f}")
    return lines
