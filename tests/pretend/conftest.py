"""Ranks that have the pretended device; skipped where it cannot be built, which in CI is a failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.pool import RankPool

from pretend.build import Unbuildable, library
from pretend.module import on_device

CALL_SECONDS = 100.0


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
            item.add_marker(pytest.mark.timeout(600))  # of which the first test builds the device


@pytest.fixture(scope="session")
def device_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``device_ranks(world, fn, *args)`` runs ``fn(rank, world, *args)`` on ranks whose groups know the device.

    They are no ranks of other tests: autograd makes a thread for each device at the first backward of a process.
    """
    try:
        path = library()
    except Unbuildable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(str(reason))
        pytest.skip(str(reason))
    pool = RankPool()

    def run(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return pool(world, on_device, path, fn, *args, fresh=True, timeout=CALL_SECONDS)

    yield run
    pool.close()
