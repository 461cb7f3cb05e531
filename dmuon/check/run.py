"""All checks in their order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch

from dmuon.check.memory import allocated_when_dedicated
from dmuon.check.reference import Twin, train_alone
from dmuon.check.report import Board, Reading, Stopped
from dmuon.check.speed import Speed, measure_speed
from dmuon.check.topologies import Grid, grid_of, mesh_of
from dmuon.check.trial import ROWS, Kind, Trial


@dataclass(frozen=True, slots=True)
class Settings:
    """What is checked.

    Attributes:
        keep: residencies, as ``not reshard_after_forward``.
        tolerance: factor on all limits of differences.
        timeout: of every process group.
        speed: None leaves the speed line out.
    """

    device: torch.device
    topologies: tuple[str, ...]
    keep: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    tolerance: float
    timeout: timedelta
    speed: Speed | None


def run_checks(board: Board, settings: Settings, hosts: int) -> None:
    """Add a line per check. Collective over all ranks.

    Raises:
        Stopped: a fault after which nothing more can be checked.
    """
    rows = ROWS * board.ranks.world
    twins: dict[torch.dtype, Twin] = {}
    for kind in _kinds(board, settings, hosts):
        if kind.dtype not in twins and not _train_twin(board, twins, kind, rows):
            continue
        with process_group(board, str(kind)):
            _try(board, kind, twins[kind.dtype], rows)
    if settings.speed is not None:
        with process_group(board, "speed"):
            _measure(board, settings, settings.speed)


def _kinds(board: Board, settings: Settings, hosts: int) -> Iterator[Kind]:
    newton: Sequence[torch.dtype | None] = [torch.float32]
    if settings.device.type != "cpu":
        newton = [torch.float32, None]  # dmuon's choice there is fp16
    for name in settings.topologies:
        grid = grid_of(name, board.ranks.world, hosts)
        if isinstance(grid, str):
            board.say("skip", "parity", name, grid)
            continue
        for dtype, keep, ns_dtype in product(settings.dtypes, _residencies(settings, grid), newton):
            if dtype == torch.float32 or ns_dtype == torch.float32:
                yield Kind(grid, keep, dtype, ns_dtype, settings.device, settings.timeout, settings.tolerance)


def _residencies(settings: Settings, grid: Grid) -> Sequence[bool]:
    """Without shards nothing can be freed: one of them says it all."""
    shards = any(name == "shard" and extent > 1 for name, extent in grid.dims)
    return settings.keep if shards else settings.keep[-1:]


def _train_twin(board: Board, twins: dict[torch.dtype, Twin], kind: Kind, rows: int) -> bool:
    def train() -> None:
        twins[kind.dtype] = train_alone(rows, kind.device, kind.dtype)

    return board.judge("reference", str(kind.dtype), train)


@contextmanager
def process_group(board: Board, where: str) -> Iterator[None]:
    """The default group for what is inside; all groups that were made there end with it.

    Raises:
        Stopped: it could not be made, or not ended on some ranks.
    """

    def end() -> None:
        gc.collect()  # the modules and the hooks of a dedicated model refer to each other
        mesh_of.cache_clear()
        board.ranks.end_group()

    if not board.judge("start", where, board.ranks.start_group):
        raise Stopped(f"the start of {where}")
    yield
    board.judge("end", where, end)


def _try(board: Board, kind: Kind, twin: Twin, rows: int) -> None:
    trials: list[Trial] = []

    def parity() -> list[Reading]:
        trials.append(Trial(kind, twin, rows))
        return trials[0].parity()

    if not board.judge("parity", str(kind), parity) or kind.dtype != torch.float32 or kind.ns_dtype is None:
        return
    trial = trials[0]
    checks: dict[str, Callable[[], list[Reading]]] = {
        "accumulate": trial.accumulation,
        "structure": trial.structure,
        "checkpoint": trial.checkpoint,
    }
    for name, check in checks.items():
        if not board.judge(name, str(kind), check):
            return


def _measure(board: Board, settings: Settings, speed: Speed) -> None:
    said: list[str] = []

    where = f"1d {board.ranks.world}"
    if settings.device.type == "cuda":
        board.judge("memory", where, lambda: allocated_when_dedicated(speed, settings.device, settings.timeout))
        gc.collect()
    if board.judge("speed", where, lambda: said.append(measure_speed(speed, settings.device, settings.timeout))):
        board.say("info", "speed", where, f"{speed}: {said[0]}")
