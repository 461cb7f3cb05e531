"""Tests whose body runs on every rank, what such a body compares, and programs that may raise, many in one call."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.pool import Outcome, RankPool
from harness.topologies import LAYOUTS
from harness.worker import qualified_name


class _Body:
    """What is below a decorator, found by name: workers import the test's module."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.module = body.__module__
        self.__qualname__ = body.__qualname__

    def __call__(self, *args: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.__qualname__).__wrapped__(*args)


def slowly(*cases: Any) -> list[Any]:
    """Cases of a test that CI runs and ``make test`` does not; a tuple has several values."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def _world_of(layout: str) -> int:
    return 1 if layout == "single" else LAYOUTS[layout].world


def on_ranks(
    size: int | str | None = None, fixture: str = "ranks", **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make ``test(rank, world, …)`` run on every rank of a group.

    Args:
        size: of the group; or what the test calls the layout that it is given; None where it is parametrized by world.
        fixture: that has the pool.
        options: of the pool's call, such as what every rank must raise.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        rank, world, *others = inspect.signature(body).parameters.values()
        assert (rank.name, world.name) == ("rank", "world"), body.__qualname__

        @wraps(body)
        def test(**given: Any) -> None:
            ranks: RankPool = given.pop(fixture)
            number = _world_of(given[size]) if isinstance(size, str) else given.pop("world", size)
            ranks(number, _Body(body), *(given[p.name] for p in others), **options)

        pool = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = [pool, *others] if size else [pool, world, *others]
        test.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return test

    return decorate


def over_ranks(number: int, group: dist.ProcessGroup | None = None) -> int:
    """The sum. Collective."""
    total = torch.tensor(number)
    dist.all_reduce(total, group=group)
    return int(total)


def of_all_ranks(mine: Any) -> list[Any]:
    """What each rank has, on all of them. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def assert_same_over_ranks(weights: Mapping[str, Tensor]) -> None:
    """The same bits as on the first of the ranks. Collective."""
    for name, tensor in weights.items():
        first = tensor.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, tensor), f"{name} differs between ranks"


Program = tuple[Callable[..., Any], tuple[Any, ...]]  # called with rank, world, and these


def attempt(rank: int, world: int, programs: list[Program]) -> list[Outcome]:
    """What one program after another came to on this rank."""
    found = []
    for program, args in programs:
        try:
            program(rank, world, *args)
            found.append(Outcome(rank))
        except Exception as error:
            bases = tuple(map(qualified_name, type(error).__mro__))
            found.append(Outcome(rank, None, type(error).__name__, str(error), traceback.format_exc(), bases))
        dist.barrier()
    return found
