"""Holds predictions against the real runtime on CPU ranks, with constants measured in the same processes."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training.model import GPT
from training.trainer import adamw

from common.clock import collect, in_turn
from common.programs import (
    ADAMW,
    DEDICATED,
    GATHER,
    LR,
    Mode,
    Program,
    Sizes,
    build_dedicated,
    build_stock,
    data,
    initial_model,
)
from common.ranks import over_ranks, share, timed
from common.results import origin, without_home
from dmuon.planning.cost_lookup import find_costs
from dmuon.tools.simulation.hardware import Collective, Link, Network, Ring, Topology, Travel
from dmuon.tools.simulation.scenario import Block, Machine, Scenario, Workload
from dmuon.tools.simulation.step import step_s

KEEP = "dedicated keep"
PROGRAMS = {
    DEDICATED: "dedicated",
    KEEP: "dedicated keep",
    GATHER: "gather",
    ADAMW: "adamw",
}
NO_LINK = Link(0.0, 1.0)
_SMALL, _LARGE = 1 << 14, 1 << 22  # bytes of the two messages that fix latency and bandwidth
_STEPS = 3  # timed together, so that publication overlaps the next forward


class MeasuredNetwork(Network):
    """Latency in seconds and seconds per byte of each collective on one group of ranks."""

    def __init__(self, figures: dict[Collective, tuple[float, float]]) -> None:
        super().__init__(NO_LINK, NO_LINK)
        object.__setattr__(self, "figures", figures)

    def travel(self, kind: Collective, ring: Ring, nbytes: float, calls: int = 1) -> Travel:
        if ring.size == 1 or calls == 0:
            return Travel(0.0, 0.0)
        latency, per_byte = self.figures[kind]
        return Travel(calls * latency, nbytes * per_byte)


def validate(rank: int, sizes: Sizes, quantile: float) -> dict[str, Any]:
    """Measure constants and programs in turns, and predict each program; needs a process group. Seconds everywhere.

    Args:
        quantile: of the samples of constants and of programs alike; 0.5 is the median.
    """
    mesh = init_device_mesh("cpu", (sizes.world,))
    initial = initial_model(sizes)
    programs = [
        build_dedicated(name, Mode(keep=True), copy.deepcopy(initial), sizes)
        if name == KEEP
        else build_stock(name, initial, mesh, sizes)
        for name in PROGRAMS
    ]
    plan = programs[0].plan
    samples, constants = measure(programs, Probe(initial), sizes, rank, quantile)
    shapes = dict(Counter(m.shape for m in plan.matrices))
    costs = find_costs(
        shapes,
        world=sizes.world,
        rank=rank,
        device=torch.device("cpu"),
        costs=sizes.costs,
        share=lambda work: share(work()),
    )
    scenario = Scenario(
        workload=workload(initial, sizes, constants),
        plan=plan.solution,
        costs=costs.table,
        machine=Machine(
            flops_per_s=1.0,  # the workload holds seconds
            copy_bytes_per_s=1 / constants["copy per byte"],
            adamw_elements_per_s=1 / constants["adamw per element"],
            network=MeasuredNetwork({kind: alpha_beta(constants, kind) for kind in get_args(Collective)}),
            communication_computes=True,
        ),
        topology=Topology(sizes.world, gpus_per_node=sizes.world),
    )
    predicted = {name: predicted_s(model, scenario) for name, model in PROGRAMS.items()}
    measured = {name: float(np.quantile(values, quantile)) for name, values in samples.items()}
    return {
        "settings": asdict(sizes),
        **origin(),
        "cost_source": without_home(costs.source),
        "quantile": quantile,
        "constants_s": constants,
        "predicted_s": predicted,
        "measured_s": measured,
        "error": {name: predicted[name] / measured[name] - 1 for name in PROGRAMS},
        "samples_s": samples,
    }


def predicted_s(program: str, scenario: Scenario) -> float:
    """Seconds of a step of ``program``, whose name may end in " keep"."""
    name, _, kept = program.partition(" ")
    return step_s(name, replace(scenario, kept=bool(kept)))  # type: ignore[arg-type]


def report(result: dict[str, Any]) -> str:
    """The result as text for people."""
    lines = [f"{'program':<22}{'predicted ms':>14}{'measured ms':>13}{'error':>8}"]
    for name, error in result["error"].items():
        predicted, measured = result["predicted_s"][name], result["measured_s"][name]
        lines.append(f"{name:<22}{1e3 * predicted:>14.1f}{1e3 * measured:>13.1f}{error:>+8.1%}")
    adamw_s = {kind: result[f"{kind}_s"][ADAMW] for kind in ("predicted", "measured")}
    for name in PROGRAMS:
        if name != ADAMW:
            ratios = [result[f"{kind}_s"][name] / adamw_s[kind] for kind in ("predicted", "measured")]
            lines.append(f"{name} over {ADAMW}: predicted {ratios[0]:.2f}, measured {ratios[1]:.2f}")
    return "\n".join(lines)


def measure(
    programs: list[Program], probe: Probe, sizes: Sizes, rank: int, quantile: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per step of each program, and a quantile of each constant; in turns, for the machine drifts."""

    def sample(index: int) -> dict[tuple[str, str], float]:
        batch = data(sizes, index, rank)
        took = {("constant", name): value for name, value in probe.sample(*batch).items()}
        for program in in_turn(programs, index):
            program.step(*batch)
            took["step", program.name] = timed(lambda p=program: [p.step(*batch) for _ in range(_STEPS)]) / _STEPS
        return took

    samples = collect(sizes.warmup, sizes.rounds, sample)
    constants = {name: np.quantile(values, quantile) for (kind, name), values in samples.items() if kind == "constant"}
    largest = over_ranks([float(value) for value in constants.values()])
    return {p.name: samples["step", p.name] for p in programs}, dict(zip(constants, largest, strict=True))


