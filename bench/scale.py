"""How the costs of one rank grow with ranks and with matrices: the real code of rank 0 in a pretended process group.

For each number of ranks and of matrices (16x16, so that arithmetic costs next to nothing; in 32 blocks) a process
builds, trains, saves and loads, in the chosen residency. Of each phase it prints processor seconds, collectives that
were started, and MiB by which memory had grown at most; then the exponents of growth, between the least and the most
ranks, and matrices. ``--counts`` prints calls of functions instead of seconds, which no other work disturbs.

``mismatched`` phases are those that end because all other ranks were given something else than this one.

``experts`` are stacks over groups of 8 ranks: each group has as many matrices as are given, sharded within it, and
nothing of the others'. Only in a dedicated model do forward and backward run; elsewhere they are not this library's.

    python bench/scale.py --ranks 8,64,1024 --matrices 224,2048 --json bench/results/scale.json
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import log
from operator import itemgetter

import torch
import torch._dynamo  # which the first DTensor imports
import torch.nn as nn
from common.harness import Record
from common.harness import run as run_bench
from common.options import Options, option
from common.pretended import dissent, pretend
from common.ranks import resident_mib, restart_peak
from common.results import columns
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dmuon

DEDICATED, EXCHANGED, EXPERTS = "dedicated", "exchanged", "experts"
RESIDENCIES = (DEDICATED, EXCHANGED, EXPERTS)
GROUP = 8  # ranks that hold the same experts
BLOCKS = 32
SIDE = 16
LATER = 3  # steps after the first, of which the median counts


@dataclass(frozen=True, slots=True)
class Settings(Options):
    ranks: tuple[int, ...] = option((8, 64, 256, 1024), least=2)
    matrices: tuple[int, ...] = option((224,), least=BLOCKS)
    residency: tuple[str, ...] = option(RESIDENCIES, choices=RESIDENCIES)
    counts: bool = False


class Block(nn.Module):
    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(matrices))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


Phase = dict[str, float]  # processor seconds or calls, collectives that were started, and most MiB more than before


class Meter:
    """Measures phases of this process."""

    def __init__(self, counts: Counter[str], calls: bool) -> None:
        self.phases: dict[str, list[Phase]] = {}
        self._counts, self._calls = counts, calls

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        called, collectives = 0, self._counts.total()

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal called
            called += event in ("call", "c_call")

        gc.collect()  # of what came before, which this phase would be charged for if it happened to be due
        before = resident_mib()
        restart_peak()
        start = time.process_time()
        if self._calls:
            sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
        work = called if self._calls else time.process_time() - start
        grown = resident_mib(peak=True) - before
        found = {"work": work, "collectives": self._counts.total() - collectives, "grown": grown}
        self.phases.setdefault(name, []).append(found)


def live(residency: str, ranks: int, matrices: int, calls: bool) -> dict[str, Phase]:
    """Of one life of a model on rank 0, by phase. Once in a process."""
    torch.set_num_threads(1)
    assert dmuon.dedicate_params and dmuon.Muon  # whose first use imports them, in no phase
    meter = Meter(pretend(ranks), calls)
    mesh = init_device_mesh("cpu", (ranks,))
    config = dmuon.create_dtensor_config(costs="flops")
    model = experts(ranks, matrices) if residency == EXPERTS else plain_model(matrices)
    if residency == EXCHANGED:
        shard(model, mesh)
    with meter.phase("build"):
        if residency == DEDICATED:
            dmuon.dedicate_params(model, mesh, costs="flops")
            optimizer = dmuon.Muon(model)
        elif residency == EXCHANGED:
            optimizer = dmuon.Muon(model, distributed_config=config)
        else:
            groups = [{"params": [*model.parameters()], "use_muon": True}]
            optimizer = dmuon.Muon(groups, distributed_config=config)
    x = torch.randn(2, SIDE)
    for number in range(1 + LATER):
        later = "" if number else "first "
        if residency == DEDICATED:
            with meter.phase(f"{later}forward"):
                loss = model(x).sum()
            with meter.phase(f"{later}backward"):
                loss.backward()
        else:  # in which forward and backward are not this library's
            for param in model.parameters():
                # As FSDP2 gives it: of the very layout that the parameter has.
                param.grad = DTensor(torch.ones_like(param.to_local()), param._spec, requires_grad=False)
        with meter.phase(f"{later}step"):
            optimizer.step()
        with meter.phase(f"{later}zero_grad"):
            optimizer.zero_grad()
    save_and_load(meter, optimizer, *([model] if residency == DEDICATED else []))
    if residency == EXPERTS:
        return medians(meter)
    state = optimizer.state_dict()
    mismatched(meter, "load optimizer", lambda: optimizer.load_state_dict(state))
    if residency == DEDICATED:
        weights = model.state_dict()
        mismatched(meter, "load model", lambda: model.load_state_dict(weights))
        other = plain_model(matrices)
        mismatched(meter, "build", lambda: dmuon.dedicate_params(other, mesh, costs="flops"))
    else:
        mismatched(meter, "build", lambda: dmuon.Muon(model, distributed_config=config))
    return medians(meter)


def plain_model(matrices: int) -> nn.Module:
    model = nn.Sequential(*(Block(matrices // BLOCKS) for _ in range(BLOCKS)))
    gc.collect()
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Of each matrix this rank's rows, as FSDP2 has them, which itself takes minutes for this with 16384 ranks."""
    for layer in [layer for layer in model.modules() if isinstance(layer, nn.Linear)]:
        weight = layer.weight.detach()[: -(-SIDE // mesh.size())].clone()
        layer.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Shard(0)], shape=(SIDE, SIDE), stride=(SIDE, 1)))
    gc.collect()


