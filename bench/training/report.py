"""Metrics of training runs: a JSONL file, a table, and a plot of loss against step and wall time."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from common.figures import new_figure, save_png

from training.settings import OPTIMIZERS

Record = dict[str, Any]
WARMUP_STEPS = 5  # not timed: allocation, first use of each kernel
BASELINE = "adamw"
PREDICTED = Path(__file__).parents[1] / "results" / "scaling-h200.json"


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
    def exposed_ms(self) -> float:
        """What a step takes beyond one that ends before the optimizer."""
        return self.step_ms - median(r["bare_ms"] for r in self.steps if "bare_ms" in r)

    @property
    def loss(self) -> float:
        """Final validation loss, in nats per byte."""
        return float(self.evaluations[-1]["val_loss"])

    def reaches(self, loss: float, key: str) -> float | None:
        """The step, or the second of training, at which its validation loss comes down to ``loss``.

        Between two evaluations the loss is taken to fall evenly.
        """
        for before, after in zip(self.evaluations, self.evaluations[1:], strict=False):
            if after["val_loss"] <= loss:
                share = (before["val_loss"] - loss) / (before["val_loss"] - after["val_loss"])
                return float(before[key] + share * (after[key] - before[key]))
        return None


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
    rows = [
        ("", "validation", "to AdamW's last loss:", "ms a", "exposed", "peak"),
        ("optimizer", "loss", "steps, seconds", "step", "optimizer", "MB"),
    ]
    seeds = sorted({run.seed for run in runs})
    by_key = {(run.optimizer, run.seed): run for run in runs}
    for run in sorted(runs, key=lambda run: run.seed):
        baseline = by_key.get((BASELINE, run.seed))
        rows.append(
            (
                OPTIMIZERS[run.optimizer] + (f", seed {run.seed}" if len(seeds) > 1 else ""),
                f"{run.loss:.4f}",
                "-" if baseline is None else _reached(run, baseline),
                f"{run.step_ms:.0f}",
                f"{run.exposed_ms:.0f} ms",
                "-" if run.result is None else f"{run.result['peak_mb']:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    lines.insert(2, "  ".join("-" * width for width in widths))
    if len(seeds) > 1:
        lines += ["", *_format_seeds(runs, by_key, seeds)]
    return "\n".join(lines)


def explain(runs: Sequence[Run], parameters: int, tokens: int) -> str:
    """What of the table carries over to a model of a usual size, in one sentence or two."""
    muon = [run for run in runs if run.optimizer in ("dmuon", "dedicated")]
    baseline = {run.seed: run.step_ms for run in runs if run.optimizer == BASELINE}
    over = [run.step_ms / baseline[run.seed] - 1 for run in muon if run.seed in baseline]
    if not over:
        return ""
    rows = json.loads(PREDICTED.read_text())
    (predicted,) = [row for row in rows["rows"] if (row["model"], row["ranks"]) == ("llama-3-8b", 64)]
    here = f"{min(over):+.0%}" + (f" to {max(over):+.0%}" if len(over) > 1 else "")
    text = (
        f"A step with dmuon takes {here} against AdamW's here, since {parameters / 1e6:.1f} M parameters see only "
        f"{tokens:,} tokens a step, on cores that also carry the messages; the share falls as tokens grow. "
        f"Predicted for Llama-3-8B on 64 H200: {predicted['overhead']:+.1%} ± {rows['error']:.1%} "
        "(dmuon-plan examples/models/llama-3-8b.json --world 64 --tokens 8192 --recommend)."
    )
    return textwrap.fill(text.replace("%", " %"), 98)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes a PNG: validation loss against step, and against training time, and AdamW's last one as a line."""
    figure = new_figure(12, 4.5, layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    optimizers = list(dict.fromkeys(run.optimizer for run in runs))
    first_seed = runs[0].seed
    for run in runs:
        color = f"C{optimizers.index(run.optimizer)}"
        label = OPTIMIZERS[run.optimizer] if run.seed == first_seed else None
        for axis, key in zip(axes, ("step", "train_seconds"), strict=True):
            losses = _column(run.evaluations, "val_loss")
            axis.plot(_column(run.evaluations, key), losses, color=color, marker="o", ms=3, label=label)
    lasts = [run.loss for run in runs if run.optimizer == BASELINE]
    for axis in axes if lasts else ():
        axis.axhline(mean(lasts), color="gray", ls="--", lw=1, label="AdamW's last loss")
    # Where they differ: not the fall from an untrained model, which is the same for all.
    later = [e["val_loss"] for run in runs for e in run.evaluations[len(run.evaluations) // 4 :]]
    margin = 0.05 * (max(later) - min(later)) + 1e-3
    axes[0].set(
        xlabel="step", ylabel="validation loss (nats per byte)", ylim=(min(later) - margin, max(later) + margin)
    )
    axes[1].set(xlabel="training time (s)")
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    save_png(figure, path)


def _column(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records]


def _median_ms(steps: Sequence[Record], key: str) -> float:
    return median(_column(steps[WARMUP_STEPS:] or steps, key))


def _reached(run: Run, baseline: Run) -> str:
    """Steps and seconds until AdamW's last loss, and the seconds as a part of AdamW's."""
    step, seconds = (run.reaches(baseline.loss, key) for key in ("step", "train_seconds"))
    if step is None or seconds is None:
        return "not reached"
    return f"{step:.0f}, {seconds:.0f} ({seconds / baseline.evaluations[-1]['train_seconds']:.2f} of AdamW's)"


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
