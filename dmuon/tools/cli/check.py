"""``dmuon-check``: verify dmuon on these machines and this back end, one line per check; exit status 0 if none failed.

    torchrun --nproc-per-node 8 --no-python dmuon-check

Trains a small model on every topology that the ranks can form, compares it with one process, and counts collectives.

    dmuon-check --first-run

on a machine with new GPUs: the same after kernels against fp64 and the replay of a CUDA graph, on ranks that it starts
itself, one a GPU. All of it goes into one file. ``--device cpu`` runs it without a GPU, on small sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from dmuon.tools.check.device import Machine, check_kernels, cuda_fault, describe
from dmuon.tools.check.report import Board, Line, Ranks, Stopped
from dmuon.tools.check.training import TOPOLOGIES, Layout, Reference, check_layout, layout_of, train_alone
from dmuon.tools.cli.arguments import FAILED, BadArgument, Parser, number, removed, require_target, subset

_ALWAYS = "all dtypes and both residencies are tried; write fewer --topologies"
_REMOVED = {
    **dict.fromkeys(("--quick", "--reshard", "--keep", "--dtype", "--budget"), _ALWAYS),
    **dict.fromkeys(("--width", "--layers", "--tokens"), "write bench/step.py, which times a step"),
    "--limit": "leave it out: a difference beyond its limit is an error",
    "--ranks": "write torchrun --nproc-per-node N --no-python dmuon-check --first-run",
}
# The program of a rank. Where it starts counts for nothing: a clone's folder dmuon/ would hide the installed package.
_RANK = "import sys; sys.path = [x for x in sys.path if x]; from dmuon.tools.cli.check import main; sys.exit(main())"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 where a check failed, or 2 after a message on stderr."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    kind = arguments.device or ("cuda" if arguments.first_run or torch.cuda.is_available() else "cpu")
    if kind == "cuda" and (fault := cuda_fault()):
        parser.error(fault)
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    name = arguments.json or ("dmuon-first-run.json" if arguments.first_run else None)
    path = Path(name) if name and os.environ.get("RANK", "0") == "0" else None
    if path is not None:
        try:
            require_target("--json", path)
        except BadArgument as error:
            parser.error(str(error))
    if arguments.first_run and "RANK" not in os.environ:
        command = launch(gpus, sys.argv[1:] if argv is None else argv)
        os.execv(command[0], command)
    here, many = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = arguments.first_run and gpus == 1 and many > 1  # NCCL refuses two ranks on one GPU, gloo does not
    if gpus and here >= gpus and not shared:
        parser.error(f"no CUDA device {here}, {gpus} are here; start fewer ranks per host")
    device = torch.device(kind, here % gpus) if gpus else torch.device(kind)
    backend = "nccl" if gpus and not shared else "gloo"
    try:
        ranks = Ranks(backend, timedelta(seconds=arguments.timeout))
    except (RuntimeError, ValueError, OSError) as error:
        parser.error(f"the ranks did not come together: {error}")
    board = Board(ranks, path)
    try:
        hosts = describe(board, ranks.gather(Machine.here(device, backend)))
        if ranks.world == 1:
            board.add(Line("environment", "several ranks: torchrun --nproc-per-node 8 --no-python dmuon-check"))
        if not board.failed:  # ranks that are not alike would differ, or hang
            if arguments.first_run:
                check_kernels(board, device)
            for layout, reference in _layouts(board, device, hosts, arguments.topologies):
                with ranks.process_group():
                    board.judge("training", str(layout), partial(check_layout, layout, reference))
    except Stopped as stop:
        board.add(Line("all further", f"the ranks no longer run the same collectives after {stop}", status="skip"))
        board.count()
    except Exception as error:  # the ranks can no longer be brought together: end at once, and torchrun the others
        print(f"dmuon-check: rank {ranks.rank}: {type(error).__name__}: {error}", file=sys.stderr)
    else:
        board.count()
        return FAILED if board.failed else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)  # without destructors: those of process groups wait for ranks that may be gone


def launch(gpus: int, arguments: Sequence[str]) -> list[str]:
    """The command of a first run: a rank for each of up to 8 GPUs; two on a single one, and on the CPU."""
    ranks = f"--nproc-per-node={min(gpus, 8) if gpus > 1 else 2}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
    return [*torchrun, "--no-python", sys.executable, "-c", _RANK, *arguments]


def _layouts(
    board: Board, device: torch.device, hosts: int, topologies: Sequence[str]
) -> Iterator[tuple[Layout, Reference]]:
    """What is tried, and what one process makes of it."""
    references: dict[torch.dtype, Reference] = {}
    for name in topologies:
        layout = layout_of(name, board.ranks.world, hosts)
        if isinstance(layout, str):
            board.add(Line("parity", layout, status="skip", where=name))
            continue
        residencies = (
            (False, True) if dict(layout.dims).get("shard", 1) > 1 else (True,)
        )  # without shards nothing can be freed
        layouts = [replace(layout, keep=keep) for keep in residencies]
        if device.type != "cpu":  # where dmuon's choice for Newton-Schulz is fp16
            layouts += [replace(each, ns_dtype=None) for each in layouts]
        layouts.append(replace(layouts[0], dtype=torch.bfloat16))
        for each in layouts:
            if each.dtype not in references:
                references[each.dtype] = train_alone(board.ranks.world, device, each.dtype)
            yield each, references[each.dtype]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("dmuon-check", __doc__ or "", argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-run", action="store_true", help="on new GPUs: all there is to check, into one file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda (NCCL) if there is any, else cpu")
    fitting = f"default: {','.join(TOPOLOGIES)}, as far as they fit the number of ranks"
    parser.add_argument("--topologies", type=subset(TOPOLOGIES), default=TOPOLOGIES, help=fitting)
    parser.add_argument("--json", metavar="FILE", help="write all lines there (--first-run: dmuon-first-run.json)")
    limit = number("number of seconds from 1 to 1e6", lambda value: 1 <= value <= 1e6)
    parser.add_argument("--timeout", type=limit, default=60.0, help="seconds for a collective (default: 60)")
    for name, instead in _REMOVED.items():
        parser.add_argument(name, nargs="?", const="", type=removed(instead), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
