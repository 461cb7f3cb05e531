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

from common.results import columns

from training.settings import OPTIMIZERS

Record = dict[str, Any]
WARMUP_STEPS = 5  # not timed: allocation, first use of each kernel
BASELINE = "adamw"
REACHED = {"steps": "step", "seconds": "train_seconds"}  # until AdamW's last loss
COLUMNS = {"loss": ".4f", "steps": ".0f", "seconds": ".0f", "ms a step": ".0f", "exposed ms": ".0f", "peak MB": ".0f"}
PREDICTED = Path(__file__).parents[1] / "results" / "scaling-h200.json"


@dataclass(frozen=True, slots=True)
class Run:
    """One optimizer on one seed: its steps, its evaluations, its result if it ended, and its starts: one, or more."""

    optimizer: str
    seed: int
    steps: list[Record]
    evaluations: list[Record]
    result: Record | None
    starts: Sequence[Record] = ()

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
    events: dict[str, list[Record]] = {"start": [], "step": [], "eval": [], "result": []}
    for record in records:
        if (record["optimizer"], record["seed"]) == (optimizer, seed):
            events[record["event"]].append(record)
    return Run(optimizer, seed, events["step"], events["eval"], next(iter(events["result"]), None), events["start"])


def rows(runs: Sequence[Run]) -> dict[str, Record]:
    """Of each run what the table says, by its title."""
    several = len({run.seed for run in runs}) > 1
    baselines = {run.seed: run for run in runs if run.optimizer == BASELINE}
    found = {}
    for run in sorted(runs, key=lambda run: run.seed):
        row = found[OPTIMIZERS[run.optimizer] + f", seed {run.seed}" * several] = {
            "loss": run.loss,
            "losses": {f"step {record['step']}": record["val_loss"] for record in run.evaluations},
            "ms a step": run.step_ms,
            "exposed ms": run.exposed_ms,
            "started at": [record["step"] for record in run.starts],
        }
        if run.result is not None:
            row["peak MB"] = run.result["peak_mb"]
        if run.seed in baselines:
            baseline = baselines[run.seed]
            row["difference"] = run.loss - baseline.loss
            row |= {name: run.reaches(baseline.loss, key) for name, key in REACHED.items()}
    return {name: {key: value for key, value in row.items() if value is not None} for name, row in found.items()}


def table(runs: Sequence[Run]) -> str:
    """A row for each run, and the mean of every optimizer where there are several seeds."""
    text = columns(rows(runs), COLUMNS, "optimizer")
    for optimizer in dict.fromkeys(run.optimizer for run in runs):
        losses = [run.loss for run in runs if run.optimizer == optimizer]
        if len(losses) > 1:
            text += f"\n{optimizer}: mean validation loss {mean(losses):.4f} (sd {stdev(losses):.4f})"
    return text


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
    from matplotlib.figure import Figure  # which who only times a step does without

    figure = Figure(figsize=(12, 4.5), layout="tight")
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
    figure.savefig(path, dpi=110)


def _column(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records]


def _median_ms(steps: Sequence[Record], key: str) -> float:
    return median(_column(steps[WARMUP_STEPS:] or steps, key))
