"""Ranks on the CPU: how they start, what they exchange, and how long their work takes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world: int, worker: Callable[..., None], *args: Any) -> None:
    """Call ``worker(rank, *args)`` in ``world`` processes of one thread each, in a gloo group of all of them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (world, os.path.join(folder, "store"), worker, args), nprocs=world)


def _work(rank: int, world: int, rendezvous: str, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    worker(rank, *args)
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
