"""What exchanging matrices costs: dmuon.Muon on an FSDP2 model in every mode of its pipeline, beside other ways.

Programs take turns as in bench/step.py, which explains the columns: ``exchanged async P`` and ``exchanged in turn P``
with ``prefetch_count=P`` (the owners orthogonalize at the same time, or one batch after the other),
gather-then-compute over FSDP2, dedicated owners with FSDP2 for the rest, FSDP2 + AdamW. Two more columns:

    in flight  most MB alive at once of what is packed, on its way or put together in step(), counted
    equal      1 where all weights are bitwise those of the first program after the whole run

    python bench/exchange.py --json bench/results/exchange-cpu.json
    python bench/exchange.py --rate 400mbit --rounds 5

``--rate`` runs everything in a network namespace of its own, in which the loopback interface passes so many bits per
second, of all ranks and both directions together (tc's token bucket). That needs Linux with ``unshare``, ``ip`` and
``tc``, and root only where users may not have namespaces; where the machine cannot do it, this exits with status 2.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common.harness import Record, on_ranks, run
from common.ledger import Ledger
from common.options import option, parse
from common.programs import (
    ADAMW,
    COLUMNS,
    DEDICATED,
    GATHER,
    LR,
    Program,
    Sizes,
    build_stock,
    compare,
    data,
    described,
    whole_weights,
)
from common.ranks import over_ranks
from common.results import columns
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training.model import GPT
from training.trainer import sharded

import dmuon
from dmuon.comm.domain import make_domain
from dmuon.exchanged import layouts
from dmuon.planning.cost_lookup import link_ns_per_byte

CONFINED = "DMUON_BENCH_CONFINED"  # set inside of the network namespace
REPEATS = 3  # of counting: a thread of gloo may keep what has arrived for a moment
MB = 1e6
SAVED = {"step()": ".0%", "step": ".0%"}


@dataclass(frozen=True, slots=True)
class Settings(Sizes):
    world: int = option(2, least=2)  # one rank exchanges nothing
    chunk_bytes: int = 2**28
    rate: str | None = None


MODES = {  # whether owners orthogonalize at the same time, and how many rounds are prefetched
    f"exchanged {'async' if together else 'in turn'} {prefetch}": (together, prefetch)
    for together in (False, True)
    for prefetch in range(4)
}
# What of the time is saved, by the article about configurations: from one program to the other.
SEEDS = {
    "prefetching, one batch at a time": ("20-40%", "exchanged in turn 0", "exchanged in turn 1"),
    "prefetching, owners together": ("20-40%", "exchanged async 0", "exchanged async 1"),
    "owners together, beside prefetching": ("20-30%", "exchanged in turn 1", "exchanged async 1"),
    "both": ("", "exchanged in turn 0", "exchanged async 1"),
}


def seeds(rows: Record) -> Record:
    """Published parts beside those that were measured, of ``step()`` and of the whole step."""
    return {
        name: {"published": said} | {column: 1 - rows[after][column] / rows[before][column] for column in SAVED}
        for name, (said, before, after) in SEEDS.items()
    }


def build(name: str, initial: GPT, mesh: DeviceMesh, settings: Settings) -> Program:
    if name not in MODES:
        return build_stock(name, initial, mesh, settings)
    model = sharded(fully_shard, copy.deepcopy(initial), mesh=mesh)
    config = dmuon.create_dtensor_config(*MODES[name], costs=settings.costs, chunk_bytes=settings.chunk_bytes)
    return Program(name, model, [dmuon.Muon(model, lr=LR, distributed_config=config)], "owners")


def plan_with_one_link(world: int) -> None:
    """Measure the link once, so that all programs have the same owners."""
    measured = link_ns_per_byte(make_domain(range(world), torch.device("cpu")))
    layouts.link_ns_per_byte = lambda _domain: measured


def in_flight(program: Program, settings: Settings, rank: int) -> float:
    """MB that a step holds at most of what is exchanged, on the rank with most; the least of some steps. Collective."""
    found = []
    for i in range(REPEATS):
        program.backward(*data(settings, 500 + i, rank, program.shared))
        with Ledger() as inside:
            program.update()
        program.zero_grad()
        found.append(inside.in_flight)
    return over_ranks([min(found) / MB])[0]


def equal_to_first(programs: list[Program]) -> dict[str, int]:
    """Of each program of Muon, whether all weights are bitwise those of the first."""
    first = whole_weights(programs[0].model)
    same = {}
    for program in programs:
        if program.kind != "adamw":
            weights = whole_weights(program.model)
            bits = (torch.equal(weights[n].view(torch.int32), w.view(torch.int32)) for n, w in first.items())
            same[program.name] = int(all(bits))
    return same


def worker(rank: int, settings: Settings) -> Record:
    plan_with_one_link(settings.world)
    programs, record = compare([*MODES, GATHER, DEDICATED, ADAMW], build, settings, rank)
    held = {p.name: in_flight(p, settings, rank) for p in programs if p.name in MODES}
    for column, values in (("in flight", held), ("equal", equal_to_first(programs))):
        for name, value in values.items():
            record["programs"][name][column] = value
    return {**record, "saved": seeds(record["programs"])}


def table(record: Record) -> str:
    rate = record["settings"]["rate"]
    limited = f"\nloopback limited to {rate} for all ranks together" if rate else ""
    shown = {**COLUMNS, "in flight": ".1f", "equal": "d"}
    text = f"{described(record)}{limited}\n\n{columns(record['programs'], shown, 'program')}"
    saved = columns(record["saved"], {"published": "", **SAVED}, "less time by") if record.get("saved") else ""
    return f"{text}\n\n{saved}".rstrip()


# -- a slower loopback -------------------------------------------------------------------------------------------------


def run_confined(rate: str, argv: Sequence[str]) -> int:
    """The whole bench in a network namespace of its own; 2 where that cannot be had."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        print(f"--rate needs {', '.join(missing)}, not found on this machine", file=sys.stderr)
        return 2
    # Segments smaller than the bucket, and a bucket smaller than what is exchanged, or nothing would be limited.
    lines = ["set -e", "ip link set lo mtu 16384", "ip link set lo up"]
    lines += [f"tc qdisc add dev lo root handle 1: tbf rate {rate} burst 64kb limit 64mb", 'test $# = 0 || exec "$@"']
    mapped = [] if os.geteuid() == 0 else ["--map-root-user"]  # which needs namespaces for users
    confined = ["unshare", *mapped, "--net", "sh", "-c", "\n".join(lines), "sh"]
    tried = subprocess.run(confined, capture_output=True, text=True)
    if tried.returncode:
        why = "it needs root or namespaces for users, and CONFIG_NET_SCH_TBF"
        print(f"--rate is not possible here: {' '.join(tried.stderr.split())}; {why}", file=sys.stderr)
        return 2
    command = [*confined, sys.executable, str(Path(__file__).resolve()), *argv]
    return subprocess.run(command, env={**os.environ, CONFINED: "1"}).returncode


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    _, settings = parse(Settings, __doc__, argv)
    if settings.rate and settings.read is None and CONFINED not in os.environ:
        return run_confined(settings.rate, argv)
    return run(Settings, __doc__, on_ranks(worker), table, argv)


if __name__ == "__main__":
    sys.exit(main())