def mismatched(meter: Meter, what: str, act: Callable[[], object]) -> None:
    """``act`` where the other ranks were given something else, which must be found."""
    with meter.phase(f"mismatched {what}"), dissent(), suppress(ValueError, RuntimeError):
        act()
        raise SystemExit(f"{what}: nobody found that ranks differ")


def experts(ranks: int, matrices: int) -> nn.Module:
    """A stack for each block, of which this rank has its part of the rows of its group's experts."""
    mesh = init_device_mesh("cpu", (ranks // GROUP, GROUP), mesh_dim_names=("ep", "fsdp"))
    here = matrices // BLOCKS
    whole = torch.Size((here * (ranks // GROUP), SIDE, SIDE))
    model = nn.ParameterList()
    for _ in range(BLOCKS):
        local = torch.randn(here, SIDE // GROUP, SIDE)
        stack = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], shape=whole, stride=(SIDE * SIDE, SIDE, 1))
        model.append(nn.Parameter(stack))
    gc.collect()
    return model


def save_and_load(meter: Meter, optimizer: dmuon.Muon, *modules: nn.Module) -> None:
    for what, part in (("optimizer", optimizer), *(("model", module) for module in modules)):
        with meter.phase(f"save {what}"):
            saved = part.state_dict()
        with meter.phase(f"load {what}"):
            part.load_state_dict(saved)


def medians(meter: Meter) -> dict[str, Phase]:
    """Of each phase that which took the median of work."""
    return {name: sorted(times, key=itemgetter("work"))[len(times) // 2] for name, times in meter.phases.items()}


def run(residency: str, ranks: int, matrices: int, calls: bool) -> dict[str, Phase]:
    """:func:`live` in a process of its own."""
    job = json.dumps([residency, ranks, matrices, calls])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, "--job", job], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{residency}, {ranks} ranks, {matrices} matrices:\n{done.stderr[-2000:]}")
    found: dict[str, Phase] = json.loads(done.stdout.splitlines()[-1])
    return found


def _work_as_job(job: str) -> int:
    print(json.dumps(live(*json.loads(job))))
    sys.stdout.flush()
    os._exit(0)  # nobody is there to say goodbye to


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the power of the size by which values grow, between the smallest and the largest size."""
    return log(max(values[-1], 1e-9) / max(values[0], 1e-9)) / log(sizes[-1] / sizes[0])


def measure(settings: Settings) -> Record:
    """By phase of a residency, then by ranks x matrices."""
    phases: dict[str, dict[str, Phase]] = {}
    for residency in settings.residency:
        for matrices in settings.matrices:
            for ranks in settings.ranks:
                for name, phase in run(residency, ranks, matrices, settings.counts).items():
                    phases.setdefault(f"{residency} {name}", {})[f"{ranks} x {matrices}"] = phase
    return {"phases": phases}


def table(record: Record) -> str:
    """Phases by ranks x matrices, and exponents of growth where there are several."""
    unit = "calls of functions" if record["settings"]["counts"] else "processor seconds"
    cells: dict[str, dict[str, str]] = {}
    for phase, found in record["phases"].items():
        cells[phase] = {}
        work: dict[tuple[int, ...], float] = {}
        for size, cost in found.items():
            work[tuple(map(int, size.split(" x ")))] = cost["work"]
            amount = f"{cost['work']:,.0f}" if cost["work"] >= 1000 else f"{cost['work']:.3g}"
            cells[phase][size] = f"{amount} ({cost['collectives']}, {cost['grown']:.0f})"
        for axis, along in enumerate(("ranks^", "matrices^")):
            most = max(size[1 - axis] for size in work)
            line = sorted(size for size in work if size[1 - axis] == most)
            if len(line) > 1:
                sizes, values = [size[axis] for size in line], [work[size] for size in line]
                cells[phase][along] = f"{exponent(sizes, values):.2f}"
    shown = columns(cells, dict.fromkeys(next(iter(cells.values())), ""), "phase")
    return f"{unit} (collectives, MiB grown) of one rank by ranks x matrices\n{shown}"


def fault(settings: Settings) -> str:
    unfit = EXPERTS in settings.residency and any(count % GROUP for count in settings.ranks)
    return f"--ranks must be multiples of {GROUP} for experts" if unfit else ""


if __name__ == "__main__":
    is_job = sys.argv[1:2] == ["--job"]
    sys.exit(_work_as_job(sys.argv[2]) if is_job else run_bench(Settings, __doc__, measure, table, fault=fault))
