"""Ranks of one host that would take the CPUs from each other are told so once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
import zlib

import pytest
import torch
from harness.on_ranks import on_ranks
from harness.toy import build
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.platform.host import HostShare, let_threads_rest, warn_if_oversubscribed


def place(threads: int, cpus: range, host: str = "a") -> HostShare:
    return HostShare(host, threads, frozenset(cpus))


@pytest.mark.parametrize(
    ("places", "warned"),
    [
        ([place(1, range(2))] * 2, []),
        ([place(2, range(2))] * 2, [0]),
        ([place(2, range(2)), place(2, range(2, 4))], []),  # pinned apart
        ([place(8, range(8)), place(8, range(8), "b")], []),  # one rank a host
        ([place(1, range(1)), *[place(3, range(4), "b")] * 2], [1]),
        ([place(9, range(1))], []),  # alone: the user's own business
    ],
)
def test_the_first_rank_of_a_crowded_host_warns(places: list[HostShare], warned: list[int]) -> None:
    for rank in range(len(places)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_if_oversubscribed(places, rank)
        assert bool(caught) == (rank in warned), rank


@on_ranks(2)
def test_dedicate_params_warns_on_one_rank(rank: int, world: int) -> None:
    cpus = len(os.sched_getaffinity(0))
    for threads in {cpus, 1}:
        torch.set_num_threads(threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dmuon.dedicate_params(build(), init_device_mesh("cpu", (world,)), costs="flops")
        said = [str(w.message) for w in caught if "threads" in str(w.message)]
        assert len(said) == (rank == 0 and threads == cpus)
        assert all(f"{2 * cpus} threads on {cpus} CPUs" in text for text in said)


@pytest.mark.pitfall("P68")
def test_threads_that_run_are_waited_for() -> None:
    data = bytes(10_000_000)
    ended = []

    def work() -> None:
        for _ in range(10):
            zlib.crc32(data)  # without the interpreter
        ended.append(True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    let_threads_rest(60.0)
    assert len(ended) == 2


@pytest.mark.slow
@pytest.mark.pitfall("P68")
def test_what_an_unhandled_exception_holds_is_kept_at_exit() -> None:
    """A program whose last words come from the finalizer of what its exception holds would say more."""
    program = """
import atexit
from dmuon.platform.host import keep_what_was_raised
atexit.register(KEEP)
class Thing:
    def __del__(self): print("freed", flush=True)
def fail(thing): raise RuntimeError("no")
fail(Thing())
"""
    for keep, said in (("keep_what_was_raised", ""), ("int", "freed")):
        command = [sys.executable, "-c", program.replace("KEEP", keep)]
        assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == said


def test_threads_that_never_rest_are_left() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    start = time.monotonic()
    let_threads_rest(0.05)
    took = time.monotonic() - start
    stop.set()
    thread.join()
    assert 0.05 <= took < 5.0
