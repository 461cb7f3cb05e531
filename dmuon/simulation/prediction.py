"""Predicted step times: dedicated owners against AdamW and gather-then-compute, and what would bring the overhead down.

The prediction is the simulation of ``dmuon.simulation.programs`` without noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Literal

from dmuon.simulation.exchange import schedule
from dmuon.simulation.hardware import Hardware
from dmuon.simulation.network import AlphaBeta, Topology
from dmuon.simulation.programs import PROGRAMS, ProgramName, simulate
from dmuon.simulation.scenario import Machine, Scenario, batches, gathered_shapes, ns_chunks
from dmuon.simulation.terms import ERROR, verdict
from dmuon.simulation.workload import Workload
from dmuon.solver import CostTable, Plan, SolveOptions
from dmuon.solver import plan as solve_plan

Quantity = Literal["tokens per rank", "Newton–Schulz speed", "link bandwidth", "link latency", "ranks", "replicas"]

_FACTORS = (2, 4, 8, 16, 32, 64)
_PRECISION = 0.01  # of a factor that is found
_MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class ProgramTime:
    """Where one program's step goes, in seconds.

    Attributes:
        step_s: one step, steady state.
        forward_backward_s: computation of forward and backward.
        ns_s: Newton–Schulz with momentum and weight update, on the busiest rank.
        exposed_s: the rest: communication that nothing hides, waiting, copies and AdamW.
    """

    step_s: float
    forward_backward_s: float
    ns_s: float

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.forward_backward_s - self.ns_s


@dataclass(frozen=True, slots=True)
class Change:
    """The least change of one quantity, all else as it is, that brings the overhead below the target.

    Attributes:
        factor: on the quantity; latency is divided by it. ``None`` where no factor in ``range`` does.
        overhead: of dedicated over AdamW at that factor, or the least of those tried.
        tried: the factors that were tried, for people.
        value: what the quantity becomes, for people.
    """

    quantity: Quantity
    factor: float | None
    overhead: float
    tried: str
    value: str = ""

    def __str__(self) -> str:
        if self.factor is None:
            return f"{self.quantity:<20} not reachable by this alone ({self.tried}: {self.overhead:+.1%} at best)"
        sign = "÷" if self.quantity == "link latency" else "×"
        return f"{self.quantity:<20} {sign} {self.factor:.2f}" + (f"  ({self.value})" if self.value else "")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Step times of all programs in one scenario.

    Attributes:
        target: the overhead that ``changes`` aim at.
        changes: one per quantity; empty if the target is met or was not asked for.
        device: name of the GPU.
        efficiency: part of its peak that forward and backward reach.
    """

    programs: dict[ProgramName, ProgramTime]
    scenario: Scenario
    device: str
    efficiency: float
    target: float | None
    changes: tuple[Change, ...]

    @property
    def overhead(self) -> float:
        """Dedicated step over AdamW's, less 1."""
        return self.programs["dedicated"].step_s / self.programs["adamw"].step_s - 1

    def report(self) -> str:
        """The prediction as text for people."""
        topology, workload, costs = self.scenario.topology, self.scenario.workload, self.scenario.costs
        shapes = {m.shape for m in self.scenario.plan.matrices}
        guessed = len(shapes & set(costs.estimated))
        what = "predicted step of the stage" if self.scenario.stages > 1 else "predicted step"
        lines = [
            f"{what}, {topology.world} × {self.device}, {_plural(topology.nodes, 'node')} "
            f"(replicate {topology.replicate} × shard {topology.shard} × tp {topology.tp}{_experts(topology)}), "
            f"{workload.tokens:,} tokens per rank, forward and backward at {self.efficiency:.0%} of the peak; "
            "Newton–Schulz costs "
            + (f"estimated for {guessed} of {_plural(len(shapes), 'shape')}" if guessed else "measured"),
            f"{'program':<16}{'step ms':>10}{'fwd+bwd':>10}{'NS':>9}{'exposed':>9}{'vs AdamW':>16}{'vs gather':>11}",
        ]
        adamw, gather = self.programs["adamw"].step_s, self.programs["gather"].step_s
        for name, time in self.programs.items():
            lines.append(
                f"{name:<16}{1e3 * time.step_s:>10.2f}{1e3 * time.forward_backward_s:>10.2f}{1e3 * time.ns_s:>9.2f}"
                f"{1e3 * time.exposed_s:>9.2f}{_over(name, time.step_s / adamw - 1):>16}{gather / time.step_s:>10.2f}×"
            )
        lines.append(f"± {ERROR:.1%} is how far predictions were off from steps that others published; less is equal")
        unsent = [("tensor", topology.tp), ("pipeline", self.scenario.stages)]
        if left_out := " and ".join(name for name, size in unsent if size > 1):
            lines.append(f"left out are activations on their way by {left_out} parallelism: all steps take longer")
        if self.target is not None:
            lines.append("")
            if self.overhead < self.target:
                lines.append(f"dedicated is within {self.target:.1%} of AdamW")
            elif self.overhead < ERROR:
                lines.append("what separates dedicated from AdamW is within the error of the prediction")
            else:
                lines.append(f"to come within {self.target:.1%} of AdamW, one change at a time:")
                lines += [f"  {change}" for change in self.changes]
        return "\n".join(lines)


