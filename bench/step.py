"""What a step costs: dedicated Muon in every mode, gather-then-compute Muon, and FSDP2 + AdamW, beside ideals.

All programs live in one process tree and take turns, so that drift of the machine hits them alike. Printed are
medians over rounds and ratios of medians; the error column is the largest relative difference of any weight from a
single-process run of the same steps (for AdamW from a single-process AdamW).

With F = forward + backward of one rank without communication, N = one rank's Newton-Schulz time for all matrices and
W ranks, the ideal step is F + N/W for dedicated owners, F + N when every rank computes everything, and F for AdamW.
Exposed is a step minus the same step without optimizer; ``of N/W`` is that over the ideal share of Newton-Schulz.

    python bench/step.py --world 2 --rounds 15
    python bench/step.py --world 2 --rounds 15 --programs sweep     # transports, prefetching, outstanding reductions
"""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict, dataclass

from common.clock import collect, in_turn, medians
from common.options import parse
from common.programs import (
    ADAMW,
    DEDICATED,
    GATHER,
    LEAST,
    LR,
    Mode,
    Program,
    Sizes,
    build_dedicated,
    build_stock,
    data,
    errors,
    initial_model,
)
from common.ranks import run_ranks, timed
from common.results import origin, without_home, write_json
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training.model import GPT

import dmuon

BARE = " without optimizer"
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
PROGRAMS = {"modes": MODES, "sweep": SWEEP}


@dataclass(frozen=True, slots=True)
class Settings(Sizes):
    programs: str = "modes"
    json: str | None = None


def build(name: str, initial: GPT, mesh: DeviceMesh, settings: Settings) -> Program:
    mode = PROGRAMS[settings.programs].get(name)
    if mode is None:
        return build_stock(name, initial, mesh, settings)
    return build_dedicated(name, mode, copy.deepcopy(initial), settings)


def measure(programs: list[Program], initial: GPT, settings: Settings, rank: int) -> dict[str, list[float]]:
    """Milliseconds by program, with and without its optimizers; F and N of one rank alone."""
    local = copy.deepcopy(initial)
    muon = dmuon.Muon(local, lr=LR)
    alone = Program("local", local, [muon], "muon")

    def sample(index: int) -> dict[str, float]:
        batch = data(settings, 1000 + index, rank)
        took = {"F": 1e3 * timed(lambda: alone.step(*batch, optimize=False))}
        alone.step(*batch)
        took["N"] = 1e3 * muon.last_step.seconds["ns"]
        for program in in_turn(programs, index):
            batch = data(settings, 1000 + index, rank, program.shared)
            took[program.name] = 1e3 * timed(lambda p=program, b=batch: p.step(*b))
            took[program.name + BARE] = 1e3 * timed(lambda p=program, b=batch: p.step(*b, optimize=False))
        return took

    return collect(settings.warmup, settings.rounds, sample)


def report(settings: Settings, samples: dict[str, list[float]], error: dict[str, float], balance: float) -> str:
    median = medians(samples)
    forward, newton = median["F"], median["N"]
    ideals = {"dedicated": forward + newton / settings.world, "gather": forward + newton, "fsdp2": forward}
    gather = median[GATHER] - median[GATHER + BARE]
    lines = [
        f"{settings.world} ranks, 1 thread each; {settings.layers} layers of width {settings.width}; "
        f"{settings.tokens} tokens per rank; {settings.rounds} interleaved rounds; medians in ms",
        f"F (forward + backward, no communication) {forward:.1f}   N (Newton-Schulz of all matrices on one rank) "
        f"{newton:.1f}   planned max/mean load {balance:.3f}",
        "",
        f"{'program':<24}{'step':>9}{'ideal':>9}{'over':>7}{'exposed':>9}{'of N/W':>8}"
        f"{'of gather':>11}{'of AdamW':>10}{'error':>10}",
    ]
    for name in error:
        ideal = ideals[name.split()[0].split("-")[0]]
        # With overlap, backward orthogonalizes whether or not a step follows: its own would hide that.
        exposed = median[name] - median[name.replace(" overlap", "") + BARE]
        lines.append(
            f"{name:<24}{median[name]:>9.1f}{ideal:>9.1f}{median[name] / ideal:>7.2f}{exposed:>9.1f}"
            f"{exposed * settings.world / newton:>8.2f}"
            f"{exposed / gather:>11.2f}{median[name] / median[ADAMW]:>10.2f}{error[name]:>10.1e}"
        )
    lines.append("")
    lines.append("exposed: step minus the same step without optimizer (and without overlap); of gather: as a part of")
    lines.append("gather-then-compute's; of N/W: over the ideal share of Newton-Schulz")
    return "\n".join(lines)


def worker(rank: int, settings: Settings) -> None:
    mesh = init_device_mesh("cpu", (settings.world,))
    initial = initial_model(settings)
    programs = [build(name, initial, mesh, settings) for name in (*PROGRAMS[settings.programs], GATHER, ADAMW)]
    error = errors(programs, initial, settings, rank)
    samples = measure(programs, initial, settings, rank)
    if rank == 0:
        plan = programs[0].plan
        print(report(settings, samples, error, plan.balance), flush=True)
        if settings.json:
            result = {
                "settings": asdict(settings),
                **origin(),
                "cost_source": without_home(plan.cost_source),
                "samples_ms": samples,
                "errors": error,
            }
            write_json(settings.json, result)


def main(argv: list[str] | None = None) -> int:
    _, settings = parse(Settings, __doc__, argv, least=LEAST, choices={"programs": PROGRAMS})
    run_ranks(settings.world, worker, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
