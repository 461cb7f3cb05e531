"""What waits for less than it could, so that more runs at once on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import build

from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.gradients import GradReduction
from streams import clock
from streams.collectives import Collectives
from streams.observer import Observer

Wrapped = Callable[..., Any]


def _wrap(stack: ExitStack, kind: type, name: str, around: Callable[[Wrapped], Wrapped]) -> None:
    original = vars(kind)[name]
    setattr(kind, name, around(original))
    stack.callback(setattr, kind, name, original)


def _train(layout: str, stack: ExitStack, observer: Observer, collectives: Collectives) -> None:
    stack.enter_context(collectives.entered())
    stack.enter_context(observer)
    laid = lay(layout, build(layers=4))
    laid.train(laid.optimizer(), range(2))


@on_ranks(4)
def test_a_reduction_is_awaited_without_those_behind_it(rank: int, world: int) -> None:
    """Otherwise two at once would buy no overlap of the first stage.

    What its row had queued when it started, and what is known to have ended when it has ended, are the same.
    """
    observer = Observer()
    collectives = Collectives(observer)
    queued: dict[int, int] = {}
    found: list[tuple[int, int]] = []

    def row_of(buffer: OwnedBuffer) -> clock.Stream:
        assert buffer.comm.row is not None
        return collectives.kernels[buffer.comm.row.gradients.group.group_name]

    def starting(original: Wrapped) -> Wrapped:
        def start(self: GradReduction, buffer: OwnedBuffer, *others: Any) -> None:
            original(self, buffer, *others)
            queued[id(self)] = row_of(buffer).ticks

        return start

    def ending(original: Wrapped) -> Wrapped:
        def end(self: GradReduction) -> Any:
            result = original(self)
            found.append((queued[id(self)], observer.queue.known.get(row_of(self.buffer), 0)))
            return result

        return end

    with ExitStack() as stack:
        _wrap(stack, GradReduction, "__init__", starting)
        _wrap(stack, GradReduction, "finish", ending)
        _train("hsdp-two-lines", stack, observer, collectives)
    assert found and all(ended == queued for queued, ended in found)