def predict(
    workload: Workload,
    plan: Plan,
    costs: CostTable,
    hardware: Hardware,
    topology: Topology,
    *,
    speeds: Mapping[int, float] | None = None,
    efficiency: float | None = None,
    target: float | None = 0.01,
    exchanged_costs: CostTable | None = None,
    stages: int = 1,
    bubble: float = 0.0,
) -> Prediction:
    """Predict one step of every program, and what would bring dedicated owners within ``target`` of AdamW.

    Args:
        speeds: of ranks that are slower or faster than ``hardware``.
        efficiency: part of the peak that forward and backward reach; ``None`` is a half.
        exchanged_costs: as in :class:`Scenario`.
        stages: of a pipeline, of which this is one, and gathers its weights once.
        bubble: the part of its forward and backward in which it waits for others.

    Raises:
        ValueError: arguments that do not belong together, an efficiency outside (0, 1], or a
            target that is not positive.
    """
    if target is not None and not (math.isfinite(target) and target > 0):
        raise ValueError(f"target={target!r} must be a positive part of AdamW's step, or None")
    machine = Machine.of(hardware, efficiency)
    scenario = Scenario(
        workload,
        plan,
        costs,
        machine,
        topology,
        speeds or {},
        gathers_once=stages > 1,
        exchanged_costs=exchanged_costs,
        stages=stages,
        bubble=bubble,
    )
    times = {name: _program_time(name, scenario) for name in PROGRAMS}
    reached = machine.flops_per_s / hardware.device.peak_flops
    result = Prediction(times, scenario, hardware.device.name, reached, target, ())
    if target is None or result.overhead < max(target, ERROR):
        return result
    return replace(result, changes=find_changes(scenario, target))


def _over(name: ProgramName, overhead: float) -> str:
    return "" if name == "adamw" else verdict(overhead)


def _experts(topology: Topology) -> str:
    return f", experts over {topology.ep}" if topology.ep > 1 else ""


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def _program_time(name: ProgramName, scenario: Scenario) -> ProgramTime:
    forward_backward = scenario.forward_backward_s
    ns = 0.0
    if name == "gather":
        ns = sum(sum(batches(scenario, shapes)) for shapes in gathered_shapes(scenario).values())
    elif name == "exchanged":
        planned = schedule(scenario)
        ns = float((planned.alone + sum(round_.ns for round_ in planned.rounds)).max())
    elif name != "adamw":
        slowness = [1 / scenario.speeds.get(rank, 1.0) for rank in range(scenario.topology.world)]
        ns = float((ns_chunks(scenario).sum(axis=0) * slowness).max())
    return ProgramTime(simulate(name, scenario).step_s, forward_backward, ns)


def overhead(scenario: Scenario) -> float:
    """Dedicated step over AdamW's, less 1."""
    return simulate("dedicated", scenario).step_s / simulate("adamw", scenario).step_s - 1


