"""What waits for less than it could, so that more runs at once on an accelerator."""

from __future__ import annotations

from typing import Any
from unittest import mock

from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import build

from dmuon.dedicated.gradients import GradReduction
from streams import clock
from streams.collectives import Collectives
from streams.observer import Observer


@on_ranks(4)
def test_a_reduction_is_awaited_without_those_behind_it(rank: int, world: int) -> None:
    """Otherwise two at once would buy no overlap of the first stage.

    What its row had queued when it started, and what is known to have ended when it has ended, are the same.
    """
    observer = Observer()
    collectives = Collectives(observer)
    queued: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    begin, end = GradReduction.__init__, GradReduction.finish

    def row_of(buffer: Any) -> clock.Stream:
        return collectives.kernels[buffer.comm.row.gradients.group.group_name]

    def beginning(self: GradReduction, buffer: Any, *others: Any) -> None:
        begin(self, buffer, *others)
        queued[id(self)] = row_of(buffer).ticks

    def ending(self: GradReduction) -> Any:
        result = end(self)
        found.append((queued[id(self)], observer.queue.known.get(row_of(self.buffer), 0)))
        return result

    with mock.patch.multiple(GradReduction, __init__=beginning, finish=ending), collectives.entered(), observer:
        laid = lay("hsdp-two-lines", build(layers=4))
        laid.train(laid.optimizer(), range(2))
    assert found and all(ended == queued for queued, ended in found)
