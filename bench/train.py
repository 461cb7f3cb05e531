"""Trains a small byte-level GPT on local text over local processes, by AdamW, by Muon that gathers, and by dmuon.

`make train` runs this file, in about three minutes on two cores. `--long` trains a larger model for more steps.
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
import traceback
from dataclasses import asdict, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from training import report
from training.data import DataError, load_corpus
from training.settings import DTYPES, OPTIMIZERS, Job, Settings

SHORT = {"steps": 120, "layers": 3, "width": 192}
LONG = {"steps": 350, "layers": 4, "width": 256}


def work(rank: int, settings: Settings, job: Job, port: int) -> None:
    """One rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    backend = "gloo"
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        from training.trainer import Trainer  # here: a slow import, which the parent does without

        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=settings.world)
        Trainer(rank, settings, job).train()
        dist.destroy_process_group()
    except BaseException:
        sys.stderr.write(f"\nrank {rank} of {job.optimizer}, seed {job.seed}:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)  # other ranks may wait for this one: no orderly shutdown of the process group


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch(settings: Settings, job: Job) -> None:
    """Runs a job in `world` processes; none of them is left when this returns or raises.

    Raises:
        SystemExit: a process failed; the others were ended.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=work, args=(rank, settings, job, store.port), daemon=True)
        for rank in range(settings.world)
    ]
    try:
        resource_tracker.ensure_running()  # the first start of a process does so otherwise, and unblocks SIGINT
        # Ctrl-C goes to the whole group of processes: one that is yet importing would print its innards.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it, and keep it
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        running = list(processes)
        while running:
            wait([process.sentinel for process in running])
            for process in [process for process in running if not process.is_alive()]:
                running.remove(process)
                if process.exitcode != 0:
                    rank, code = processes.index(process), process.exitcode
                    sys.exit(f"rank {rank} ended with exit code {code}; the other ranks were ended")
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
        for child in multiprocessing.active_children():
            child.join(5)
            if child.is_alive():
                child.kill()
                child.join()


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line; a wrong value ends the program with exit code 2 and the option's name."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--long", action="store_true", help="350 steps of 4 layers of width 256, in place of the smaller defaults")
    add("--steps", type=_positive, help=f"optimizer steps per run (default: {SHORT['steps']})")
    add("--world", type=_positive, help="processes (default: the number of GPUs, or 2 on the CPU)")
    add("--data", type=Path, help="a text file or a folder (default: the standard library's sources)")
    add("--optimizers", type=_names, default=list(OPTIMIZERS), metavar="NAME,...", help=",".join(OPTIMIZERS))
    add("--seed", type=_seed, default=0, help="of the initial weights and of the data order")
    add("--seeds", type=_seeds, metavar="SEED,...", help="several seeds, one after the other")
    add("--layers", type=_positive, help=f"(default: {SHORT['layers']})")
    add("--width", type=_positive, help=f"(default: {SHORT['width']})")
    add("--heads", type=_positive, default=4)
    add("--context", type=_positive, default=128, help="bytes per window (default: %(default)s)")
    add("--batch", type=_positive, default=8, help="windows per process and step (default: %(default)s)")
    # Chosen by the validation loss after 150 steps of the default model, seed 0.
    # AdamW: 1.932 at 1e-3, 1.903 at 1.5e-3, 1.930 at 2e-3, 2.236 at 4e-3.
    # dmuon, AdamW part at 1.5e-3: 1.961 at 2e-3, 1.828 at 4e-3, 1.786 at 8e-3, 1.803 at 1.6e-2.
    add("--lr-adamw", type=_rate, default=1.5e-3, help="also of dmuon's AdamW part (default: %(default)s)")
    add("--lr-dmuon", type=_rate, default=8e-3, help="of the block matrices (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/train"), help="folder (default: %(default)s)")
    add("--resume", action="store_true", help="go on in --out after an interruption")
    add("--checkpoint-every", type=_positive, default=100, metavar="STEPS", help="(default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the computation (auto: bfloat16 on CUDA)",
    )
    args = parser.parse_args(argv)
    for name, value in (LONG if args.long else SHORT).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return parser, args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(map(_seed, text.split(","))))


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in OPTIMIZERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown, choose from {', '.join(OPTIMIZERS)}")
    return names


def configure(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Settings:
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
    if args.width % (2 * args.heads):
        refuse("--width", f"{args.width} is not a multiple of twice the {args.heads} heads")
    if args.out.exists() and not args.out.is_dir():
        refuse("--out", f"{args.out} is not a folder")
    try:
        corpus = load_corpus(args.data, args.context)
    except (DataError, OSError) as error:
        refuse("--data", str(error))
    else:
        print(f"{corpus.name}: {len(corpus.train):,} bytes to train, {len(corpus.validation):,} to validate on")
    return Settings(
        data=str(args.data) if args.data else None,
        world=world,
        device=device,
        dtype=args.dtype if args.dtype != "auto" else "bfloat16" if device == "cuda" else "float32",
        **{
            name: getattr(args, name)
            for name in ("steps", "layers", "width", "heads", "context", "batch", "lr_adamw", "lr_dmuon")
        },
    )


def prepare(parser: argparse.ArgumentParser, args: argparse.Namespace, settings: Settings) -> None:
    """Empties the output folder, or, to resume, checks that it belongs to the same settings."""
    config = args.out / "config.json"
    if args.resume:
        if not config.exists():
            parser.error(f"argument --resume: {args.out} holds no interrupted run")
        before = json.loads(config.read_text())
        for name, value in asdict(settings).items():
            if before.get(name) != value:
                option = "--" + name.replace("_", "-")
                parser.error(f"argument {option}: {value}, but {args.out} was started with {before.get(name)}")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.out / "checkpoints", ignore_errors=True)
    for name in ("metrics.jsonl", "loss.png"):
        (args.out / name).unlink(missing_ok=True)
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
    parser, args = parse(argv)
    settings = configure(parser, args)
    prepare(parser, args, settings)
    runs = [(optimizer, seed) for seed in args.seeds or [args.seed] for optimizer in args.optimizers]
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for optimizer, seed in runs:
            job = Job(optimizer, seed, args.out, args.checkpoint_every)
            left = resume(job) if args.resume else job
            if left is not None:
                print(f"{OPTIMIZERS[optimizer]}, seed {seed} …", file=sys.stderr, flush=True)
                launch(settings, left)
    except Interrupted as interruption:
        print(f"\ninterrupted; --resume goes on from the last checkpoint in {args.out}", file=sys.stderr)
        return 128 + interruption.number
    records = report.read(args.out / "metrics.jsonl")
    results = [report.find_run(records, optimizer, seed) for optimizer, seed in runs]
    print(f"\n{report.format_table(results)}\n\n{report.explain(results, *settings.size)}\n")
    report.plot(results, args.out / "loss.png")
    print(f"metrics: {args.out / 'metrics.jsonl'}\nplot:    {args.out / 'loss.png'}")
    return 0


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not disturb the ending of the children
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main())
