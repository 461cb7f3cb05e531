"""What exchanging matrices costs: dmuon.Muon on an FSDP2 model in every mode of its pipeline, beside other ways.

All programs live in one process tree and take turns, so that drift of the machine hits them alike. Programs:
``exchanged async P`` and ``exchanged in turn P`` with ``prefetch_count=P`` (the owners orthogonalize at the same time,
or one batch after the other), gather-then-compute over FSDP2, dedicated owners with FSDP2 for the rest, FSDP2 + AdamW.
With ``--sweep small`` the programs are values of ``small_param_numel_threshold``, on a model of many shapes.

Columns; times are medians over rounds in ms, of the slowest rank unless said otherwise:

    step        forward, backward, all optimizers
    step()      the optimizers alone
    exposed     step minus the same step of the same layout without optimizer, as in bench/step.py
    of gather   exposed, as a part of gather-then-compute's
    NS          Newton-Schulz in step()
    waits       time in which step() packs, waits for and puts together what is exchanged, on the rank with the least
    alone       the same exchanges by themselves, one strictly after the other, without Newton-Schulz or updates
    hidden      the part of ``alone`` that prefetching hides: (step() with prefetch 0 - step()) / alone, both async or
                both in turn; 0 by definition without prefetching, and negative where prefetching costs time
    rounds      all-to-alls each way; that many rounds can overlap
    MB in       MB received in step() per rank, counted, the most of any rank, and ``=`` where it, what is sent and the
                number of calls equal dmuon.report.accounting.expected_exchange on all ranks, else ``!``
    MB all      MB received in the whole step (weights and gradients too), counted
    in flight   most MB alive at once of what is packed, on its way or put together, counted
    peak        most MB alive at once of everything that step() allocates, Newton-Schulz' workspace included
    error       largest relative difference of any weight from a single process after the first steps (3 by default)
    differs     the same from the first program after the whole run; ``=`` where all weights are bitwise equal

    python bench/exchange.py --json bench/results/exchange-cpu.json
    python bench/exchange.py --sweep small
    sudo python bench/exchange.py --rate 200mbit --rounds 7

``--rate`` runs everything in a network namespace of its own, in which the loopback interface passes so many bits per
second, of all ranks and both directions together (tc's token bucket). That needs root and Linux with ``unshare``,
``ip`` and ``tc``; where the machine cannot do it, this exits with status 2.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.clock import collect, in_turn, medians
from common.ledger import Ledger
from common.options import parse
from common.programs import (
    ADAMW,
    DEDICATED,
    GATHER,
    LEAST,
    LR,
    Program,
    Sizes,
    build_stock,
    data,
    errors,
    initial_model,
    largest_difference,
    whole_weights,
)
from common.ranks import over_ranks, run_ranks, timed
from common.results import origin, without_home, write_json
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from training.model import GPT, MLP, GPTConfig
from training.trainer import sharded

import dmuon
from dmuon.comm.domain import AllToAll, Copying, Redistribution, make_domain
from dmuon.exchanged import layouts
from dmuon.planning.cost_lookup import link_ns_per_byte
from dmuon.report.accounting import expected_exchange
from dmuon.step.rounds import ExchangedRound

CONFINED = "DMUON_BENCH_CONFINED"  # set inside of the network namespace
PROBE_BYTES = 2**23
REPEATS = 3  # of counting: a thread of gloo may keep what has arrived for a moment
MB = 1e6
EXCHANGES = ("alltoall_base_", "broadcast_")


@dataclass(frozen=True, slots=True)
class Settings(Sizes):
    chunk_bytes: int = 2**28
    small: int = 65536
    sweep: str = "modes"
    rate: str | None = None
    json: str | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """How an exchanged model's optimizer is configured; ``None`` as the settings say."""

    together: bool = True
    prefetch: int = 1
    small: int | None = None

    @property
    def sequential(self) -> Mode:
        return replace(self, prefetch=0)


SWEEPS: dict[str, dict[str, Mode]] = {
    "modes": {
        f"exchanged {'async' if together else 'in turn'} {prefetch}": Mode(together, prefetch)
        for together in (False, True)
        for prefetch in range(4)
    },
    "small": {
        f"exchanged small {small} / {prefetch}": Mode(prefetch=prefetch, small=small)
        for small in (0, 2**14, 2**16, 2**18, 2**20)
        for prefetch in (0, 1)
    },
}


