"""What a step costs: dedicated Muon in every mode, gather-then-compute Muon, and FSDP2 + AdamW, beside ideals.

All programs live in one process tree and take turns, so that drift of the machine hits them alike. Columns; times are
medians over rounds in ms, of the slowest rank unless said otherwise:

    step       forward, backward, all optimizers
    ideal      with F = forward + backward of one rank without communication, N = one rank's Newton-Schulz time for all
               matrices and W ranks: F + N/W for owners, F + N where every rank computes everything, F for AdamW
    over       step over ideal
    sent       what forward and backward of the layout take beyond F: what FSDP2 or dedication sends in them
    rest       what the optimizer takes beyond its part of the ideal; so step = ideal + sent + rest
    over own   step over ideal + sent
    of AdamW   step over FSDP2 + AdamW's
    step()     the optimizers alone
    exposed    step minus the same step of the same layout without optimizer (and without overlap)
    of N/W     exposed over the ideal share of Newton-Schulz
    of gather  exposed, as a part of gather-then-compute's
    exposed CPU  the same in most processor time of a rank, its threads of gloo included
    waits      time in which step() packs, waits for and puts together what is exchanged, on the rank with the least
    error      largest relative difference of any weight from a single process after the first steps (3 by default)

    python bench/step.py --world 2 --rounds 15
    python bench/step.py --world 2 --rounds 15 --programs sweep     # transports, prefetching, merged blocks
    python bench/step.py --programs ablation     # on 1, 2 and 4 ranks, what owners, Gram form, planner and batches save
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from common.ablation import LEVELS, PREDICTED, SEQUENTIAL, predicted, shares
from common.harness import Record, on_ranks, run
from common.options import option
from common.programs import (
    ADAMW,
    COLUMNS,
    DEDICATED,
    GATHER,
    Mode,
    Program,
    Sizes,
    build_dedicated,
    build_stock,
    compare,
    described,
)
from common.results import columns
from torch.distributed.device_mesh import DeviceMesh
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
    """``worlds``: of the ablation, in place of ``world``."""

    programs: str = option("modes", choices=PROGRAMS)
    worlds: tuple[int, ...] = (1, 2, 4)


def build(name: str, initial: GPT, mesh: DeviceMesh, settings: Settings) -> Program:
    mode = PROGRAMS[settings.programs].get(name)
    if mode is None:
        return build_stock(name, initial, mesh, settings)
    return build_dedicated(name, mode, copy.deepcopy(initial), settings)


def worker(rank: int, settings: Settings) -> Record:
    ablation = settings.programs == "ablation"
    names = (*PROGRAMS[settings.programs], *([SEQUENTIAL] if ablation else []), GATHER, ADAMW)
    programs, found = compare(names, build, settings, rank)
    plan = programs[0].plan
    costs = {"cost_source": plan.cost_source.replace(str(Path.home()), "~"), "balance": plan.balance}
    return {**costs, **found}


def measure(settings: Settings) -> Record:
    if settings.programs != "ablation":
        return on_ranks(worker)(settings)
    worlds = {str(world): on_ranks(worker)(replace(settings, world=world)) for world in settings.worlds}
    saved = {
        f"{world} ranks, {column}": shares({name: found["programs"][name][column] for name in (SEQUENTIAL, *LEVELS)})
        for world, found in worlds.items()
        for column in ("exposed", "exposed CPU")
    }
    return {"worlds": worlds, "saved": {**saved, ", ".join(map(str, PREDICTED)): shares(predicted())}}


def table(record: Record) -> str:
    shown = {name: how for name, how in COLUMNS.items() if name != "waits"}
    parts = []
    for world, found in record.get("worlds", {str(record["settings"]["world"]): record}).items():
        text = described({**record, **found, "settings": {**record["settings"], "world": world}})
        parts.append(f"{text}   planned max/mean load {found['balance']:.3f}")
        parts.append(columns(found["programs"], shown, "program"))
    shown = {"ms": ".2f", "times": ".2f", "of the time": ".0%", "of the factor": ".0%", "published": ""}
    parts += [columns(rows, shown, title) for title, rows in record.get("saved", {}).items()]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, measure, table))