def find_changes(scenario: Scenario, target: float) -> tuple[Change, ...]:
    """For each quantity the least change that brings :func:`overhead` below ``target``.

    Continuous quantities go up to a factor of 64. Ranks double up to 1024 at the same tokens per rank, planned anew
    without the MILP and without limits on memory or spread: more replicas where there are several, otherwise more
    shards. Replicas double down to one node each, which costs every rank the memory of a larger shard. Both leave the
    quantity out where it cannot grow, and ranks also where they differ in speed.

    Raises:
        ValueError: a network that is not :class:`dmuon.simulation.network.AlphaBeta`.
    """
    network = scenario.machine.network
    if not isinstance(network, AlphaBeta):
        raise ValueError(f"network is {type(network).__name__}; links can be changed in an AlphaBeta only")

    grid = scenario.topology

    def tokens(factor: float) -> Scenario:
        return replace(scenario, workload=scenario.workload.scaled(factor))

    def ns_speed(factor: float) -> Scenario:
        machine = scenario.machine
        return replace(scenario, machine=replace(machine, ns_scale=machine.ns_scale / factor))

    def bandwidth(factor: float) -> Scenario:
        intra, inter = (replace(k, bandwidth=k.bandwidth * factor) for k in (network.intra, network.inter))
        return replace(scenario, machine=replace(scenario.machine, network=replace(network, intra=intra, inter=inter)))

    def latency(factor: float) -> Scenario:
        intra, inter = (replace(k, latency_s=k.latency_s / factor) for k in (network.intra, network.inter))
        return replace(scenario, machine=replace(scenario.machine, network=replace(network, intra=intra, inter=inter)))

    def ranks(factor: float) -> Scenario:
        world, replicate = grid.world * int(factor), grid.replicate * (int(factor) if grid.replicate > 1 else 1)
        owners = solve_plan(scenario.plan.matrices, world, scenario.costs, SolveOptions(method="greedy"))
        return replace(scenario, plan=owners, topology=replace(grid, world=world, replicate=replicate))

    def more_ranks(factor: int) -> bool:
        world = grid.world * factor
        whole = world <= grid.gpus_per_node or world % grid.gpus_per_node == 0
        # Where ranks differ in speed, what further ones would be like is anybody's guess.
        return not scenario.speeds and whole and world <= _MOST_RANKS

    def replicas(factor: float) -> Scenario:
        return replace(scenario, topology=replace(grid, replicate=grid.replicate * int(factor)))

    def more_replicas(factor: int) -> bool:
        replicate = grid.replicate * factor
        return replicate <= grid.nodes and grid.world % (replicate * grid.tp) == 0

    continuous: dict[Quantity, Callable[[float], Scenario]] = {
        "tokens per rank": tokens,
        "Newton–Schulz speed": ns_speed,
        "link bandwidth": bandwidth,
        "link latency": latency,
    }
    changes = []
    for quantity, changed in continuous.items():
        change = _first(quantity, changed, _FACTORS, target)
        if change.factor is None:
            changes.append(replace(change, overhead=min(overhead(scenario), change.overhead)))
        else:
            changes.append(_bisected(change, float(change.factor), changed, target))
    if factors := _doublings(more_ranks):
        changes.append(_first("ranks", ranks, factors, target))
    if factors := _doublings(more_replicas):
        changes.append(_first("replicas", replicas, factors, target))
    return tuple(changes)


def _doublings(allowed: Callable[[int], bool]) -> list[int]:
    """The powers of two from 2 up to the first that is not ``allowed``."""
    return list(takewhile(allowed, (2**i for i in count(1))))


def _first(quantity: Quantity, changed: Callable[[float], Scenario], factors: Sequence[int], target: float) -> Change:
    """The first of ``factors`` that reaches the target, or the least overhead of them all."""
    tried, least = f"up to × {factors[-1]}", math.inf
    for factor in factors:
        scenario = changed(factor)
        reached = overhead(scenario)
        if reached < target:
            return Change(quantity, factor, reached, tried, _value(quantity, scenario))
        least = min(least, reached)
    return Change(quantity, None, least, tried)


def _bisected(change: Change, factor: float, changed: Callable[[float], Scenario], target: float) -> Change:
    """``change`` with the least factor that reaches the target, between its own and half of it."""
    below, above, reached = factor / 2, factor, change.overhead
    while above / below > 1 + _PRECISION:
        middle = math.sqrt(below * above)
        now = overhead(changed(middle))
        if now < target:
            above, reached = middle, now
        else:
            below = middle
    return replace(change, factor=above, overhead=reached, value=_value(change.quantity, changed(above)))


def _value(quantity: Quantity, scenario: Scenario) -> str:
    match quantity:
        case "tokens per rank":
            return f"{scenario.workload.tokens:,}"
        case "ranks":
            return f"{scenario.topology.world}, same tokens per rank"
        case "replicas":
            return f"{scenario.topology.replicate} × {scenario.topology.shard}"
    return ""
