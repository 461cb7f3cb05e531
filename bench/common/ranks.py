"""Ranks on the CPU: how they start, what they exchange, and how long their work takes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RESULT = "result.json"


def run_ranks(world: int, worker: Callable[..., Any], *args: Any, device: str = "cpu") -> Any:
    """Call ``worker(rank, *args)`` in ``world`` processes, in a group of all of them; none of them is left behind.

    On the CPU the group is gloo's, and a process has one thread.

    Returns:
        What rank 0's call returned, by way of JSON.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (world, folder, device, worker, args), nprocs=world, daemon=True)
        return json.loads(Path(folder, RESULT).read_text())


def _work(rank: int, world: int, folder: str, device: str, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = worker(rank, *args)
    if rank == 0:
        Path(folder, RESULT).write_text(json.dumps(found))
    dist.destroy_process_group()


def share(item: object) -> list[Any]:
    """One object of every rank, in their order."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def over_ranks(values: Sequence[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
    """Each value over all ranks: the largest, unless ``op`` says otherwise."""
    together = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(together, op)
    return together.tolist()


def timed(work: Callable[[], object]) -> float:
    """Seconds of ``work``, from a common start to the end of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return over_ranks([time.perf_counter() - start])[0]