class Probe:
    """Times what predictions take as given, with all ranks busy at the same time."""

    def __init__(self, initial: GPT) -> None:
        self._model = copy.deepcopy(initial)
        self._optimizer = adamw(self._model.parameters(), LR)
        self._elements = sum(p.numel() for p in self._model.parameters())
        self._source = torch.ones(_LARGE // 4)
        self._calls = _calls()

    def sample(self, tokens: Tensor, targets: Tensor) -> dict[str, float]:
        """One sample of every constant."""
        took = forward_backward(self._model, tokens, targets)
        took["adamw per element"] = timed(self._optimizer.step) / self._elements
        self._optimizer.zero_grad()
        # Into fresh memory, as buffers are given back and allocated anew.
        took["copy per byte"] = timed(lambda: torch.empty_like(self._source).copy_(self._source)) / (2 * _LARGE)
        for kind, call in self._calls.items():
            for name, n in (("small", _SMALL), ("large", _LARGE)):
                took[f"{kind} {name}"] = timed(lambda call=call, n=n: call(n))
        return took


def forward_backward(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """Seconds of one block's forward and backward, mean over blocks, and of everything outside blocks."""
    spent = {"block forward": 0.0, "block backward": 0.0}
    began: dict[nn.Module, float] = {}

    def begin(module: nn.Module, *_: Any) -> None:
        began[module] = time.perf_counter()

    def end(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            spent[name] += (time.perf_counter() - began[module]) / len(model.blocks)

        return hook

    hooks = []
    for block in model.blocks:
        hooks.append(block.register_forward_pre_hook(begin))
        hooks.append(block.register_forward_hook(end("block forward")))
        hooks.append(block.register_full_backward_pre_hook(begin))
        hooks.append(block.register_full_backward_hook(end("block backward")))
    dist.barrier()
    start = time.perf_counter()
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    total = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    return {**spent, "ends": max(0.0, total - len(model.blocks) * sum(spent.values()))}


def workload(model: GPT, sizes: Sizes, constants: dict[str, float]) -> Workload:
    """The model's elements, and measured seconds in place of FLOPs."""
    blocks = [
        Block(
            f"blocks.{index}",
            constants["block forward"],
            constants["block backward"],
            sum(p.numel() for p in block.parameters() if p.ndim == 2),
            sum(p.numel() for p in block.parameters() if p.ndim < 2),
        )
        for index, block in enumerate(model.blocks)
    ]
    outside = sum(p.numel() for p in model.parameters()) - sum(b.matrix_elements + b.other_elements for b in blocks)
    ends = Block("ends", constants["ends"], 0.0, 0, outside)
    return Workload(tuple(blocks), ends, sizes.tokens, param_bytes=4, reduce_bytes=4)


def alpha_beta(constants: dict[str, float], kind: Collective) -> tuple[float, float]:
    """Latency and seconds per byte, from the times of a small and a large message."""
    small, large = constants[f"{kind} small"], constants[f"{kind} large"]
    per_byte = max(0.0, large - small) / (_LARGE - _SMALL)
    return max(0.0, small - _SMALL * per_byte), per_byte


def _calls() -> dict[Collective, Callable[[int], object]]:
    """One collective of ``n`` bytes of fp32 (whole tensors) per kind, with the reductions that the programs use."""
    world = dist.get_world_size()
    buffers = {n: (torch.zeros(n // 4), torch.zeros(n // 4 // world)) for n in (_SMALL, _LARGE)}
    average = dist.ReduceOp.AVG
    return {
        "broadcast": lambda n: dist.broadcast(buffers[n][0], 0),
        "reduce": lambda n: dist.reduce(buffers[n][0], 0, average),
        "all_gather": lambda n: dist.all_gather_into_tensor(buffers[n][0], buffers[n][1]),
        "reduce_scatter": lambda n: dist.reduce_scatter_tensor(buffers[n][1], buffers[n][0], average),
        "all_reduce": lambda n: dist.all_reduce(buffers[n][0], average),
    }
