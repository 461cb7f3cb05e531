"""``dmuon-check``: verify dmuon on these machines and this back end, one line per check; exit status 0 if none failed.

    torchrun --nproc-per-node 8 --no-python dmuon-check

Trains a small model on every topology that the ranks can form and compares it with one process; counts collectives,
looks at who holds which bytes, and times a larger model beside FSDP2 with AdamW. Several machines: as any torchrun.

    dmuon-check --first-run

on one machine, without torchrun: everything that can be learned of dmuon on its GPUs in ten minutes, kernels, late
streams, memory and costs included, in one file. ``--device cpu`` runs the same without a GPU, on small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

import dmuon
from dmuon.check.environment import Machine, describe
from dmuon.check.first_run import first_run, launch_of
from dmuon.check.model import LARGE_VOCABULARY, Size
from dmuon.check.ranks import Ranks
from dmuon.check.report import Board, Stopped
from dmuon.check.run import Settings, run_checks
from dmuon.check.speed import Speed
from dmuon.check.topologies import TOPOLOGIES
from dmuon.cli.arguments import BAD_INPUT, FAILED, BadArgument, Parser, count, number, require_target, subset
from dmuon.platform.files import write_text

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_seconds = number("number of seconds from 1 to 1e6", lambda value: 1 <= value <= 1e6)
_factor = number("number of at least 0", lambda value: value >= 0)
_BUDGET = 570.0
_LAUNCH = "torchrun --nproc-per-node 8 --no-python dmuon-check"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 where a check failed, or 2 after a message on stderr. The same on all ranks."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.first_run:
        return _first_run(parser, arguments)
    for name in ("budget", "ranks"):
        if getattr(arguments, name) is not None:
            parser.error(f"--{name} goes with --first-run only")
    settings = _settings(parser, arguments)
    seconds = settings.timeout.total_seconds()
    try:
        ranks = Ranks("nccl" if settings.device.type == "cuda" else "gloo", settings.timeout)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"dmuon-check: the ranks did not come together: {error}", file=sys.stderr)
        return BAD_INPUT
    board = Board(ranks, 2 * seconds)
    try:
        return _run(board, settings, arguments.json)
    except Exception as error:  # the ranks can no longer be brought together: end at once, and torchrun the others
        print(f"dmuon-check: rank {ranks.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        _end(FAILED)


def _first_run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    for name in ("topologies", "reshard", "keep", "dtype", "limit", "quick", "width", "layers", "tokens"):
        if getattr(arguments, name) != parser.get_default(name):
            parser.error(f"--{name} does not go with --first-run; leave one of them out")
    if "RANK" in os.environ:
        parser.error("--first-run starts its own ranks; start it once, without torchrun")
    path = Path(arguments.json or "dmuon-first-run.json")
    try:
        require_target("--json", path)
        launch = launch_of(arguments.device or "cuda", torch.cuda.device_count(), arguments.ranks, arguments.timeout)
    except ValueError as error:
        parser.error(str(error))
    return 0 if first_run(launch, arguments.budget or _BUDGET, path) else FAILED


def _run(board: Board, settings: Settings, path: str | None) -> int:
    fault, machine = _look_around(settings, path if board.ranks.rank == 0 else None)
    answers = board.ranks.gather((fault, machine))
    faults = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(answers) if reason]
    if faults or any(m is None for _, m in answers):
        if board.ranks.rank == 0:
            print("dmuon-check: " + "; ".join(faults), file=sys.stderr)
        return BAD_INPUT
    hosts = describe(board, [m for _, m in answers])
    if board.ranks.world == 1:
        board.say("info", "environment", "1 rank", f"nothing travels here; over several ranks: {_LAUNCH}")
    stopped = board.failed > 0  # ranks that are not alike would differ, or hang
    if not stopped:
        try:
            run_checks(board, settings, hosts)
        except Stopped as stop:
            board.say("skip", "all further", "", f"the ranks no longer run the same collectives after {stop}")
            stopped = True
    failed, total = board.failed, sum(line.status in ("pass", "fail") for line in board.lines)
    board.say("fail" if failed else "pass", "all", "", f"{failed} of {total} failed" if failed else f"{total} checks")
    if path is not None and board.ranks.rank == 0:
        lines = [asdict(line) for line in board.lines]
        report = {"exit_status": FAILED if failed else 0, "world": board.ranks.world, "lines": lines}
        write_text(Path(path), json.dumps(report, indent=1) + "\n")
    if stopped:
        _end(FAILED)
    return FAILED if failed else 0


def _look_around(settings: Settings, path: str | None) -> tuple[str | None, Machine | None]:
    """What is wrong here, and what this rank runs on."""
    if path is not None:
        try:
            require_target("--json", Path(path))
        except BadArgument as error:
            return str(error), None
    device = settings.device
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return f"no CUDA device {device.index}, {torch.cuda.device_count()} are here; start fewer ranks per host", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what caches lack is a line of the report
        return None, Machine.here(device, dmuon.__version__)


def _end(status: int) -> NoReturn:
    """Without destructors: those of process groups wait for ranks that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dmuon-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(TOPOLOGIES)
    parser.add_argument("--first-run", action="store_true", help="on new GPUs: all there is to check, into one file")
    parser.add_argument("--budget", type=_seconds, help=f"of --first-run, seconds in all (default: {_BUDGET:g})")
    parser.add_argument("--ranks", type=count, help="of --first-run (default: one a GPU; 2 on one GPU, and on the CPU)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda (NCCL) if there is one, else cpu (gloo)"
    )
    parser.add_argument(
        "--topologies",
        type=subset(TOPOLOGIES),
        default=tuple(TOPOLOGIES),
        help=f"default: {names}, as far as they fit the number of ranks",
    )
    parser.add_argument("--reshard", action="store_true", help="only with weights freed after forward")
    parser.add_argument("--keep", action="store_true", help="only with weights kept after forward (default: both)")
    parser.add_argument("--dtype", type=subset(_DTYPES), help="of owned weights in forward (default: fp32,bf16)")
    parser.add_argument(
        "--json", metavar="FILE", help="write all lines there (of --first-run default: dmuon-first-run.json)"
    )
    parser.add_argument("--timeout", type=_seconds, default=60.0, help="seconds for a collective (default: 60)")
    parser.add_argument("--limit", type=_factor, default=1.0, help="factor on the limits of differences (default: 1)")
    parser.add_argument("--quick", action="store_true", help="fp32, weights freed after forward, no speed line")
    parser.add_argument("--width", type=count, help="of the model of the speed line (default: 512, on CUDA 2048)")
    parser.add_argument("--layers", type=count, help="of it (default: 4, on CUDA 8)")
    parser.add_argument("--tokens", type=count, help="per rank and step of it (default: 512, on CUDA 8192)")
    return parser


def _settings(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Settings:
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; take --device cpu")
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    for name in ("keep", "dtype", "width", "layers", "tokens"):
        if arguments.quick and getattr(arguments, name) != parser.get_default(name):
            parser.error(f"--{name} does not go with --quick; leave one of them out")
    dtypes = ("fp32",) if arguments.quick else arguments.dtype or tuple(_DTYPES)
    keep = (False, True) if arguments.keep == arguments.reshard else (arguments.keep,)
    width, layers, tokens = (2048, 8, 8192) if kind == "cuda" else (512, 4, 512)
    width = arguments.width or width
    size = Size(width, 4 * width, arguments.layers or layers, LARGE_VOCABULARY)
    return Settings(
        device=device,
        topologies=arguments.topologies,
        keep=(False,) if arguments.quick else keep,
        dtypes=tuple(_DTYPES[name] for name in dtypes),
        tolerance=arguments.limit,
        timeout=timedelta(seconds=arguments.timeout),
        speed=None if arguments.quick else Speed(size, arguments.tokens or tokens),
    )


if __name__ == "__main__":
    sys.exit(main())
