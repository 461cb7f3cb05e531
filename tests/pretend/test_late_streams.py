"""Late streams, as the first run has them: correct code keeps its bits, and a missing wait is found by its stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from streams.plants import Plant, planted

from dmuon.check import bits
from dmuon.check.bits import compare_delayed
from dmuon.check.delays import LateStreams
from dmuon.check.ranks import Ranks
from dmuon.check.report import Board
from dmuon.check.stage import Launch, Stage
from dmuon.kernels import streams_in_place
from pretend.late import LateDevice
from pretend.listener import listening

Rows = Callable[..., list[Any]]


class PoolRanks(Ranks):
    """In the default group that there is already."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def start_group(self) -> None: ...

    def end_group(self) -> None: ...

    def gather(self, item: Any) -> list[Any]:
        items = [None] * self.world
        dist.all_gather_object(items, item)
        return items


def delayed(rank: int, world: int, plant: Plant | None) -> list[tuple[str, str]]:
    """Status and text of the lines of the section. On several ranks nothing is late: gloo knows no streams."""
    device = LateDevice()
    ranks = PoolRanks(rank, world)
    board = Board(ranks, 90)
    stage = Stage(Launch("pretend", world, world, "gloo"), ranks, board, float("inf"), lambda _: None)
    pause = device.pause if world == 1 else (lambda _: None)
    bits._streams = lambda stage: LateStreams(stage.device, pause, 0)  # type: ignore[assignment]
    broken = nullcontext() if plant is None else planted(plant)
    with streams_in_place("pretend", device), listening(device), broken:
        compare_delayed(stage)
    return [(line.status, line.text) for line in board.lines]


def test_late_streams_change_no_bits(device_ranks: Rows) -> None:
    [lines] = device_ranks(1, delayed, None)
    assert {status for status, _ in lines} == {"pass"}
    late = [text.split(" late")[0] for _, text in lines if " late on all ranks" in text]
    assert any(name.startswith("_side (dmuon/step/overlap.py:") for name in late), late
    assert any(name.startswith("fill_stream (dmuon/comm/context.py:") for name in late), late


def test_poisoned_buffers_change_no_bits(device_ranks: Rows) -> None:
    first, second = device_ranks(2, delayed, None)
    assert first == second
    assert {status for status, _ in first} == {"pass"}, first
    late = {text.split(" (")[0] for _, text in first if " late on all ranks" in text}
    assert {"fill_stream", "publish_stream", "reduce_stream", "_side", "_vote_stream"} <= late


def test_a_missing_wait_is_found_by_the_stream_that_nobody_waits_for(device_ranks: Rows) -> None:
    [lines] = device_ranks(1, delayed, Plant("EarlyUpdates.join", "self._side.join"))
    failed = [text for status, text in lines if status == "fail"]
    assert failed and all(text.startswith("_side (dmuon/step/overlap.py:") for text in failed), lines
