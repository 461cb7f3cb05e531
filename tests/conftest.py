"""Session set-up: a private cache folder, loopback for gloo, and the `ranks` fixture."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch
from harness import polling
from harness.pool import RankPool
from run import FIRST_HALF, PROGRAMS, WITHOUT_RANKS

_cache = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_cache] = tempfile.mkdtemp(prefix="dmuon-test-cache-")
    os.environ["XDG_CACHE_HOME"] = config.stash[_cache]  # no test reads or writes the user's cache
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start; matrices are small, and threads would spin
    torch.set_num_threads(1)
    polling.calm(config.stash[_cache])


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_cache], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        given = getattr(getattr(item, "callspec", None), "params", {})  # a test of the planner may call a number so
        if "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in given:
            item.add_marker("ranks")
            if folder in WITHOUT_RANKS:  # tests/run.py would never collect it
                raise pytest.UsageError(f"{item.nodeid} asks for ranks: take {folder} out of run.WITHOUT_RANKS")
        if folder in (*FIRST_HALF, *PROGRAMS):
            item.add_marker("programs" if folder in PROGRAMS else "first_half")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world, fn, *args)` runs `fn(rank, world, *args)` on every rank of a gloo group."""
    pool = RankPool()
    yield pool
    pool.close()
