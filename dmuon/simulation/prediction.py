"""Predicted step times: dedicated owners against AdamW and gather-then-compute, and what would bring the overhead down.

The prediction is the simulation of ``dmuon.simulation.programs`` without noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dmuon.simulation.changes import Change, find_changes
from dmuon.simulation.hardware import Hardware
from dmuon.simulation.network import Topology
from dmuon.simulation.programs import PROGRAMS, ProgramName, simulate
from dmuon.simulation.scenario import Machine, Scenario, batches, ns_chunks
from dmuon.simulation.workload import Workload
from dmuon.solver import CostTable, Plan

__all__ = ["Prediction", "ProgramTime", "predict"]


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
class Prediction:
    """Step times of all programs in one scenario.

    Attributes:
        target: the overhead that ``changes`` aim at.
        changes: one per quantity; empty if the target is met or was not asked for.
        device: name of the GPU.
    """

    programs: dict[ProgramName, ProgramTime]
    scenario: Scenario
    device: str
    target: float | None
    changes: tuple[Change, ...]

    @property
    def overhead(self) -> float:
        """Dedicated step over AdamW's, less 1."""
        return self.programs["dedicated"].step_s / self.programs["adamw"].step_s - 1

    @property
    def speedup(self) -> float:
        """Gather-then-compute's step over the dedicated one."""
        return self.programs["gather"].step_s / self.programs["dedicated"].step_s

    def report(self) -> str:
        """The prediction as text for people."""
        topology, workload, costs = self.scenario.topology, self.scenario.workload, self.scenario.costs
        shapes = {m.shape for m in self.scenario.plan.matrices}
        guessed = len(shapes & set(costs.estimated))
        lines = [
            f"predicted step, {topology.world} × {self.device}, {_plural(topology.nodes, 'node')} "
            f"(replicate {topology.replicate} × shard {topology.shard} × tp {topology.tp}), "
            f"{workload.tokens:,} tokens per rank; Newton–Schulz costs "
            + (f"estimated for {guessed} of {_plural(len(shapes), 'shape')}" if guessed else "measured"),
            f"{'program':<16}{'step ms':>10}{'fwd+bwd':>10}{'NS':>9}{'exposed':>9}{'vs AdamW':>10}{'vs gather':>11}",
        ]
        adamw, gather = self.programs["adamw"].step_s, self.programs["gather"].step_s
        for name, time in self.programs.items():
            lines.append(
                f"{name:<16}{1e3 * time.step_s:>10.2f}{1e3 * time.forward_backward_s:>10.2f}{1e3 * time.ns_s:>9.2f}"
                f"{1e3 * time.exposed_s:>9.2f}{time.step_s / adamw - 1:>+10.1%}{gather / time.step_s:>10.2f}×"
            )
        if self.target is not None:
            lines.append("")
            if self.overhead < self.target:
                lines.append(f"dedicated is within {self.target:.1%} of AdamW")
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
) -> Prediction:
    """Predict one step of every program, and what would bring dedicated owners within ``target`` of AdamW.

    Args:
        speeds: of ranks that are slower or faster than ``hardware``.
        efficiency: part of the peak that forward and backward reach; ``None`` takes that of large matrix products.

    Raises:
        ValueError: arguments that do not belong together, an efficiency outside (0, 1], or a
            target that is not positive.
    """
    if target is not None and not (math.isfinite(target) and target > 0):
        raise ValueError(f"target={target!r} must be a positive part of AdamW's step, or None")
    scenario = Scenario(workload, plan, costs, Machine.of(hardware, efficiency), topology, speeds or {})
    times = {name: _program_time(name, scenario) for name in PROGRAMS}
    result = Prediction(times, scenario, hardware.device.name, target, ())
    if target is None or result.overhead < target:
        return result
    return replace(result, changes=find_changes(scenario, target))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def _program_time(name: ProgramName, scenario: Scenario) -> ProgramTime:
    forward_backward = scenario.workload.flops / scenario.topology.tp / scenario.machine.flops_per_s
    ns = 0.0
    if name == "gather":
        counts: dict[tuple[int, int], int] = {}
        for m in scenario.plan.matrices:
            counts[m.rows, m.cols] = counts.get((m.rows, m.cols), 0) + 1
        ns = sum(batches(scenario, counts))
    elif name != "adamw":
        slowness = [1 / scenario.speeds.get(rank, 1.0) for rank in range(scenario.topology.world)]
        ns = float((ns_chunks(scenario).sum(axis=0) * slowness).max())
    return ProgramTime(simulate(name, scenario).step_s, forward_backward, ns)
