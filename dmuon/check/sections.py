"""The sections of the first run, in their order: what each does on its ranks, and its share of the time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dmuon.check.bits import compare_delayed, compare_synchronous
from dmuon.check.devices import look_around
from dmuon.check.kernels import check_kernels
from dmuon.check.memory import allocated_when_dedicated, allocated_when_exchanged
from dmuon.check.model import LARGE_VOCABULARY, SMALL, Size
from dmuon.check.report import Reading
from dmuon.check.run import Settings, process_group, run_checks
from dmuon.check.speed import Speed
from dmuon.check.stage import Launch, Stage
from dmuon.check.topologies import TOPOLOGIES, Grid, grid_of
from dmuon.planning.cost_cache import Timing
from dmuon.planning.profiler import build_kernels, measure
from dmuon.solver import Shape

_SMALL = tuple((min(shape), max(shape)) for shape in ((SMALL.width, SMALL.width), (SMALL.width, SMALL.hidden)))
_LARGE = ((1024, 4096), (4096, 4096), (4096, 14336))  # of models of 0.3 to 8 billion parameters
_BATCHES = (1, 4)
_BATCHED_ELEMENTS = 1 << 24  # of a matrix: several larger ones would need more memory than is asked for


def train_on_topologies(stage: Stage) -> None:
    """Trainings against one process: first all topologies in fp32, then in bf16."""
    hosts = 1
    for dtype in (torch.float32, torch.bfloat16):
        for name in stage.launch.topologies:
            if stage.fits(f"{name} in {dtype}"):
                keep = (False, True) if dtype == torch.float32 else (False,)
                settings = Settings(stage.device, (name,), keep, (dtype,), 1.0, stage.timeout, None)
                run_checks(stage.board, settings, hosts)


def hold_memory(stage: Stage) -> None:
    """A larger model in both residencies, against the formulas."""
    if stage.device.type == "cuda":
        speed = Speed(Size(1024, 4096, 8, LARGE_VOCABULARY), 2048)
    else:
        speed = Speed(Size(128, 512, 2, LARGE_VOCABULARY), 128)
    where = f"1d {stage.launch.world}"
    checks: dict[str, Callable[[], list[Reading]]] = {
        "dedicated": lambda: allocated_when_dedicated(speed, stage.device, stage.timeout),
        "exchanged": lambda: allocated_when_exchanged(speed, stage.device),
    }
    for residency, check in checks.items():
        if stage.fits(residency):
            with process_group(stage.board, where):
                stage.board.judge("memory", f"{residency} {where}", check)


def profile(stage: Stage) -> None:
    """Times of the update, of the shapes of the small model and of real ones."""
    shapes: tuple[Shape, ...] = _SMALL if stage.device.type == "cpu" else (*_SMALL, *_LARGE)
    work = {shape: _BATCHES if math.prod(shape) <= _BATCHED_ELEMENTS else _BATCHES[:1] for shape in shapes}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_kernels(work, device=stage.device)
        found = measure(
            work,
            device=stage.device,
            budget_s=0.8 * stage.seconds if stage.device.type == "cuda" else min(5.0, 0.8 * stage.seconds),
        )
    faults = [str(warning.message) for warning in caught if "not used" in str(warning.message)]
    stage.facts["costs"] = [
        {"shape": shape, "batch": k, "median_us": t.median_ns / 1e3, "p90_us": t.p90_ns / 1e3, "variant": t.variant}
        for shape, timings in found.items()
        for k, t in timings.items()
    ]
    for shape, sizes in work.items():
        where = f"{shape[0]}x{shape[1]}"
        stage.left_out += [f"{where} by {k}" for k in sizes if k not in found.get(shape, {})]
        if shape in found:
            stage.board.say("info", "profile", where, _costs(found[shape]))
    stage.board.judge("variants", "", lambda: [Reading("variants", "; ".join(faults) or "agree", len(faults), 0)])


def _costs(timings: dict[int, Timing]) -> str:
    return ", ".join(f"{k}: {t.median_ns / 1e3:.0f} µs by {t.variant or 'the rule'}" for k, t in timings.items())


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the first run.

    Attributes:
        share: of the time in all.
        work: on each of its ranks.
        launches: on which ranks it runs, one launch after the other.
    """

    name: str
    share: float
    work: Callable[[Stage], None]
    launches: Callable[[Launch], Sequence[Launch]]


def _one_a_device(launch: Launch) -> list[Launch]:
    backend = "nccl" if launch.kind == "cuda" else "gloo"
    return [replace(launch, world=max(1, launch.devices), backend=backend)]


def _one(launch: Launch) -> list[Launch]:
    return [replace(one, world=1) for one in _one_a_device(launch)]


def _all(launch: Launch) -> list[Launch]:
    return [launch]


def _by_topology(launch: Launch) -> list[Launch]:
    """Each topology on as many of the ranks as it can use."""
    worlds: dict[int, list[str]] = {}
    for name in TOPOLOGIES:
        fitting = [n for n in range(launch.world, 0, -1) if isinstance(grid_of(name, n, 1), Grid)]
        worlds.setdefault(fitting[0] if fitting else launch.world, []).append(name)
    launches = [replace(launch, world=world, topologies=tuple(names)) for world, names in worlds.items()]
    if launch.kind == "cuda" and launch.devices == 1:  # the only one by NCCL: it takes one rank a GPU
        launches.append(replace(_one(launch)[0], topologies=("1d",)))
    return launches


SECTIONS = (
    Section("environment", 0.08, look_around, _one_a_device),
    Section("kernels", 0.13, check_kernels, _one_a_device),
    Section("topologies", 0.40, train_on_topologies, _by_topology),
    Section("delays", 0.17, compare_delayed, _all),
    Section("asynchronous", 0.08, compare_synchronous, _all),
    Section("memory", 0.05, hold_memory, _all),
    Section("profile", 0.09, profile, _one),
)
