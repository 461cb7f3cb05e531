"""Trains a small byte-level GPT on local text over local processes, by AdamW, by Muon that gathers, and by dmuon.

`make train` runs this file, in a few minutes on two idle cores. `--long` trains a larger model for more steps.
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
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

import torch
from common.options import parse
from common.ranks import run_ranks
from common.results import head, write_json
from training import report
from training.data import DataError, load_corpus
from training.settings import DTYPES, OPTIMIZERS, Job, Settings

SHORT = {"steps": 120, "layers": 3, "width": 192}
LONG = {"steps": 350, "layers": 4, "width": 256}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line; where it says nothing, the sizes are SHORT's or, with ``long``, LONG's.

    Attributes:
        world: 0: the number of GPUs, or 2 on the CPU.
        data: a text file or a folder; without it the standard library's sources.
        batch: windows per process and step, of ``context`` bytes each.
        lr_adamw: also of dmuon's AdamW part.
        lr_dmuon: of the block matrices.
        dtype: of the computation; ``auto`` is bfloat16 on CUDA.
        json: a file to write the table and the curves of the validation loss to.
    """

    long: bool = False
    steps: int = 0
    world: int = 0
    data: str | None = None
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    seeds: tuple[int, ...] = (0,)
    layers: int = 0
    width: int = 0
    heads: int = 4
    context: int = 128
    batch: int = 8
    # Chosen by the validation loss after 150 steps of the default model, seed 0.
    # AdamW: 1.932 at 1e-3, 1.903 at 1.5e-3, 1.930 at 2e-3, 2.236 at 4e-3.
    # dmuon, AdamW part at 1.5e-3: 1.961 at 2e-3, 1.828 at 4e-3, 1.786 at 8e-3, 1.803 at 1.6e-2.
    lr_adamw: float = 1.5e-3
    lr_dmuon: float = 8e-3
    out: str = "runs/train"
    resume: bool = False
    checkpoint_every: int = 100
    device: str = "auto"
    dtype: str = "auto"
    json: str | None = None


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def work(rank: int, settings: Settings, job: Job) -> None:
    """One rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from training.trainer import Trainer  # here: a slow import, which the parent does without

    Trainer(rank, settings, job).train()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def configure(parser: argparse.ArgumentParser, args: Arguments) -> Settings:
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
    if Path(args.out).exists() and not Path(args.out).is_dir():
        refuse("--out", f"{args.out} is not a folder")
    try:
        corpus = load_corpus(Path(args.data) if args.data else None, args.context)
    except (DataError, OSError) as error:
        refuse("--data", str(error))
    else:
        print(f"{corpus.name}: {len(corpus.train):,} bytes to train, {len(corpus.validation):,} to validate on")
    return Settings(
        data=args.data,
        world=world,
        device=device,
        dtype=args.dtype if args.dtype != "auto" else "bfloat16" if device == "cuda" else "float32",
        **sizes,
        **{name: getattr(args, name) for name in ("heads", "context", "batch", "lr_adamw", "lr_dmuon")},
    )


def prepare(parser: argparse.ArgumentParser, out: Path, resuming: bool, settings: Settings) -> None:
    """Empties the output folder, or, to resume, checks that it belongs to the same settings."""
    config = out / "config.json"
    if resuming:
        if not config.exists():
            parser.error(f"argument --resume: {out} holds no interrupted run")
        before = json.loads(config.read_text())
        for name, value in asdict(settings).items():
            if before.get(name) != value:
                option = "--" + name.replace("_", "-")
                parser.error(f"argument {option}: {value}, but {out} was started with {before.get(name)}")
        return
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    for name in ("metrics.jsonl", "loss.png"):
        (out / name).unlink(missing_ok=True)
    config.write_text(json.dumps(asdict(settings), indent=2) + "\n")


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
    least = {"seeds": 0, **dict.fromkeys(("heads", "context", "batch", "checkpoint_every"), 1)}
    given = {word.partition("=")[0] for word in (sys.argv[1:] if argv is None else argv)}
    least |= {name: 1 for name in ("steps", "world", "layers", "width") if f"--{name}" in given}
    choices = {"optimizers": OPTIMIZERS, "device": ("auto", "cpu", "cuda"), "dtype": ("auto", *DTYPES)}
    parser, args = parse(Arguments, __doc__, argv, least=least, choices=choices)
    settings, out = configure(parser, args), Path(args.out)
    prepare(parser, out, args.resume, settings)
    runs = [(optimizer, seed) for seed in args.seeds for optimizer in args.optimizers]
    resource_tracker.ensure_running()  # the first start of a process does so otherwise, and unblocks SIGINT
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for optimizer, seed in runs:
            job = Job(optimizer, seed, out, args.checkpoint_every)
            left = resume(job) if args.resume else job
            if left is not None:
                print(f"{OPTIMIZERS[optimizer]}, seed {seed} …", file=sys.stderr, flush=True)
                run_ranks(settings.world, work, settings, left, device=settings.device)
    except Interrupted as interruption:
        print(f"\ninterrupted; --resume goes on from the last checkpoint in {out}", file=sys.stderr)
        for child in multiprocessing.active_children():
            child.kill()
        return 128 + interruption.number
    records = report.read(out / "metrics.jsonl")
    results = [report.find_run(records, optimizer, seed) for optimizer, seed in runs]
    print(f"\n{report.table(results)}\n\n{report.explain(results, *settings.size)}\n")
    if args.json is not None:
        said = head(Path(__file__).name, sys.argv[1:] if argv is None else argv)
        write_json(args.json, {**said, "settings": asdict(settings), "rows": report.rows(results)})
    report.plot(results, out / "loss.png")
    print(f"metrics: {out / 'metrics.jsonl'}\nplot:    {out / 'loss.png'}")
    return 0


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not disturb the ending of the children
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main())