def swept_model(settings: Settings) -> GPT:
    """The GPT; to sweep over small matrices, one whose blocks have MLPs of 32, 64, 128, ... hidden units."""
    model = initial_model(settings)
    if settings.sweep == "small":
        for i, block in enumerate(model.blocks):
            block.mlp = MLP(GPTConfig(width=settings.width, inner=32 << (i % 8)))
    return model


def build(name: str, initial: GPT, mesh: DeviceMesh, settings: Settings) -> Program:
    mode = SWEEPS[settings.sweep].get(name)
    if mode is None:
        return build_stock(name, initial, mesh, settings)
    model = sharded(fully_shard, copy.deepcopy(initial), mesh=mesh)
    config = dmuon.create_dtensor_config(
        mode.together,
        mode.prefetch,
        costs=settings.costs,
        chunk_bytes=settings.chunk_bytes,
        small_param_numel_threshold=settings.small if mode.small is None else mode.small,
    )
    return Program(name, model, [dmuon.Muon(model, lr=LR, distributed_config=config)], "muon")


def exchanged_rounds(program: Program) -> list[ExchangedRound]:
    muon = program.optimizers[0]
    rounds = muon._rounds if isinstance(muon, dmuon.Muon) else []
    return [one for one in rounds if isinstance(one, ExchangedRound) and one.exchanged]


def plan_with_one_link(world: int) -> float:
    """Measure the link once, so that all programs have the same owners; ns per byte."""
    measured = link_ns_per_byte(make_domain(range(world), torch.device("cpu")))
    layouts.link_ns_per_byte = lambda _domain: measured
    return measured


