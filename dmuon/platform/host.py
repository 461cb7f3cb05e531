"""A rank and its process: its name in the log, its host, and threads and memory that are left when it ends."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # of which Python 3.10 knows no kinds
    """Says first which rank speaks, where there are several; records have it as ``rank`` too.

    A message that nobody wants costs the comparison of a level. No handler is installed: programs decide what is shown.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "rank": rank}
        return (msg if world == 1 else f"rank {rank}: {msg}"), kwargs


def logger(name: str) -> RankLogger:
    """The logger of a module, below ``dmuon``.

    At INFO it tells what a user wants to know once, one rank of a group for all of them. At DEBUG it tells what a
    maintainer asks for. What somebody has to act on is a WARNING.
    """
    return RankLogger(logging.getLogger(name))


def all_living(kind: type[_T]) -> list[_T]:
    """All objects of a kind, which the collector of garbage knows, also those that ``gc.freeze`` has hidden from it."""
    if gc.get_freeze_count():
        gc.unfreeze()  # there is no other way to see them
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


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


def is_oversubscribed(shares: Sequence[HostShare]) -> bool:
    """Whether ranks of any host have more threads than CPUs: then to compute on more ranks takes longer."""
    for host in {share.host for share in shares}:
        neighbours = [share for share in shares if share.host == host]
        if sum(share.threads for share in neighbours) > len(frozenset().union(*(one.cpus for one in neighbours))):
            return True
    return False


def keep_for_ever(thing: object) -> None:
    """Never free ``thing``, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def keep_what_was_raised() -> None:
    """At exit: what the frames of an unhandled exception hold is never freed.

    A collective that failed may still be under way, and its thread needs the interpreter if it drops the last reference
    to a tensor: see :func:`let_threads_rest`.
    """
    keep_for_ever(getattr(sys, "last_value", None))


def let_threads_rest(seconds: float = 3.0) -> None:
    """Wait until no other thread of this process runs; at most ``seconds``.

    A thread of a process group that drops the last reference to a tensor needs the interpreter for it, and aborts the
    process if that is ending: "terminate called without an active exception". gloo's threads do so a moment after
    whoever waited for their collective went on, and are joined only where nothing keeps their group, such as a
    ``DeviceMesh``.
    """
    looks = 0
    deadline = time.monotonic() + seconds
    while looks < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # lets go of the interpreter: who waited for it, and sleeps no more, runs at the next look
        looks = 0 if _threads_run() else looks + 1


def _threads_run() -> bool:
    """Whether some other thread of this process is on a CPU, or waits for one; False where no one can tell."""
    here = threading.get_native_id()
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if int(thread.name) != here and state == b"R":
                return True
    return False


def give_back_memory() -> None:
    """Return what the process has freed to the system; without effect where the C library is not glibc.

    glibc keeps it otherwise, and because it serves larger and larger requests from what it keeps (its threshold of
    ``mmap`` grows with what was freed), tensors of steps long past leave holes that no later one fits.
    """
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
