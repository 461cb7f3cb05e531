"""What the observer sees of operations, memory, the host and collectives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness.pool import RankPool
from torch import Tensor

from dmuon.comm import lines as communication
from dmuon.platform.streams import HostCopy, Stream
from streams.clock import Race
from streams.collectives import Collectives
from streams.observer import Observer

CPU = torch.device("cpu")


@pytest.fixture
def observer() -> Iterator[Observer]:
    with Observer() as observer:
        yield observer


def kinds(observer: Observer) -> list[tuple[str, str, str]]:
    return sorted((race.kind, race.earlier.what, race.later.what) for race in observer.memory.races)


def beside(observer: Observer, operation: Callable[[], object]) -> None:
    """On a stream that waits for nothing."""
    with observer.module.stream(observer.module.Stream()):
        operation()


@pytest.mark.parametrize(
    ("operation", "seen"),
    [
        (lambda x: x.add_(1), "add_"),
        (lambda x: x + 1, "add"),
        (lambda x: x[1:].t().sum(), "sum"),
        (lambda x: x.view(-1).copy_(torch.ones(16)), "copy_"),
        (lambda x: torch._foreach_mul_([x[0], x[1]], 2.0), "_foreach_mul_"),
        (lambda x: torch.add(torch.ones(4, 4), 1, out=x), "add"),
        (lambda x: x.requires_grad_().sum().backward(), "sum"),
    ],
)
def test_operations_race_with_a_write_on_another_stream(
    observer: Observer, operation: Callable[[Tensor], object], seen: str
) -> None:
    x = torch.empty(4, 4)
    x.fill_(1)
    beside(observer, lambda: operation(x))
    assert ("memory", "fill_", seen) in kinds(observer)


@pytest.mark.parametrize(
    "operation",
    [lambda x: x.view(16)[3:].t(), lambda x: torch.empty_like(x), lambda x: torch.zeros_like(x), lambda x: x.shape],
)
def test_views_and_shapes_use_no_memory(observer: Observer, operation: Callable[[Tensor], object]) -> None:
    x = torch.empty(4, 4)
    x.fill_(1)
    beside(observer, lambda: operation(x))
    assert kinds(observer) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: torch._foreach_mul_([x], 2.0),
        lambda x: torch._foreach_copy_([x], [x + 1]),
        lambda x: x + 1,
    ],
)
def test_versions_count_as_without_it(write: Callable[[Tensor], object]) -> None:
    """By them dmuon knows whether a gradient has changed."""
    versions = []
    for context in (nullcontext(), Observer()):
        x = torch.ones(4)
        with context, torch.no_grad():
            write(x)
        versions.append(x._version)
    assert versions[0] == versions[1]


def test_parts_of_one_storage_are_apart(observer: Observer) -> None:
    flat = torch.empty(8)
    beside_ = Stream(CPU)
    with beside_.beside():
        flat[:4].fill_(1)
    flat[4:].fill_(1)
    assert kinds(observer) == []
    flat[3:].fill_(1)
    assert kinds(observer) == [("memory", "fill_", "fill_")]


def test_joining_a_stream_orders_what_follows(observer: Observer) -> None:
    stream, x = Stream(CPU), torch.ones(4)
    with stream.beside():
        x.mul_(2)
    stream.join()
    x.mul_(2)
    assert kinds(observer) == []


def test_memory_of_a_tensor_without_references_is_given_away(observer: Observer) -> None:
    stream, x = Stream(CPU), torch.ones(4)
    with stream.beside():
        kept = x * 2
    del x
    gc.collect()
    torch.ones(4)
    assert kinds(observer) == [("reuse", "mul", "ones")] and kept.sum() == 8


def test_recorded_memory_is_not_given_away(observer: Observer) -> None:
    stream, x = Stream(CPU), torch.ones(4)
    with stream.beside([x]):
        x * 2
    del x
    gc.collect()
    torch.ones(4)
    assert kinds(observer) == []


def test_memory_of_a_storage_that_is_resized_is_given_away(observer: Observer) -> None:
    stream, x = Stream(CPU), torch.ones(4)
    with stream.beside():
        x * 2
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    assert kinds(observer) == [("reuse", "mul", "ones")]


def test_asking_for_numbers_waits(observer: Observer) -> None:
    x = torch.ones(4)
    for ask in (lambda: x.tolist(), lambda: float(x.sum()), lambda: bool(x.any()), lambda: x.nonzero()):
        ask()
    assert sum(observer.module.waits.values()) == 4
    beside(observer, lambda: x.add_(1))
    assert kinds(observer) == [], "the host has waited for everything"


def test_a_deaf_host_learns_nothing_from_the_program() -> None:
    with Observer(deaf=True) as observer:
        x = torch.ones(4)
        x.tolist()
        beside(observer, lambda: x.add_(1))
    assert kinds(observer) == [("memory", "ones", "add_"), ("memory", "tolist", "add_")]


def test_numbers_on_their_way_are_waited_for(observer: Observer) -> None:
    copy = HostCopy(torch.ones(4))
    assert not copy.immediate and copy.tolist() == [1, 1, 1, 1]
    assert kinds(observer) == []
    early = HostCopy(torch.ones(4))
    early._values.tolist()
    assert [race.kind for race in observer.memory.races] == ["host"]


def test_everything_is_as_before_when_it_is_left() -> None:
    names = [(Tensor, "tolist"), (Tensor, "record_stream"), (torch.UntypedStorage, "resize_"), (dist, "all_reduce")]
    before = [getattr(kind, name) for kind, name in names]
    with pytest.raises(ArithmeticError), Observer() as observer, Collectives(observer).entered():
        assert [getattr(kind, name) for kind, name in names] != before
        raise ArithmeticError
    assert [getattr(kind, name) for kind, name in names] == before
    assert HostCopy(torch.ones(1)).immediate


def _all_collectives(rank: int, world: int) -> tuple[list[Race], list[str], list[Tensor]]:
    """Each of them, awaited."""
    observer = Observer()
    collectives = Collectives(observer, nccl=True)
    group = dist.group.WORLD
    assert group is not None
    results: list[Tensor] = []
    with collectives.entered(), observer:
        parts = [torch.full((size,), float(rank + 1)) for size in (3, 5)]
        launches = [
            partial(dist.broadcast, part, src=src, async_op=True) for src, part in zip((0, 2), parts, strict=True)
        ]
        for work in communication.in_one_launch(group, CPU, launches):
            work.wait()
        results.append(torch.cat(parts) * 1)
        value = torch.full((2,), float(rank))
        dist.broadcast(value, src=1)
        dist.all_reduce(value, dist.ReduceOp.SUM, async_op=True).wait()
        results.append(value * 1)
        received = torch.zeros(world)
        dist.all_to_all_single(received, torch.arange(float(world)) + 10 * rank, async_op=True).wait()
        results.append(received * 1)
    return list(observer.memory.races), [launched.operation for launched in collectives.journal], results


def test_collectives_bring_what_they_bring_on_nccl(ranks: RankPool) -> None:
    """Uneven parts in one launch among them."""
    for rank, (races, operations, results) in enumerate(ranks(3, _all_collectives)):
        assert races == []
        assert operations == ["2 at once", *["broadcast"] * 3, "all_reduce", "all_to_all_single"]
        assert results[0].tolist() == [1, 1, 1, 3, 3, 3, 3, 3]
        assert results[1].tolist() == [3.0, 3.0]
        assert results[2].tolist() == [rank, rank + 10, rank + 20]


def _misused(rank: int, world: int, misuse: str) -> set[tuple[str, str, str]]:
    observer = Observer()
    with Collectives(observer).entered(), observer:
        x = torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        other = Stream(CPU)
        if misuse == "not awaited":
            x.add_(1)
        elif misuse == "awaited elsewhere":
            with other.beside():
                work.wait()
            x.add_(1)
        elif misuse == "dropped":
            del x
            with other.beside():
                work.wait()
            gc.collect()
            torch.ones(4)
        elif misuse == "kept by the work":
            del x
            gc.collect()
            torch.ones(4)
        work.wait()
    return {(race.kind, race.earlier.what, race.later.what) for race in observer.memory.races}


@pytest.mark.parametrize(
    ("misuse", "races"),
    [
        ("nothing", set()),
        ("not awaited", {("memory", "all_reduce", "add_")}),
        ("awaited elsewhere", {("memory", "all_reduce", "add_")}),
        ("dropped", {("reuse", "all_reduce", "ones")}),
        ("kept by the work", set()),
    ],
)
def test_a_collective_runs_beside_until_it_is_awaited(
    ranks: RankPool, misuse: str, races: set[tuple[str, str, str]]
) -> None:
    assert ranks(2, _misused, misuse) == [races] * 2
