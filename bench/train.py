"""Trains a small byte-level GPT over local processes, by AdamW, by Muon that gathers, and by dmuon.

The text is that of Python's standard library. `make train` runs this file, in a few minutes on two idle cores.
`--long` trains a larger model for more steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import torch
from common.options import parse
from common.ranks import run_ranks
from common.results import head, write_json
from training import report
from training.settings import LONG, OPTIMIZERS, SHORT, Job, Settings


def work(rank: int, job: Job) -> None:
    """One rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from training.trainer import Trainer  # here: a slow import, which the parent does without

    Trainer(rank, job).train()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def configure(parser: argparse.ArgumentParser, args: Settings) -> Settings:
    """The settings that the command line asks for; what does not fit together names its option."""

    def refuse(option: str, problem: str) -> None:
        parser.error(f"argument {option}: {problem}")

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = args.device if args.device != "auto" else "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        refuse("--device", "no CUDA GPU is available")
    world = args.world or (gpus if device == "cuda" else 2)
    if device == "cuda" and world > gpus:
        refuse("--world", f"{world} processes need {world} GPUs, there are {gpus}; or use --device cpu")
    for name in ("lr_adamw", "lr_dmuon"):
        if not 0.0 < getattr(args, name) < float("inf"):
            refuse("--" + name.replace("_", "-"), "must be a positive number")
    sizes = {name: getattr(args, name) or value for name, value in (LONG if args.long else SHORT).items()}
    if sizes["width"] % (2 * args.heads):
        refuse("--width", f"{sizes['width']} is not a multiple of twice the {args.heads} heads")
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    return replace(args, world=world, device=device, dtype=dtype, **sizes)


def prepare(parser: argparse.ArgumentParser, out: Path, resuming: bool, settings: Settings) -> None:
    """Empties the output folder, or, to resume, checks that it belongs to the same settings."""
    config = out / "config.json"
    if resuming:
        if not config.exists():
            parser.error(f"argument --resume: {out} holds no interrupted run")
        before = json.loads(config.read_text())
        for name, value in settings.fixed.items():
            if before.get(name) != value:
                option = "--" + name.replace("_", "-")
                parser.error(f"argument {option}: {value}, but {out} was started with {before.get(name)}")
        return
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    for name in ("metrics.jsonl", "loss.png"):
        (out / name).unlink(missing_ok=True)
    config.write_text(json.dumps(settings.fixed, indent=2) + "\n")


def resume(job: Job) -> Job | None:
    """The job from its last checkpoint on, or `None` where it had ended."""
    if report.find_run(report.read(job.metrics), job.optimizer, job.seed).result is not None:
        return None
    checkpoints = sorted(job.checkpoints.glob("step-*"))
    step = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else -1
    report.rewind(job.metrics, job.optimizer, job.seed, step)
    return replace(job, resume_from=checkpoints[-1] if checkpoints else None)


def main(argv: list[str] | None = None) -> int:
    """Trains every optimizer on every seed, prints the table and writes the plot."""
    parser, args = parse(Settings, __doc__, argv)
    settings, out = configure(parser, args), Path(args.out)
    prepare(parser, out, args.resume, settings)
    runs = [(optimizer, seed) for seed in args.seeds for optimizer in args.optimizers]
    resource_tracker.ensure_running()  # the first start of a process does so otherwise, and unblocks SIGINT
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for optimizer, seed in runs:
            job = Job(optimizer, seed, settings)
            left = resume(job) if args.resume else job
            if left is not None:
                print(f"{OPTIMIZERS[optimizer]}, seed {seed} …", file=sys.stderr, flush=True)
                run_ranks(settings.world, work, left, device=settings.device)
    except SystemExit:
        print(f"\ninterrupted; --resume goes on from the last checkpoint in {out}", file=sys.stderr)
        for child in multiprocessing.active_children():
            child.kill()
        raise
    records = report.read(out / "metrics.jsonl")
    results = [report.find_run(records, optimizer, seed) for optimizer, seed in runs]
    print(f"\n{report.table(results)}\n\n{report.explain(results, *settings.size)}\n")
    if args.json is not None:
        said = head(Path(__file__).name, sys.argv[1:] if argv is None else argv)
        write_json(args.json, {**said, "settings": settings.fixed, "rows": report.rows(results)})
    report.plot(results, out / "loss.png")
    print(f"metrics: {out / 'metrics.jsonl'}\nplot:    {out / 'loss.png'}")
    return 0


def _interrupt(number: int, _frame: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not disturb the ending of the children
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
