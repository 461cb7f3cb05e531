"""Programs that `torchrun` starts, started without it: in forks of a process that has imported torch and dmuon."""

from __future__ import annotations

import os
import runpy
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from harness.forks import CONTEXT


def launch(program: Path, world: int, folder: Path, limit: float) -> list[tuple[int, str]]:
    """Run ``program`` on ``world`` ranks, with the variables that `torchrun` sets.

    Args:
        folder: in which it runs.
        limit: seconds until whatever still runs is killed.

    Returns:
        Of each rank the exit status, and what it printed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    processes = [
        CONTEXT.Process(target=_main, args=(program, rank, world, store.port, folder, log), daemon=False)
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + limit
    try:
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        while running and (done := wait(list(running), max(0.0, deadline - time.monotonic()))):
            ended = [running.pop(sentinel) for sentinel in done]
            if any(_code(process) for process in ended):  # torchrun ends the others, too
                break
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
    return [(_code(process), log.read_text(errors="replace")) for process, log in zip(processes, logs, strict=True)]


def _code(process: object) -> int:
    process.join()  # type: ignore[attr-defined]
    code: int = process.exitcode  # type: ignore[attr-defined]
    return code


def _main(program: Path, rank: int, world: int, port: int, folder: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    at = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    of = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in {**at, **of, "MASTER_PORT": port}.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="none")
    os.chdir(folder)
    sys.argv = [str(program)]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")
