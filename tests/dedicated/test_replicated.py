"""When buckets of replicated gradients leave, and that their averages are right whenever that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.toy import OPTIONS, SIZE, batch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.check.model import Network, loss_of, shard
from dmuon.check.topologies import full_state
from dmuon.dedicated import replicated
from dmuon.dedicated.replicated import GradAverager

STEPS = 5
UNTIL = 3  # steps in which every rank has all gradients, once each


class Changing(Network):
    """From step ``UNTIL`` on the last norm is used in a checkpointed segment too, or the rest stays unused."""

    def __init__(self, change: str) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(SIZE)
        self.change = change
        self.step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        changed = self.step >= UNTIL
        here = changed and dist.is_initialized() and dist.get_rank() > 0
        x = self.embed(tokens)
        if here and self.change == "elsewhere on one rank":
            x = self.norm(x)
        first, *others = self.blocks
        if changed and self.change == "checkpointed":
            x = checkpoint(lambda y: self.norm(first(y)), x, use_reentrant=True)
        else:
            x = first(x)
        for block in others:
            x = block(x)
        if (changed and self.change == "unused") or (here and "on one rank" in self.change):
            return self.head(x)
        return self.head(self.norm(x))


@cache
def reference(change: str) -> dict[str, Tensor]:
    model = Changing(change)
    optimizer = Reference(model)
    for step in range(STEPS):
        model.step = step
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@contextmanager
def small_buckets() -> Iterator[None]:
    kept, replicated._BUCKET_BYTES = replicated._BUCKET_BYTES, 64
    try:
        yield
    finally:
        replicated._BUCKET_BYTES = kept


@contextmanager
def counted(method: str) -> Iterator[list[int]]:
    """Arguments of each call; how many buckets had left before the end of backward."""
    calls: list[int] = []
    original: Callable[..., object] = getattr(GradAverager, method)

    def counting(self: GradAverager, *args: object) -> object:
        calls.append(self._next)
        return original(self, *args)

    setattr(GradAverager, method, counting)
    try:
        yield calls
    finally:
        setattr(GradAverager, method, original)


@on_ranks(2)
@pytest.mark.parametrize("change", ["unused", "checkpointed"])
def test_averages_are_right_when_gradients_begin_to_come_otherwise(rank: int, world: int, change: str) -> None:
    with small_buckets(), counted("_average_late") as late, counted("finish") as left:
        model = Changing(change)
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
        optimizer = dmuon.Muon(model, **OPTIONS)
        for step in range(STEPS):
            model.step = step
            optimizer.zero_grad()
            loss_of(model, *shard(batch(step), rank, world)).backward()
            optimizer.step()
    assert_equal_weights(full_state(model), reference(change))
    assert left[0] == 0 and left[1] > 0, "no bucket leaves early before the first vote is known"
    assert bool(late) == (change == "checkpointed"), "otherwise no second gradient comes late"


@on_ranks(2)
@pytest.mark.parametrize("change", ["unused on one rank", "elsewhere on one rank"])
def test_what_was_ever_otherwise_on_one_rank_leaves_at_the_end(rank: int, world: int, change: str) -> None:
    with small_buckets(), counted("finish") as left:
        model = Changing(change)
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
        for step in range(UNTIL + 3):
            model.step = step
            loss_of(model, *shard(batch(step), rank, world)).backward()
    everywhere: list[list[int]] = [[] for _ in range(world)]
    dist.all_gather_object(everywhere, left)
    counts = list(zip(*everywhere, strict=True))
    assert counts[1][0] == counts[1][1] > 0
    if change == "unused on one rank":
        assert counts[UNTIL][0] > counts[UNTIL][1], "the first time, its bucket waits on that rank alone"
    assert counts[UNTIL + 1][0] < counts[1][0]
    for ours, theirs in counts[UNTIL + 1 :]:
        assert 0 < ours == theirs, "from then on it is in the last buckets on all ranks"


@on_ranks(2)
@pytest.mark.parametrize("change", ["unused on one rank", "elsewhere on one rank"])
def test_nothing_leaves_early_where_each_collective_is_awaited(rank: int, world: int, change: str) -> None:
    """A rank would wait for an average, and the other one for a reduction."""
    with small_buckets(), counted("finish") as left:
        model = Changing(change)
        comm = dmuon.CommOptions(asynchronous=False)
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops", comm=comm)
        for step in range(UNTIL + 2):
            model.step = step
            loss_of(model, *shard(batch(step), rank, world)).backward()
    assert left == [0] * (UNTIL + 2)
