"""The pretended device does what torch expects of an accelerator, with the CPU's bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

DEVICE = "pretend"
DEVICES = ("cpu", DEVICE)
Ranks = Callable[..., list[Any]]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- operators and memory ---------------------------------------------------------------------------------------------


def resize_storage(_rank: int, _world: int) -> None:
    buffer = torch.arange(6.0, device=DEVICE)
    part = buffer[2:]
    buffer.untyped_storage().resize_(0)
    assert buffer.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="memory of 0 bytes is too small or freed"):
        part + 1
    buffer.untyped_storage().resize_(24)
    assert part.isnan().all(), "what nobody has written is NaN"
    buffer.fill_(1.0)
    assert part.cpu().tolist() == [1.0] * 4
    buffer.untyped_storage().resize_(12)
    buffer.untyped_storage().resize_(24)
    assert buffer.cpu()[:3].tolist() == [1.0] * 3 and buffer.cpu()[3:].isnan().all(), "what both sizes have is kept"


def test_storage_is_freed_and_comes_back(device_ranks: Ranks) -> None:
    device_ranks(1, resize_storage)


# -- streams ----------------------------------------------------------------------------------------------------------


def hooks(_rank: int, _world: int) -> None:
    module = torch.pretend  # type: ignore[attr-defined]
    forward, backward = module.Stream(), module.Stream()
    found: dict[str, tuple[int, torch.Stream]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: found.update({name: (threading.get_ident(), module.current_stream())})

    layer = nn.Linear(3, 3).to(DEVICE)
    layer.weight.register_post_accumulate_grad_hook(note("accumulated"))
    layer.register_full_backward_hook(note("module"))
    with module.stream(forward):
        loss = layer(torch.ones(2, 3, device=DEVICE, requires_grad=True)).sum()
    with module.stream(backward):
        loss.register_hook(note("loss"))
        loss.backward()
    for name in ("loss", "module", "accumulated"):
        thread, stream = found[name]
        assert thread != threading.get_ident(), f"{name} ran in the thread that called backward"
        assert stream == forward, f"{name} ran under {stream}"


def test_hooks_run_in_the_thread_of_autograd_under_the_stream_of_the_forward(device_ranks: Ranks) -> None:
    device_ranks(1, hooks)


# -- several ranks ----------------------------------------------------------------------------------------------------


def run_collectives(rank: int, world: int, device: str) -> dict[str, list[Tensor]]:
    """What every collective leaves, started at once and awaited in the end where that is possible."""

    def mine(*shape: int, seed: int = 0) -> Tensor:
        return values(*shape, seed=10 * rank + seed).to(device)

    def empty(*shape: int) -> Tensor:
        return torch.zeros(*shape, device=device)

    uneven = [3, 1] if rank == 0 else [2, 4]
    returned = [3, 2] if rank == 0 else [1, 4]
    results: dict[str, list[Tensor]] = {}
    works: list[dist.Work | None] = []

    def start(name: str, outputs: list[Tensor], work: dist.Work | None) -> None:
        results[name] = outputs
        works.append(work)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        x = mine(5)
        start(f"all_reduce {op}", [x], dist.all_reduce(x, op, async_op=True))
    x = mine(5)
    start("broadcast", [x], dist.broadcast(x, 1, async_op=True))
    x = mine(5)
    start("reduce", [x] if rank == 0 else [], dist.reduce(x, 0, async_op=True))
    x = empty(5 * world)
    start("all_gather_into_tensor", [x], dist.all_gather_into_tensor(x, mine(5), async_op=True))
    parts = [empty(5) for _ in range(world)]
    start("all_gather", parts, dist.all_gather(parts, mine(5), async_op=True))
    x = empty(5)
    average = dist.ReduceOp.AVG
    start("reduce_scatter_tensor", [x], dist.reduce_scatter_tensor(x, mine(5 * world), average, async_op=True))
    x = empty(sum(returned))
    work = dist.all_to_all_single(x, mine(sum(uneven)), returned, uneven, async_op=True)
    start("all_to_all_single", [x], work)
    x = empty(5)
    start("scatter", [x], dist.scatter(x, [mine(5), mine(5, seed=1)] if rank == 0 else None, async_op=True))
    x = mine(5)
    start("send and recv", [x], dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0))
    start("barrier", [], dist.barrier(async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    x = mine(5)
    results["future"] = dist.all_reduce(x, async_op=True).get_future().wait()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, rank)
    assert everyone == list(range(world))
    return {name: [tensor.cpu() for tensor in outputs] for name, outputs in results.items()}


def compare_collectives(rank: int, world: int) -> None:
    expected, found = (run_collectives(rank, world, device) for device in DEVICES)
    for name, outputs in expected.items():
        for a, b in zip(outputs, found[name], strict=True):
            assert torch.equal(a, b), f"{name}: {b}, not {a}"


def test_collectives_are_those_of_gloo(device_ranks: Ranks) -> None:
    device_ranks(2, compare_collectives)
