"""Where a rank runs: its host, and how many of the host's CPUs it may use."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HostShare:
    """``threads`` compute for this process on ``cpus`` of ``host``."""

    host: str
    threads: int
    cpus: frozenset[int]

    @classmethod
    def here(cls) -> HostShare:
        """This process."""
        has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
        cpus = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
        return cls(socket.gethostname(), torch.get_num_threads(), frozenset(cpus))


def warn_if_oversubscribed(shares: Sequence[HostShare], rank: int) -> None:
    """Warn, on the first rank of a host, if its ranks compute with more threads than the host has CPUs for them.

    Threads that wait for each other spin: two ranks of two threads on two CPUs take several times as long as of one.
    """
    host = shares[rank].host
    neighbours = [r for r, share in enumerate(shares) if share.host == host]
    threads = sum(shares[r].threads for r in neighbours)
    cpus = len(frozenset().union(*(shares[r].cpus for r in neighbours)))
    if rank == neighbours[0] and threads > cpus and len(neighbours) > 1:
        each = cpus // len(neighbours)
        remedy = f"set OMP_NUM_THREADS={each}, or call torch.set_num_threads with it" if each else "start fewer ranks"
        warnings.warn(
            f"{len(neighbours)} ranks on host {host} compute with {threads} threads on {cpus} CPUs, which slows all of "
            f"them; {remedy}"
        )
