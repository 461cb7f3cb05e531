"""Ranks on the CPU: how they start, what they exchange, and how long their work takes."""

from __future__ import annotations

import json
import os
import re
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


def over_ranks(values: Sequence[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
    """Each value over all ranks: the largest, unless ``op`` says otherwise."""
    together = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(together, op)
    return together.tolist()


def resident_mib(peak: bool = False) -> float:
    """MiB of this process that are resident as Linux counts them, or the most since :func:`restart_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "this is not Linux"
    return int(found[1]) / 1024


def restart_peak() -> None:
    """From now on the peak is of what is resident from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of ``work``, from a common start to the end of the slowest rank, and most processor time of a rank.

    What its threads of gloo take counts. Where there are more ranks than cores, only the second is what
    ranks with a core each would compute.
    """
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    work()
    took, used = time.perf_counter() - start, time.process_time() - used
    took, used = over_ranks([1e3 * took, 1e3 * used])
    return took, used
