"""What a step costs: dedicated Muon in every mode, gather-then-compute Muon, and FSDP2 + AdamW, beside ideals.

All programs live in one process tree and take turns, so that drift of the machine hits them alike. Columns; times are
medians over rounds in ms, of the slowest rank unless said otherwise:

    step       forward, backward, all optimizers
    ideal      with F = forward + backward of one rank without communication, N = one rank's Newton-Schulz time for all
               matrices and W ranks: F + N/W for owners, F + N where every rank computes everything, F for AdamW
    over       step over ideal
    of AdamW   step over FSDP2 + AdamW's
    step()     the optimizers alone
    exposed    step minus the same step of the same layout without optimizer (and without overlap)
    of N/W     exposed over the ideal share of Newton-Schulz
    of gather  exposed, as a part of gather-then-compute's
    waits      time in which step() packs, waits for and puts together what is exchanged, on the rank with the least
    error      largest relative difference of any weight from a single process after the first steps (3 by default)

    python bench/step.py --world 2 --rounds 15
    python bench/step.py --world 2 --rounds 15 --programs sweep     # transports, prefetching, outstanding reductions
    python bench/step.py --world 4 --programs ablation              # what owners, Gram form, planner and batches save
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from common.ablation import LEVELS, PREDICTED, SEQUENTIAL, predicted, shares
from common.harness import Record, on_ranks, run
from common.programs import (
    ADAMW,
    COLUMNS,
    DEDICATED,
    GATHER,
    LEAST,
    Mode,
    Program,
    Sizes,
    build_dedicated,
    build_stock,
    described,
    errors,
    initial_model,
    measure_steps,
    rows_of,
)
from common.results import columns, without_home
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training.model import GPT

import dmuon

MODES = {
    DEDICATED: Mode(),
    "dedicated keep": Mode(keep=True),
    "dedicated overlap": Mode(overlap=True),
    "dedicated keep overlap": Mode(keep=True, overlap=True),
    "dedicated ddp": Mode(dims="replicate"),
    "dedicated tp": Mode(dims="tp"),
}
SWEEP = {
    DEDICATED: Mode(),
    "dedicated reductions 1": Mode(comm=dmuon.CommOptions(outstanding_reductions=1)),
    "dedicated reductions 4": Mode(comm=dmuon.CommOptions(outstanding_reductions=4)),
    "dedicated prefetch 0": Mode(comm=dmuon.CommOptions(prefetch=0)),
    "dedicated prefetch 2": Mode(comm=dmuon.CommOptions(prefetch=2)),
    "dedicated broadcast": Mode(comm=dmuon.CommOptions(transport="broadcast")),
    "dedicated single": Mode(comm=dmuon.CommOptions(transport="single")),
    "dedicated merged": Mode(comm=dmuon.CommOptions(merge_bytes=2**23)),
    "dedicated waiting": Mode(comm=dmuon.CommOptions(asynchronous=False)),
}
PROGRAMS = {"modes": MODES, "sweep": SWEEP, "ablation": {level: Mode(level=level) for level in LEVELS}}


@dataclass(frozen=True, slots=True)
class Settings(Sizes):
    programs: str = "modes"


def build(name: str, initial: GPT, mesh: DeviceMesh, settings: Settings) -> Program:
    mode = PROGRAMS[settings.programs].get(name)
    if mode is None:
        return build_stock(name, initial, mesh, settings)
    return build_dedicated(name, mode, copy.deepcopy(initial), settings)


def worker(rank: int, settings: Settings) -> Record:
    mesh = init_device_mesh("cpu", (settings.world,))
    initial = initial_model(settings)
    ablation = settings.programs == "ablation"
    names = (*PROGRAMS[settings.programs], *([SEQUENTIAL] if ablation else []), GATHER, ADAMW)
    programs = [build(name, initial, mesh, settings) for name in names]
    error = errors(programs, initial, settings, rank)
    samples = measure_steps(programs, initial, settings, rank)
    plan = programs[0].plan
    costs = {"cost_source": without_home(plan.cost_source), "balance": plan.balance}
    record = {**costs, **rows_of(programs, samples, error, settings.world)}
    if ablation:
        measured = {name: record["programs"][name]["exposed"] for name in (SEQUENTIAL, *LEVELS)}
        record["measured"], record["predicted"] = shares(measured), shares(predicted()) if rank == 0 else {}
    return record


def measure(settings: Settings) -> Record:
    return on_ranks(worker, settings)


def table(record: Record) -> str:
    shown = {name: how for name, how in COLUMNS.items() if name != "waits"}
    planned = f"planned max/mean load {record['balance']:.3f}"
    text = f"{described(record)}   {planned}\n\n{columns(record['programs'], shown, 'program')}"
    titles = {
        "measured": "exposed, measured",
        "predicted": "slowest rank, predicted for " + ", ".join(map(str, PREDICTED)),
    }
    for part, title in titles.items():
        if part in record:
            shown = {"ms": ".2f", "times": ".2f", "of the time": ".0%", "of the factor": ".0%"}
            text += f"\n\n{columns(record[part], shown, title)}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    return run(Settings, __doc__, argv, measure, table, least=LEAST, choices={"programs": PROGRAMS})


if __name__ == "__main__":
    sys.exit(main())
