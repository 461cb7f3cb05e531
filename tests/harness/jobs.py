"""Ranks in fresh processes, forked from one that has imported everything: they may be killed."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.forks import CONTEXT
from harness.worker import begin, forget_garbage

POLL_SECONDS = 0.02
GROUP_SECONDS = 60.0  # how long collectives of the default process group wait


@dataclass(frozen=True)
class Ended:
    """How one rank ended: ``code`` is None if it still ran; ``seconds`` after the start of all of them."""

    code: int | None
    text: str
    seconds: float


Watch = Callable[[list[Any], Mapping[int, float]], bool]


def run_job(
    world: int, program: Callable[..., None], *args: Any, folder: Path, limit: float, watch: Watch | None = None
) -> list[Ended]:
    """Run ``program(rank, *args)`` in a process for each rank; none is left.

    Args:
        folder: for what they print.
        limit: seconds until whatever still runs prints its stacks and is killed.
        watch: called again and again with the processes, and when which of them have ended; True ends the job.
    """
    logs = [folder / f"{rank}.log" for rank in range(world)]
    processes: list[Any] = [
        CONTEXT.Process(target=_child, args=(str(log), program, rank, *args)) for rank, log in enumerate(logs)
    ]
    ended: dict[int, float] = {}
    try:
        for process in processes:
            process.start()
        begin = time.monotonic()
        while len(ended) < world:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            ended |= {r: now for r, p in enumerate(processes) if r not in ended and p.exitcode is not None}
            if watch is not None and watch(processes, ended):
                break
            if now > begin + limit:
                for rank in set(range(world)) - ended.keys():
                    os.kill(processes[rank].pid, signal.SIGUSR1)
                time.sleep(0.5)
                break
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return [
        Ended(code, log.read_text(errors="replace"), ended.get(rank, time.monotonic()) - begin)
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True))
    ]


def _child(log: str, program: Callable[..., None], rank: int, *args: Any) -> None:
    begin(log)
    forget_garbage()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    program(rank, *args)


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def throw(*_: Any) -> None:
    raise LookupError("the user's own mistake")


def hosted_store() -> Any:
    """Of this process, for ranks that come and go."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_ranks(
    world: int,
    program: Callable[..., None],
    *args: Any,
    limit: float,
    victims: tuple[int, ...] = (),
    rank_0_hosts_store: bool = False,
) -> dict[int, Ended]:
    """Run ``program(rank, world, *args)`` on gloo and wait for all ranks but ``victims``, which are killed then.

    Args:
        limit: seconds until whatever still runs is killed, and the test fails.
    """
    with tempfile.TemporaryDirectory(prefix="dmuon-job-") as folder:
        store = None if rank_0_hosts_store else hosted_store()
        port = Path(folder) / "port" if store is None else store.port
        others = set(range(world)) - set(victims)
        ended = run_job(
            *(world, _join_group, world, port, program, args),
            folder=Path(folder),
            limit=limit,
            watch=lambda _, ended: others <= ended.keys(),
        )
    stuck = [rank for rank in sorted(others) if ended[rank].code is None]
    said = "\n".join(f"--- rank {rank}\n{end.text}" for rank, end in enumerate(ended))
    assert not stuck, f"ranks {stuck} still run after {limit} s\n{said}"
    return {
        rank: end if end.code is not None else Ended(-signal.SIGKILL, end.text, end.seconds)
        for rank, end in enumerate(ended)
    }


def _join_group(rank: int, world: int, port: int | Path, program: Callable[..., None], args: tuple[Any, ...]) -> None:
    limit = timedelta(seconds=GROUP_SECONDS)
    if isinstance(port, Path) and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        port.with_suffix(".tmp").write_text(str(store.port))
        port.with_suffix(".tmp").rename(port)
    else:
        while isinstance(port, Path) and not port.exists():
            time.sleep(0.01)
        number = int(port.read_text()) if isinstance(port, Path) else port
        store = dist.TCPStore("127.0.0.1", number, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    program(rank, world, *args)


def one_failed(processes: list[Any], ended: Mapping[int, float]) -> bool:
    return any(processes[rank].exitcode for rank in ended)  # torchrun ends the others, too


def run_file(path: Path, world: int, folder: Path, limit: float, watch: Watch | None = one_failed) -> list[Ended]:
    """Run a program that `torchrun` starts, without it: with the variables that it sets, in ``folder``."""
    store = hosted_store()
    return run_job(world, _run_file, path, world, store.port, folder, folder=folder, limit=limit, watch=watch)


def _run_file(rank: int, path: Path, world: int, port: int, folder: Path) -> None:
    at = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    of = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in {**at, **of, "MASTER_PORT": port}.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="none")
    os.chdir(folder)
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
