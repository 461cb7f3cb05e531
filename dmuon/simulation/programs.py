"""One training step of five programs, operation by operation as they run, on the engine of ``dmuon.simulation.engine``.

``dedicated``       as the dedicated residency runs it: one block is prefetched, two reductions are on their way. One
                    difference: the runtime publishes the first block after its own update, this after the last one.
``dedicated keep``  the same with ``reshard_after_forward=False``: all blocks are published at once.
``exchanged``       FSDP2; pieces of momentum travel to one owner and those of its update back, in the rounds that the
                    run time makes of the model.
``gather``          FSDP2; every rank gathers every momentum matrix, orthogonalizes all, and applies its own shard.
``adamw``           FSDP2 with AdamW on everything.

Owners' weights travel as the run time lays them out (``dmuon.layout.buffer``), in rows of one level or two. The
latency of one stream's collective does not keep another stream from the link. With replicas, gradients are reduced
over the shards, then over the replicas to the owner. New weights are published over the replicas while the next
forward runs. With tensor parallelism, matrices are divided over its ranks; the cost table has to include the gathers
of what Newton–Schulz reads.

Where ranks divide the experts (``ep``), these are sharded and owned among those that hold the same ones, and tokens
travel before and after them while nothing computes. A pipeline stage is a model of its own that gathers its weights
once, and waits for the others as long as ``Scenario.bubble`` says.

Jitter, contention and host time are terms of their own (``dmuon.simulation.terms``). Not modelled: activation
collectives of tensor and pipeline parallelism, experts that get more tokens than others, clipping, and the allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dmuon.simulation.engine import COMPUTE, Noise, Simulation, Span
from dmuon.simulation.fsdp import AdamW, Gather
from dmuon.simulation.owners import Dedicated, DedicatedKeep
from dmuon.simulation.scenario import Scenario
from dmuon.simulation.sharded import Exchanged

ProgramName = Literal["dedicated", "dedicated keep", "exchanged", "gather", "adamw"]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What a simulation found.

    Attributes:
        step_s: seconds per step, steady state.
        window: start and end of the last whole step, in the time of ``spans``.
        spans: that step, the publication before it, and the next step, which shows what it left to overlap.
    """

    step_s: float
    window: tuple[float, float]
    spans: tuple[Span, ...]


def simulate(name: ProgramName, scenario: Scenario, noise: Noise | None = None, *, steps: int = 3) -> StepTrace:
    """Run ``steps`` steps (at least 3) after a first one that has nothing to overlap with, and average them.

    The host runs ahead of the device: a step takes as long as the slower of the two.

    Args:
        noise: how ranks differ; ``None`` is the jitter of the machine's terms.

    Raises:
        ValueError: an unknown program, or too few steps.
    """
    if name not in PROGRAMS:
        raise ValueError(f"program {name!r} is unknown; use one of {', '.join(PROGRAMS)}")
    if steps < 3:
        raise ValueError(f"steps={steps} must be at least 3")
    terms = scenario.machine.terms
    noise = noise or Noise(terms.jitter)
    slowdown = {rank: 1 / speed for rank, speed in scenario.speeds.items()}
    for rank, factor in noise.slowdown.items():
        slowdown[rank] = slowdown.get(rank, 1.0) * factor
    sim = Simulation(scenario.topology.world, replace(noise, slowdown=slowdown), terms.contention)
    program = PROGRAMS[name](sim, scenario)
    ends = []
    for step in range(steps + 1):
        if step == steps - 2:
            sim.spans.clear()  # keeps the update before the window, which publishes into it
        program.step()
        ends.append(float(sim.now(COMPUTE).max()))
    idle = scenario.bubble * scenario.forward_backward_s
    step_s = max((ends[-1] - ends[0]) / steps, program.host_s()) + idle
    return StepTrace(step_s, (ends[-3], ends[-2]), tuple(sim.spans))


PROGRAMS: Mapping[ProgramName, type[AdamW]] = {
    "dedicated": Dedicated,
    "dedicated keep": DedicatedKeep,
    "exchanged": Exchanged,
    "gather": Gather,
    "adamw": AdamW,
}
