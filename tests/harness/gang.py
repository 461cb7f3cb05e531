"""Ranks that may be killed: fresh processes, forked from one that has imported everything."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.forks import CONTEXT


@dataclass(frozen=True)
class Ended:
    """How one rank ended; ``seconds`` after the start of all of them."""

    code: int
    text: str
    seconds: float


def run(
    world: int,
    program: Callable[..., None],
    *args: Any,
    limit: float,
    timeout: float,
    victims: tuple[int, ...] = (),
    rank_0_hosts_store: bool = False,
) -> dict[int, Ended]:
    """Run ``program(rank, world, *args)`` on gloo and wait for all ranks but ``victims``, which are killed then.

    Args:
        limit: seconds until whatever still runs is killed, and the test fails.
        timeout: of the default process group.

    Returns:
        How each rank ended. None is left.
    """
    store = None if rank_0_hosts_store else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="dmuon-faults-") as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(world)]
        port = Path(folder) / "port" if store is None else store.port
        processes = [
            CONTEXT.Process(target=_main, args=(rank, world, port, timeout, str(log), program, args), daemon=True)
            for rank, log in enumerate(logs)
        ]
        ended: dict[int, float] = {}
        try:
            for process in processes:
                process.start()
            start = time.monotonic()
            while set(range(world)) - ended.keys() - set(victims):
                running = {processes[r].sentinel: r for r in range(world) if r not in ended}
                done = wait(list(running), max(0.0, start + limit - time.monotonic()))
                for sentinel in done:
                    ended[running[sentinel]] = time.monotonic() - start
                if not done:
                    stuck = sorted(set(range(world)) - ended.keys() - set(victims))
                    for rank in stuck:
                        os.kill(processes[rank].pid or 0, signal.SIGUSR1)
                    time.sleep(0.5)
                    said = "\n".join(f"--- rank {r}\n{log.read_text(errors='replace')}" for r, log in enumerate(logs))
                    raise AssertionError(f"ranks {stuck} still run after {limit} s\n{said}")
            for rank in victims:
                processes[rank].kill()
                processes[rank].join()
                ended.setdefault(rank, time.monotonic() - start)
            return {
                rank: Ended(_code(process), logs[rank].read_text(errors="replace"), ended[rank])
                for rank, process in enumerate(processes)
            }
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _code(process: Any) -> int:
    process.join()
    code: int = process.exitcode
    return code


def _main(
    rank: int, world: int, port: int | Path, timeout: float, log: str, program: Callable[..., None], args: Any
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    if isinstance(port, Path):
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
            port.with_suffix(".tmp").write_text(str(store.port))
            port.with_suffix(".tmp").rename(port)
        else:
            while not port.exists():
                time.sleep(0.01)
            store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=limit)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    program(rank, world, *args)