def link_mb_per_s(world: int) -> float:
    """What an all-to-all brings every rank from the others, at best of three."""
    sent = torch.zeros(PROBE_BYTES)[: PROBE_BYTES // 4 // world * world]
    received = torch.empty_like(sent)
    best = min(timed(lambda: dist.all_to_all_single(received, sent)) for _ in range(3))
    return sent.nbytes * (world - 1) / world / best / MB


# -- counting ----------------------------------------------------------------------------------------------------------


def accounts(program: Program, settings: Settings, rank: int) -> dict[str, int]:
    """What a step moves and allocates, the most of any rank; ``unexpected`` is 1 where a rank's differ. Collective.

    Of memory it is the least of some steps.
    """
    memory = []
    for i in range(REPEATS):
        with Ledger() as whole:
            program.backward(*data(settings, 500 + i, rank, program.shared))
            with Ledger() as inside:
                program.update()
        program.zero_grad()
        memory.append((inside.in_flight, inside.peak))
    rounds = len(exchanged_rounds(program))

    def in_step(counted: Counter[str]) -> int:
        return sum(counted[name] for name in EXCHANGES) if rounds else sum(counted.values())

    mine = {
        "received": sum(whole.received.values()),
        "received_in_step": in_step(inside.received),
        "sent_in_step": in_step(inside.sent),
        "calls_in_step": in_step(inside.calls),
        "in_flight": min(in_flight for in_flight, _ in memory),
        "peak": min(peak for _, peak in memory),
    }
    if rounds:
        budget = expected_exchange(program.optimizers[0])
        expected = {
            "received_in_step": budget.received_before + budget.received_after,
            "sent_in_step": budget.sent_before + budget.sent_after,
            "calls_in_step": budget.calls,
        }
        unexpected = any(mine[name] != value for name, value in expected.items())
        mine |= {"rounds": rounds, "unexpected": unexpected}
    most = over_ranks(list(mine.values()))
    return {name: int(value) for name, value in zip(mine, most, strict=True)}


# -- timing ------------------------------------------------------------------------------------------------------------


def timed_step(program: Program, x: Tensor, y: Tensor) -> dict[str, float]:
    """Milliseconds by column."""
    columns = {"step": 1e3 * timed(lambda: program.step(x, y))}
    (columns["step()"],) = over_ranks([1e3 * program.update_seconds])
    muon = program.optimizers[0]
    if isinstance(muon, dmuon.Muon):
        phases = muon.last_step.seconds
        (columns["NS"],) = over_ranks([1e3 * phases.get("ns", 0.0)])
        (columns["waits"],) = over_ranks([1e3 * phases.get("exchange", 0.0)], dist.ReduceOp.MIN)
    return columns


class Replay:
    """A program's exchanges without anything else, in the order of its rounds."""

    def __init__(self, rounds: list[ExchangedRound]) -> None:
        self._rounds = rounds
        # What fp32 Newton-Schulz makes of fp32 momentum has its dtype.
        self._parts = [
            {
                i: torch.zeros_like(batch.momentum(0, len(batch.params)))
                for i, batch in enumerate(round_.batches)
                if round_.domain.position in batch.parcel.pieces
            }
            for round_ in rounds
        ]

    def __call__(self) -> None:
        for round_, parts in zip(self._rounds, self._parts, strict=True):
            like = torch.empty(0, dtype=round_.batches[0].dtype)
            ways = [p.to_owner for p in round_.parcels], [p.from_owner for p in round_.parcels]
            there, back_again = (AllToAll(routes, round_.domain) for routes in ways)
            whole = Redistribution(there, parts, like, "replay").wait()
            back = Redistribution(back_again, whole, like, "replay").wait()
            if round_.copies.needed:
                Copying(round_.copies, back, like, "replay").wait()


def measure(programs: list[Program], settings: Settings, rank: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds by program and column; those without optimizer under the name of their layout."""
    replays = {p.name: Replay(exchanged_rounds(p)) for p in programs if exchanged_rounds(p)}
    bare = {"fsdp2": programs[0], DEDICATED: next(p for p in programs if p.name == DEDICATED)}

    def sample(index: int) -> dict[tuple[str, str], float]:
        took: dict[tuple[str, str], float] = {}
        x, y = data(settings, 1000 + index, rank)
        for program in in_turn(programs, index):
            columns = timed_step(program, x, y)
            if program.name in replays:
                columns["alone"] = 1e3 * timed(replays[program.name])
            took |= {(program.name, column): value for column, value in columns.items()}
        for layout, program in bare.items():
            spent = timed(lambda p=program: p.step(x, y, optimize=False))
            took[f"{layout} without optimizer", "step"] = 1e3 * spent
        return took

    return collect(settings.warmup, settings.rounds, sample)


def differences(programs: list[Program]) -> dict[str, tuple[float, bool]]:
    """By program of Muon, the largest relative Frobenius difference of any weight from the first's, and equality."""
    first: dict[str, Tensor] = {}
    by_program = {}
    for program in programs:
        if program.reference == "muon":
            weights = whole_weights(program.model)
            first = first or weights
            bits = all(torch.equal(weights[n].view(torch.int32), w.view(torch.int32)) for n, w in first.items())
            by_program[program.name] = largest_difference(weights, first), bits
    return by_program


# -- reporting ---------------------------------------------------------------------------------------------------------


def results(
    names: list[str],
    settings: Settings,
    median: dict[str, dict[str, float]],
    accounted: dict[str, dict[str, int]],
    error: dict[str, float],
    differ: dict[str, tuple[float, bool]],
) -> dict[str, dict[str, Any]]:
    """By program, its row: medians, counts and errors."""
    bare = {name: median[f"{DEDICATED if name == DEDICATED else 'fsdp2'} without optimizer"] for name in names}
    exposed = {name: median[name]["step"] - bare[name]["step"] for name in names}
    modes = SWEEPS[settings.sweep]
    by_mode = {mode: name for name, mode in modes.items()}
    rows = {}
    for name in names:
        row = {**median[name], "exposed": exposed[name], "of gather": exposed[name] / exposed[GATHER]}
        if name in modes:
            sequential = median[by_mode[modes[name].sequential]]
            row["hidden"] = (sequential["step()"] - row["step()"]) / row["alone"]
            row["mode"] = asdict(modes[name])
        row |= {**accounted[name], "error": error[name]}
        if name in differ:
            row["differs"], row["bitwise equal"] = differ[name]
        rows[name] = row
    return rows


def table(rows: dict[str, dict[str, Any]], settings: Settings, link: float) -> str:
    confined = [f"loopback limited to {settings.rate} for all ranks together"] if settings.rate else []
    wide = max(map(len, rows)) + 1
    lines = [
        f"{settings.world} ranks, 1 thread each, gloo; {settings.layers} layers of width {settings.width}; "
        f"{settings.tokens} tokens per rank; {settings.rounds} interleaved rounds; medians in ms, MB of 10^6 bytes",
        "; ".join([*confined, f"an all-to-all brings a rank {link:.0f} MB/s"]),
        "",
        f"{'program':<{wide}}{'step':>8}{'step()':>8}{'exposed':>9}{'of gather':>10}{'NS':>8}{'waits':>7}{'alone':>7}"
        f"{'hidden':>8}{'rounds':>7}{'MB in':>8} {'MB all':>8}{'in flight':>10}{'peak':>7}"
        f"{'error':>9}{'differs':>9}",
    ]
    for name, row in rows.items():

        def cell(column: str, width: int, form: str, scale: float = 1.0, of: dict[str, Any] = row) -> str:
            value = of.get(column)
            return f"{'-' if value is None else format(value / scale, form):>{width}}"

        exchanged = "rounds" in row
        equal = "!" if row.get("unexpected") else "=" if exchanged else ""
        same = "=" if row.get("bitwise equal") else ""
        lines.append(
            f"{name:<{wide}}{cell('step', 8, '.1f')}{cell('step()', 8, '.1f')}{cell('exposed', 9, '.1f')}"
            f"{cell('of gather', 10, '.2f')}{cell('NS', 8, '.1f')}{cell('waits', 7, '.1f')}{cell('alone', 7, '.1f')}"
            f"{cell('hidden', 8, '.2f')}{cell('rounds', 7, '.0f')}"
            f"{cell('received_in_step', 8, '.2f', MB)}{equal:<1}{cell('received', 8, '.2f', MB)}"
            f"{cell('in_flight', 10, '.2f', MB) if exchanged else '-':>10}"
            f"{cell('peak', 7, '.1f', MB)}{cell('error', 9, '.0e')}"
            f"{cell('differs', 9, '.0e')}{same}"
        )
    return "\n".join(lines)


def by_program(values: dict[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (name, column), value in values.items():
        nested.setdefault(name, {})[column] = value
    return nested


def worker(rank: int, settings: Settings) -> None:
    mesh = init_device_mesh("cpu", (settings.world,))
    link = link_mb_per_s(settings.world)
    per_byte = plan_with_one_link(settings.world)
    initial = swept_model(settings)
    names = [*SWEEPS[settings.sweep], GATHER, DEDICATED, ADAMW]
    programs = [build(name, initial, mesh, settings) for name in names]
    error = errors(programs, initial, settings, rank)
    accounted = {program.name: accounts(program, settings, rank) for program in programs}
    samples = measure(programs, settings, rank)
    rows = results(names, settings, by_program(medians(samples)), accounted, error, differences(programs))
    if rank == 0:
        print(table(rows, settings, link), flush=True)
        if settings.json:
            plan = next(program for program in programs if program.name == DEDICATED).plan
            result = {
                "settings": {name: value for name, value in asdict(settings).items() if name != "json"},
                "columns": __doc__[__doc__.index("Columns;") : __doc__.index("    python bench")].strip().splitlines(),
                **origin(),
                "cost_source": without_home(plan.cost_source),
                "link": {"mb_per_s": link, "planned_ns_per_byte": per_byte},
                "programs": rows,
                "samples_ms": by_program(samples),
            }
            write_json(settings.json, result)


# -- a slower loopback -------------------------------------------------------------------------------------------------


def confinement(settings: Settings) -> str:
    """Shell commands that bring up the loopback of a new network namespace, slowed down."""
    # Segments smaller than the bucket, and a bucket smaller than what is exchanged, or nothing would be limited.
    lines = ["set -e", "ip link set lo mtu 16384", "ip link set lo up"]
    lines.append(f"tc qdisc add dev lo root handle 1: tbf rate {settings.rate} burst 64kb limit 64mb")
    return "\n".join(lines)


def run_confined(settings: Settings, argv: list[str]) -> int:
    """The whole bench in a network namespace of its own; 2 where that cannot be had."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        print(f"--rate needs {', '.join(missing)}, not found on this machine", file=sys.stderr)
        return 2
    script = confinement(settings)
    isolated = ["unshare", "-n", "sh", "-c"]
    tried = subprocess.run([*isolated, script], capture_output=True, text=True)
    if tried.returncode:
        said = " ".join((tried.stderr or tried.stdout).split())
        print(
            f"--rate is not possible here: {said}; it needs root, and a kernel with CONFIG_NET_SCH_TBF",
            file=sys.stderr,
        )
        return 2
    command = [*isolated, script + '\nexec "$@"', "sh", sys.executable, str(Path(__file__).resolve()), *argv]
    return subprocess.run(command, env={**os.environ, CONFINED: "1"}).returncode


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    least = {**LEAST, "chunk_bytes": 1, "world": 2}  # one rank exchanges nothing
    _, settings = parse(Settings, __doc__, argv, least=least, choices={"sweep": SWEEPS})
    if settings.rate and CONFINED not in os.environ:
        return run_confined(settings, argv)
    run_ranks(settings.world, worker, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
