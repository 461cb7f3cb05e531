"""The processes of a section: started, watched, ended, and what each of them left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dmuon.check.ranks import Ranks
from dmuon.check.report import Board, Stopped
from dmuon.check.sections import SECTIONS
from dmuon.check.stage import Launch, Result, Stage
from dmuon.platform.files import read_json, read_tail, write_text

_GRACE_SECONDS = 6.0  # for the other ranks, once one has ended badly: to say what they see
_LAST_SECONDS = 3.0  # for stacks
_WITHIN = 0.85  # of the limit nothing new begins
_TAIL = 6000  # bytes of a rank's output


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank of a section ended.

    Attributes:
        fault: why it ended badly; empty if it did not.
        result: what it wrote; None if it came to nothing.
        output: the last of what it printed.
    """

    fault: str
    result: Result | None
    output: str


def run_ranks(section: str, launch: Launch, seconds: float) -> list[Ended]:
    """Run a section on fresh processes, by rank. After ``seconds`` at most, and a few for stacks, all have ended."""
    patience = timedelta(seconds=seconds + 60)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience
    )
    deadline = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dmuon-first-run-") as name:
        folder = Path(name)
        processes = [
            context.Process(target=_run_rank, args=(section, launch, rank, store.port, deadline, folder), daemon=True)
            for rank in range(launch.world)
        ]
        try:
            for process in processes:
                process.start()
            ends = _watch(processes, deadline)
        finally:
            _end(processes)
        return [_ended(processes[rank].exitcode, ends.get(rank), folder, rank) for rank in range(launch.world)]


def _watch(processes: Sequence[Any], deadline: float) -> dict[int, str]:
    """Wait for all; returns why, by rank, those that had not ended by themselves are to be ended."""
    reason = "no end within its time"
    while True:
        alive = {process.sentinel: rank for rank, process in enumerate(processes) if process.is_alive()}
        if not alive:
            return {}
        left = deadline - time.monotonic()
        if left <= 0:
            return dict.fromkeys(alive.values(), reason)
        wait(list(alive), timeout=left)
        bad = [rank for rank, process in enumerate(processes) if process.exitcode]
        if bad and deadline > time.monotonic() + _GRACE_SECONDS:
            deadline, reason = time.monotonic() + _GRACE_SECONDS, f"ended because rank {bad[0]} had"


def _end(processes: Sequence[Any]) -> None:
    """First by the signal at which they print stacks."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    limit = time.monotonic() + _LAST_SECONDS
    for process in processes:
        if process.pid is not None:
            process.join(max(0.0, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()


def _ended(status: int | None, reason: str | None, folder: Path, rank: int) -> Ended:
    result: Result | None = None
    with contextlib.suppress(ValueError, TypeError):  # nothing was written, or not all of it
        result = Result(**read_json(folder / f"{rank}.json"))
    output = read_tail(folder / f"{rank}.log", _TAIL)
    fault = reason or ""
    if not fault and status != 0:
        fault = f"exit status {status}"
        if status is not None and status < 0:
            fault = f"killed by {signal.Signals(-status).name}"
    elif not fault and (result is None or not result.ended):
        fault = "it did not come to its end"
    return Ended(fault, result, output)


def _run_rank(section: str, launch: Launch, rank: int, port: int, deadline: float, folder: Path) -> None:
    """The whole of one process."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    left = max(1.0, deadline - time.monotonic())
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    faulthandler.dump_traceback_later(left + 1.0, exit=True)  # also where whoever started this is gone
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(launch.world)}
    place["LOCAL_RANK"] = str(rank % max(1, launch.devices))
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store outlives every rank
    os.environ.update(place)
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    if launch.kind == "cpu":
        torch.set_num_threads(1)

    def save(result: Result) -> None:
        write_text(folder / f"{rank}.json", json.dumps(asdict(result)))

    status = 1
    board: Board | None = None
    stage: Stage | None = None
    try:
        ranks = Ranks(launch.backend, timedelta(seconds=launch.timeout))
        board = Board(ranks, left + 60.0)
        begin = time.monotonic()
        stage = Stage(launch, ranks, board, begin + _WITHIN * (deadline - begin), save)
        if torch.cuda.is_available() and launch.kind == "cuda":
            torch.cuda.set_device(stage.device)
        next(each for each in SECTIONS if each.name == section).work(stage)
        stage.save(ended=True)
        status = 0
    except Stopped as stop:
        print(f"the ranks no longer run the same collectives after {stop}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        if board is not None:
            board.tracebacks.append(traceback.format_exc())
    if status and stage is not None:
        stage.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # destructors of process groups wait for ranks that may be gone
