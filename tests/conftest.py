"""Session set-up: a private cache folder, loopback for gloo, and the `ranks` fixture."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import polling
from harness.pool import RankPool
from harness.worker import forget_garbage

# Folders that take long, in the order in which several processes begin them, so that these end at about the same time.
LONGEST_FIRST = (
    "frameworks",
    "bench",
    "parity",
    "cli",
    "optimizer",
    "dedicated",
    "step",
    "streams",
    "examples",
    "programs",
)

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
    gc.unfreeze()  # or extensions tell of what they take for leaks


def pytest_collection_finish() -> None:
    """Each optimizer that is built collects garbage, and looks for modules among all objects."""
    forget_garbage()


# -- processes that share a run: see tests/run.py ------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", type=Path, help="a folder of the files that one of several processes has taken")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--claims") is not None:
        items.sort(key=lambda item: _place(item.path.parent.name))


def _place(folder: str) -> int:
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the files that no other process has taken. One runs in one process, for fixtures that are its own."""
    claims: Path | None = session.config.getoption("--claims")
    if claims is None or session.testsfailed or session.config.option.collectonly:
        return None
    ours = _claimed(session.items, claims)
    item = next(ours, None)
    while item is not None:
        following = next(ours, None)  # by which pytest knows how long fixtures live
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _claimed(items: list[pytest.Item], claims: Path) -> Iterator[pytest.Item]:
    ours: dict[Path, bool] = {}
    for item in items:
        if item.path not in ours:
            ours[item.path] = _claim(claims / "_".join(item.path.parts[1:]))
        if ours[item.path]:
            yield item


def _claim(path: Path) -> bool:
    """Whether no other process has taken it before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world, fn, *args)` runs `fn(rank, world, *args)` on every rank of a gloo group."""
    pool = RankPool()
    yield pool
    pool.close()
