"""What ranks on the CPU hold over many steps, and what giving free memory back to the system costs.

Programs run in processes of their own and take turns of some steps: a dedicated model, one that is exchanged, each also
without giving memory back, and FSDP2 + AdamW. Printed are the memory of the rank that holds most (resident, MiB) along
the way, its growth per step over the second half, the medians over turns of wall and processor time per step, and the
medians of their paired ratios to the same program without; the error column is the largest relative difference of a
weight from a single process.

    python bench/memory.py --world 2                                   # 40 turns of 50 steps
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing as mp
from common.clock import in_turn
from common.options import parse
from common.programs import (
    ADAMW,
    DEDICATED,
    LEAST,
    LR,
    Program,
    Sizes,
    build_stock,
    data,
    errors,
    initial_model,
)
from common.ranks import over_ranks, run_ranks
from common.results import origin, write_json
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training.trainer import sharded

import dmuon
from dmuon.platform import host

EXCHANGED = "exchanged"
WITHOUT = {name: f"{name}, memory kept" for name in (DEDICATED, EXCHANGED)}
PROGRAMS = [DEDICATED, WITHOUT[DEDICATED], EXCHANGED, WITHOUT[EXCHANGED], ADAMW]
SHOWN = 8  # points in time that are printed


@dataclass(frozen=True, slots=True)
class Settings(Sizes):
    layers: int = 2
    context: int = 64
    rounds: int = 40
    steps: int = 50
    json: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one program, over its ranks: seconds per step of the slowest, and MiB of the one that holds most."""

    wall: float
    processor: float
    resident: float


def build(name: str, settings: Settings) -> Program:
    mesh = init_device_mesh("cpu", (settings.world,))
    if name in WITHOUT.values():
        host.give_back_memory = lambda: None
        name = next(n for n, without in WITHOUT.items() if without == name)
    if name != EXCHANGED:
        return build_stock(name, initial_model(settings), mesh, settings)
    model = sharded(fully_shard, initial_model(settings), mesh=mesh)
    return Program(name, model, [dmuon.Muon(model, lr=LR)], "muon")


def worker(rank: int, name: str, settings: Settings, parents: list[Connection]) -> None:
    """Take a turn whenever the parent says so, until it says that there are no more."""
    program, parent = build(name, settings), parents[rank]
    parent.send(errors([program], initial_model(settings), settings, rank)[program.name])
    tokens = data(settings, 0, rank)
    while parent.recv():
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(settings.steps):
            program.step(*tokens)
        took = [time.perf_counter() - wall, time.process_time() - processor]
        parent.send(Turn(*(value / settings.steps for value in over_ranks(took)), *over_ranks([resident_mib()])))


def start(name: str, settings: Settings, parents: list[Connection]) -> None:
    """The ranks of one program, until they end; then who listens to them hears it."""
    try:
        run_ranks(settings.world, worker, name, settings, parents)
    finally:
        for parent in parents:
            parent.close()


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def run(settings: Settings) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """Turns and errors by program."""
    ranks: dict[str, list[Connection]] = {}
    for name in PROGRAMS:
        pairs = [mp.Pipe() for _ in range(settings.world)]
        ranks[name] = [ours for ours, _ in pairs]
        threading.Thread(target=start, args=(name, settings, [theirs for _, theirs in pairs])).start()
    worst = {name: max(connection.recv() for connection in ranks[name]) for name in PROGRAMS}
    turns: dict[str, list[Turn]] = {name: [] for name in PROGRAMS}
    for index in range(settings.rounds):
        for name in in_turn(PROGRAMS, index):
            for connection in ranks[name]:
                connection.send(True)
            of_ranks = [connection.recv() for connection in ranks[name]]
            turns[name].append(of_ranks[0])
    for connections in ranks.values():
        for connection in connections:
            connection.send(False)
    return turns, worst


def report(settings: Settings, turns: dict[str, list[Turn]], error: dict[str, float]) -> str:
    shown = sorted({round(settings.rounds * part / SHOWN) for part in range(1, SHOWN + 1)} - {0})
    marks = "".join(f"{at * settings.steps:>7}" for at in shown)
    lines = [
        f"{settings.world} ranks, 1 thread each; {settings.layers} layers of width {settings.width}; "
        f"{settings.tokens} tokens per rank; turns of {settings.steps} steps; resident MiB after so many steps",
        "",
        f"{'program':<26}{marks}{'a step':>8}{'wall ms':>9}{'cpu ms':>8}{'wall':>7}{'cpu':>7}{'error':>9}",
    ]
    for name, of_program in turns.items():
        resident = "".join(f"{of_program[at - 1].resident:>7.0f}" for at in shown)
        half = of_program[len(of_program) // 2 :]
        growth = (half[-1].resident - half[0].resident) / max((len(half) - 1) * settings.steps, 1)
        wall, processor = (
            1e3 * statistics.median(getattr(t, kind) for t in of_program) for kind in ("wall", "processor")
        )
        ratios = ""
        if name in WITHOUT:
            pairs = list(zip(of_program, turns[WITHOUT[name]], strict=True))
            ratios = f"{statistics.median(a.wall / b.wall for a, b in pairs):>7.3f}"
            ratios += f"{statistics.median(a.processor / b.processor for a, b in pairs):>7.3f}"
        lines.append(f"{name:<26}{resident}{growth:>8.3f}{wall:>9.1f}{processor:>8.1f}{ratios:>14}{error[name]:>9.1e}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    _, settings = parse(Settings, __doc__, argv, least={**LEAST, "steps": 1})
    turns, error = run(settings)
    print(report(settings, turns, error), flush=True)
    if settings.json:
        samples = {name: [asdict(turn) for turn in of_program] for name, of_program in turns.items()}
        write_json(settings.json, {"settings": asdict(settings), **origin(), "turns": samples, "errors": error})
    return 0


if __name__ == "__main__":
    sys.exit(main())
