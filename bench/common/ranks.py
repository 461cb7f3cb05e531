"""Ranks on the CPU: how they start, what they exchange, and how their work is timed."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


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


def in_turn(items: Sequence[T], index: int) -> list[T]:
    """All of ``items``; which is first moves on with ``index``, so that none always follows the same one."""
    shift = index % len(items)
    return [*items[shift:], *items[:shift]]


def collect(warmup: int, rounds: int, sample: Callable[[int], Mapping[K, float]]) -> dict[K, list[float]]:
    """The samples of ``rounds`` by name; those of the ``warmup`` rounds before are dropped."""
    samples: dict[K, list[float]] = {}
    for index in range(warmup + rounds):
        for name, value in sample(index).items():
            if index >= warmup:
                samples.setdefault(name, []).append(value)
    return samples


def medians(samples: Mapping[K, Sequence[float]]) -> dict[K, float]:
    return {name: statistics.median(values) for name, values in samples.items()}
