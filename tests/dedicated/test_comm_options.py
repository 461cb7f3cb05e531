"""Options of communication bound what they name: buffers ahead, reductions under way, and bytes that travel together.

Results are the same with any of them (``tests/parity/``), so nothing but the order of collectives can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from harness.network import loss_of
from harness.pool import RankPool
from harness.topologies import lay
from harness.toy import HIDDEN, WIDTH, batch, build

import dmuon
from dmuon.comm.monitor import Monitor, Pending

LAYERS = 5
BLOCK_BYTES = 4 * (WIDTH * WIDTH + 2 * WIDTH * HIDDEN)  # the three matrices of a block of the toy model, in fp32


@dataclass
class Traffic:
    """Collectives of blocks in the order in which they started, and most of each kind that were under way at once."""

    started: dict[str, list[str]] = field(default_factory=lambda: {"fill": [], "reduce": []})
    waiting: dict[str, int] = field(default_factory=lambda: {"fill": 0, "reduce": 0})
    most: dict[str, int] = field(default_factory=lambda: {"fill": 0, "reduce": 0})


@contextmanager
def recorded() -> Iterator[Traffic]:
    """Watch every collective that a monitor starts and waits for."""
    traffic = Traffic()
    kinds: dict[int, str] = {}
    start, wait = Monitor.start, Pending.wait

    def watched_start(self: Monitor, *args: Any, **kwargs: Any) -> Pending:
        pending = start(self, *args, **kwargs)
        name = next((a for a in (*args, *kwargs.values()) if isinstance(a, str) and " of block " in a), "")
        kind, _, block = name.partition(" of block ")
        if kind in traffic.started:
            kinds[id(pending)] = kind
            traffic.started[kind].append(block.split("'")[1])
            traffic.waiting[kind] += 1
            traffic.most[kind] = max(traffic.most[kind], traffic.waiting[kind])
        return pending

    def watched_wait(self: Pending) -> None:
        wait(self)
        kind = kinds.pop(id(self), "")
        if kind:
            traffic.waiting[kind] -= 1

    Monitor.start, Pending.wait = watched_start, watched_wait  # type: ignore[method-assign]
    try:
        yield traffic
    finally:
        Monitor.start, Pending.wait = start, wait  # type: ignore[method-assign]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of the second training step.

    Attributes:
        filled: names of what was filled during step, forward and backward, in order.
        ahead: when each block computed forward, how many blocks after it were filled or being filled.
        after_step: how many fills the step before had started.
        reduced: names of what was reduced, in order.
        reductions: most of them under way at once.
    """

    filled: list[str]
    ahead: list[int]
    after_step: int
    reduced: list[str]
    reductions: int


def second_step(_rank: int, _world: int, comm: dmuon.CommOptions) -> Seen:
    laid = lay("1d-two-lines", build(layers=LAYERS), comm=comm)
    model = laid.model
    optimizer = dmuon.Muon(model)
    ahead: list[int] = []
    with recorded() as traffic:
        for step in range(2):
            after_step = len(traffic.started["fill"])
            hooks = []
            if step:
                hooks = [
                    block.mix.register_forward_pre_hook(
                        lambda *_, i=i: ahead.append(len(traffic.started["fill"]) - i - 1)
                    )
                    for i, block in enumerate(model.blocks)
                ]
            loss = loss_of(model, *laid.mine(batch(step)))
            for hook in hooks:
                hook.remove()
            loss.backward()
            if not step:
                traffic.started["fill"].clear()
                traffic.started["reduce"].clear()
                traffic.most["reduce"] = 0
                optimizer.step()
                optimizer.zero_grad()
    return Seen(traffic.started["fill"], ahead, after_step, traffic.started["reduce"], traffic.most["reduce"])


@pytest.fixture(scope="module")
def seen(ranks: RankPool) -> Any:
    @cache
    def of(**options: int) -> list[Seen]:
        return ranks(2, second_step, dmuon.CommOptions(**options))

    return of


@pytest.mark.parametrize("prefetch", [0, 2])
def test_so_many_blocks_are_filled_ahead_of_the_one_that_computes(seen: Any, prefetch: int) -> None:
    for rank in seen(prefetch=prefetch):
        assert rank.after_step == min(prefetch, LAYERS), "the step fills as many as are prefetched"
        assert rank.ahead == [min(prefetch, LAYERS - 1 - i) for i in range(LAYERS)]


def test_two_reductions_are_under_way_at_once_and_no_more(seen: Any) -> None:
    for rank in seen():
        assert len(rank.reduced) == LAYERS
        assert rank.reductions == 2


@pytest.mark.parametrize(
    ("nbytes", "together"),
    [(2 * BLOCK_BYTES - 1, 1), (2 * BLOCK_BYTES, 2), (2**30, LAYERS)],
)
def test_neighbours_travel_together_until_they_hold_so_many_bytes(seen: Any, nbytes: int, together: int) -> None:
    last = [min(first + together, LAYERS) - 1 for first in range(0, LAYERS, together)]
    names = [
        f"blocks.{first}" if first == end else f"blocks.{first} to blocks.{end}"
        for first, end in zip(range(0, LAYERS, together), last, strict=True)
    ]
    for rank in seen(merge_bytes=nbytes):
        assert rank.reduced == names[::-1]
        assert rank.filled[: len(names)] == names
