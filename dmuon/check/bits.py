"""Trainings that must end with the same bits: with streams that run late, and with every collective waited for."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from dmuon.check.delays import COMPUTING, LateStreams, deterministic, not_a_number
from dmuon.check.report import Reading
from dmuon.check.run import process_group
from dmuon.check.stage import Stage
from dmuon.check.topologies import Grid, full_state, grid_of
from dmuon.check.trial import ROWS, Kind, backward, differing, start
from dmuon.dedicated.dedication import dedications
from dmuon.platform.torch_private import sleep_on_stream

_STEPS = 2  # with one stream late, before the next one is
_WORKSPACES = ":4096:8"  # without it, said before its first product, cuBLAS need not give the same bits twice
_LAYOUTS = ("1d", "fsdp2", "hsdp", "ddp", "tp", "fsdp2-hsdp", "cp", "tp-hsdp", "fsdp2-tp")
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """Which stream is late.

    Attributes:
        stream: its name; None: none is.
        rank: on which it is; None: on all of them.
    """

    stream: str | None
    rank: int | None = None

    def __str__(self) -> str:
        if self.stream is None:
            return "new memory holds NaN"
        return f"{self.stream} late on {'all ranks' if self.rank is None else f'rank {self.rank} alone'}"

    def on(self, rank: int) -> str | None:
        """The late stream of this rank."""
        return self.stream if self.rank in (None, rank) else None


def compare_delayed(stage: Stage) -> None:
    """The section: memory without numbers, and each stream late in turn."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = _WORKSPACES
    for kind in _kinds(stage, keeps=(False,)):
        if stage.fits(str(kind)):
            with process_group(stage.board, str(kind)):
                _compare_delayed(stage, kind)


def compare_synchronous(stage: Stage) -> None:
    """The section: each collective waited for where it starts."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = _WORKSPACES
    for kind in _kinds(stage, keeps=(False, True)):
        if stage.fits(str(kind)):
            with process_group(stage.board, str(kind)):
                stage.board.judge("asynchronous", str(kind), partial(_compare_synchronous, stage, kind))


def _kinds(stage: Stage, keeps: tuple[bool, ...]) -> Iterator[Kind]:
    """Every layout that fits, in either residency, in the dtypes that training takes."""
    for keep, name in product(keeps, _LAYOUTS):
        grid = grid_of(name, stage.launch.world, 1)
        if isinstance(grid, Grid) and not (keep and "shard" not in dict(grid.dims)):
            yield Kind(grid, keep, torch.float32, None, stage.device, stage.timeout, 1.0)


def train(
    stage: Stage, kind: Kind, cases: Sequence[Case], *, poison: bool = False, asynchronous: bool = True
) -> tuple[list[Weights], list[str]]:
    """Some steps with each case in turn. Collective over all ranks.

    Args:
        poison: memory that was just allocated holds NaN.

    Returns:
        Whole weights after each case, and the names of the streams.
    """
    late = _streams(stage)
    weights: list[Weights] = []
    with late.in_place(), deterministic(poison=poison):
        laid, optimizer = start(kind, asynchronous=asynchronous, overlap=kind.grid.dedicated)
        if poison:
            late.buffers = [buffer for each in dedications(laid.model) for buffer in each.runtime.buffers]
        for block in laid.model.blocks:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda *_: late.turn_to(COMPUTING))
        for number, case in enumerate(cases):
            late.late = case.on(stage.rank)
            for step in range(number * _STEPS, (number + 1) * _STEPS):
                backward(laid, kind, ROWS * stage.launch.world, step)
                late.turn_to(COMPUTING)
                optimizer.step()
                optimizer.zero_grad()
            weights.append({name: tensor.cpu() for name, tensor in full_state(laid.model).items()})
        late.buffers = ()
    del laid, optimizer
    gc.collect()
    return weights, late.names


def _compare_delayed(stage: Stage, kind: Kind) -> None:
    """One run without delays tells the bits; another has the cases in turn, and begins anew after one that fails."""
    board, where = stage.board, str(kind)
    first: list[Weights] = []
    expected: list[Weights] = []
    found: list[Weights] = []
    names: list[str] = []

    def begin() -> None:
        weights, streams = train(stage, kind, [Case(None)])
        first.extend(weights)
        names.extend(streams)

    def repeat() -> list[Reading]:
        expected.extend(train(stage, kind, [Case(None)] * len(cases))[0])
        return [_compared(expected[0], first[0], "two runs alike")]

    def late() -> None:
        found[:] = train(stage, kind, cases, poison=True)[0]

    if not board.judge("plain", where, begin):
        return
    everywhere: list[list[str]] = stage.gather(names)
    cases = [Case(name) for name in (None, *dict.fromkeys(name for of_rank in everywhere for name in of_rank))]
    cases += [Case(COMPUTING, rank) for rank in sorted({0, stage.launch.world - 1})]
    failed = board.failed
    if not board.judge("repeated", where, repeat) or board.failed > failed:
        return  # nothing can be told from bits
    while cases and stage.fits(f"{where}: {', '.join(map(str, cases))}") and board.judge("delayed", where, late):
        failed = board.failed
        for number, case in enumerate(cases):
            compared = _compared(found[number], expected[number], str(case))
            board.judge("bits", where, lambda reading=compared: [reading])  # type: ignore[misc]
            if board.failed > failed:
                break
        del cases[: number + 1]


def _compare_synchronous(stage: Stage, kind: Kind) -> list[Reading]:
    runs = [train(stage, kind, [Case(None)], asynchronous=each)[0][0] for each in (True, False)]
    return [_compared(runs[0], runs[1], "as with each collective waited for")]


def _streams(stage: Stage) -> LateStreams:
    return LateStreams(stage.device, sleep_on_stream if stage.device.type == "cuda" else _sleep, stage.rank)


def _sleep(milliseconds: float) -> None:
    time.sleep(milliseconds / 1e3)


def _compared(found: Weights, expected: Weights, what: str) -> Reading:
    names, numbers = differing(found, expected), not_a_number(found)
    text = f"{what}: bits of {len(names)} of {len(expected)} weights differ"
    if names:
        text += f", first {names[0]}" + (f"; NaN in {len(numbers)}" if numbers else "")
    return Reading("bits", text, len(names), 0)
