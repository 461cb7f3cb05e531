"""One training step of four programs, operation by operation as they run, on the engine of ``dmuon.simulation.engine``.

``dedicated``       as the dedicated residency runs it: one block is prefetched, two reductions are on their way. One
                    difference: the runtime publishes the first block after its own update, this after the last one.
``dedicated keep``  the same with ``reshard_after_forward=False``: all blocks are published at once.
``gather``          FSDP2; every rank gathers every momentum matrix, orthogonalizes all, and applies its own shard.
``adamw``           FSDP2 with AdamW on everything.

With replicas, gradients are reduced over the shards, then over the replicas to the owner. New weights are published
over the replicas while the next forward runs. With tensor parallelism, matrices are divided over its ranks; the cost
table has to include the gathers of what Newton–Schulz reads.

Not modelled: launches on the host (it runs ahead), activation collectives of tensor parallelism, expert parallelism,
clipping, the allocator, and computation that communication beside it slows down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dmuon.simulation.engine import COMPUTE, Groups, Noise, Simulation, Span, Times, latest
from dmuon.simulation.network import Collective
from dmuon.simulation.scenario import Scenario, batches, ns_chunks, owned_elements, stored_shapes
from dmuon.simulation.workload import Block

ProgramName = Literal["dedicated", "dedicated keep", "gather", "adamw"]

_MAX_REDUCTIONS = 2  # as in dmuon.dedicated.runtime
_MASTER_BYTES = 4


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

    Raises:
        ValueError: an unknown program, or too few steps.
    """
    if name not in PROGRAMS:
        raise ValueError(f"program {name!r} is unknown; use one of {', '.join(PROGRAMS)}")
    if steps < 3:
        raise ValueError(f"steps={steps} must be at least 3")
    noise = noise or Noise()
    slowdown = {rank: 1 / speed for rank, speed in scenario.speeds.items()}
    for rank, factor in noise.slowdown.items():
        slowdown[rank] = slowdown.get(rank, 1.0) * factor
    sim = Simulation(scenario.topology.world, replace(noise, slowdown=slowdown))
    program = PROGRAMS[name](sim, scenario)
    ends = []
    for step in range(steps + 1):
        if step == steps - 2:
            sim.spans.clear()  # keeps the update before the window, which publishes into it
        program.step()
        ends.append(float(sim.now(COMPUTE).max()))
    return StepTrace((ends[-1] - ends[0]) / steps, (ends[-3], ends[-2]), tuple(sim.spans))


class _AdamW:
    """FSDP2 over everything, and AdamW.

    Gathers run beside computation, one unit ahead: a unit's gather waits for the copy-out of the one before. One
    reduce-scatter may be on its way when the next starts. With replicas an all-reduce over them follows.
    """

    keeps = False

    def __init__(self, sim: Simulation, scenario: Scenario) -> None:
        self.sim, self.scenario = sim, scenario
        self.workload, self.machine, self.topology = scenario.workload, scenario.machine, scenario.topology
        ids = self.topology.group_ids()
        self.groups = {name: Groups(i) for name, i in ids.items()}
        self.rings = {name: self.topology.ring(i) for name, i in ids.items()}
        self._gathers: dict[str, Times] = {}
        self._copied = np.zeros(sim.ranks)
        self._scatter: Times | None = None
        self._replicated = np.zeros(sim.ranks)

    def sharded_elements(self, block: Block) -> float:
        """Elements per tensor-parallel rank that FSDP2 manages."""
        return block.matrix_elements / self.topology.tp + block.other_elements

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        blocks, ends = self.workload.blocks, self.workload.ends
        self._copied = self.sim.now(COMPUTE)  # gathers wait for the update
        self._gather(ends)
        self._unshard(ends)
        for index, block in enumerate(blocks):
            self.enter_forward(index)
            self._flops("forward", block.forward_flops)
        if not self.keeps:
            self._copied = self.sim.now(COMPUTE)  # the gather for backward waits for the weights to be freed
            self._gather(blocks[-1])
        self._flops("head", ends.forward_flops + ends.backward_flops)
        for index in reversed(range(len(blocks))):
            self.enter_backward(index)
            self._flops("backward", blocks[index].backward_flops)
            self.leave_backward(index)
        self._scatter_gradients(ends)
        self.finish_backward()
        self.update()

    def enter_forward(self, index: int) -> None:
        self._unshard(self.workload.blocks[index])
        if index + 1 < len(self.workload.blocks):
            self._gather(self.workload.blocks[index + 1])

    def enter_backward(self, index: int) -> None:
        if self.keeps:
            return
        self._unshard(self.workload.blocks[index])
        if index > 0:
            self._gather(self.workload.blocks[index - 1])

    def leave_backward(self, index: int) -> None:
        self._scatter_gradients(self.workload.blocks[index])

    def finish_backward(self) -> None:
        if self._scatter is not None:
            self.sim.wait(COMPUTE, self._scatter)
        self.sim.wait(COMPUTE, self._replicated)
        self._scatter = None

    def update(self) -> None:
        self._adamw(sum(self.sharded_elements(b) for b in (*self.workload.blocks, self.workload.ends)))

    # -- operations ------------------------------------------------------------------------------------------------

    def seconds(self, kind: Collective, group: str, nbytes: float, calls: int = 1) -> float:
        """Of collectives of everybody; nothing happens where nothing travels."""
        return self.machine.network.seconds(kind, self.rings[group], nbytes, calls) if nbytes else 0.0

    def travel(self, stream: str, name: str, group: str, seconds: float | Times, *after: Times) -> Times:
        """Hold ``stream`` and the link of ``group``; streams that use one link at once share it one by one."""
        if not np.any(seconds):
            return latest(np.zeros(self.sim.ranks), *after)
        link = f"{self.rings[group].link} link"
        return self.sim.run(self.beside((stream, link)), name, seconds, after=after, groups=self.groups[group])

    def beside(self, resources: tuple[str, ...]) -> tuple[str, ...]:
        """What an operation of communication holds: the compute stream too, where the machine has nothing else."""
        return (*resources, COMPUTE) if self.machine.communication_computes else resources

    def copy(self, name: str, nbytes: float) -> None:
        if nbytes:
            self.sim.compute(name, nbytes / self.machine.copy_bytes_per_s)

    def _flops(self, name: str, flops: float) -> None:
        if flops:
            self.sim.compute(name, flops / self.topology.tp / self.machine.flops_per_s)

    def _gather(self, block: Block) -> None:
        nbytes = self.sharded_elements(block) * self.workload.param_bytes
        seconds = self.seconds("all_gather", "shard", nbytes)
        self._gathers[block.name] = self.travel("FSDP2 gather", "all-gather", "shard", seconds, self._copied)

    def _unshard(self, block: Block) -> None:
        if block.name not in self._gathers:
            self._gather(block)
        self.sim.wait(COMPUTE, self._gathers.pop(block.name))
        if self.topology.shard > 1:
            self.copy("copy-out", 2 * self.sharded_elements(block) * self.workload.param_bytes)
        self._copied = self.sim.now(COMPUTE)

    def _scatter_gradients(self, block: Block) -> None:
        elements = self.sharded_elements(block)
        if not elements:
            return
        if self._scatter is not None:
            self.sim.wait(COMPUTE, self._scatter)
        self.pack(elements)
        nbytes = elements * self.workload.reduce_bytes
        seconds = self.seconds("reduce_scatter", "shard", nbytes)
        self._scatter = self.travel("FSDP2 reduce", "reduce-scatter", "shard", seconds, self.sim.now(COMPUTE))
        seconds = self.seconds("all_reduce", "replicate", nbytes / self.topology.shard)
        self._replicated = self.travel("FSDP2 all-reduce", "all-reduce", "replicate", seconds, self._scatter)

    def pack(self, elements: float) -> None:
        """Copy a block's gradients into what travels."""
        if self.topology.shard * self.topology.replicate > 1:
            self.copy("pack", elements * (self.workload.param_bytes + self.workload.reduce_bytes))

    def _adamw(self, elements: float) -> None:
        if elements:
            seconds = elements / self.topology.shard / self.machine.adamw_elements_per_s
            self.sim.compute("adamw", seconds)


class _Gather(_AdamW):
    """FSDP2; every rank gathers and orthogonalizes every matrix, one shape after another, then applies its rows."""

    def update(self) -> None:
        for (rows, cols), count in stored_shapes(self.scenario.plan.matrices).items():
            nbytes = rows * cols * count * _MASTER_BYTES / self.topology.tp
            seconds = self.seconds("all_gather", "shard", nbytes, count)
            gathered = self.travel("FSDP2 gather", "gather momentum", "shard", seconds, self.sim.now(COMPUTE))
            self.sim.wait(COMPUTE, gathered)
            for batch in batches(self.scenario, {(rows, cols): count}):
                self.sim.compute("ns", batch)
        workload = self.workload
        self._adamw(sum(b.other_elements for b in (*workload.blocks, workload.ends)))


class _Dedicated(_AdamW):
    """Owners: fill, reduce, update, publish. FSDP2 moves what they do not own."""

    def __init__(self, sim: Simulation, scenario: Scenario) -> None:
        super().__init__(sim, scenario)
        self._chunks = ns_chunks(scenario)
        self._fills: dict[int, Times] = {}
        self._reductions: deque[Times] = deque()
        self._updated = np.zeros(sim.ranks)
        self._publications = [np.zeros(sim.ranks)]  # of the first block, before any step
        column = self.topology.coordinates()[1]
        owned = owned_elements(scenario)
        param, reduce = self.workload.param_bytes, self.workload.reduce_bytes
        copied = (_MASTER_BYTES + param) / self.machine.copy_bytes_per_s
        # Seconds per block, and per rank where ranks differ.
        self._copies = [grid.sum(axis=0)[column] * copied for grid in owned]
        self._broadcasts = [self._over_shards("broadcast", grid * param) for grid in owned]
        self._reduces = [self._over_shards("reduce", grid * reduce) for grid in owned]
        self._publishes = [self._over_replicas("broadcast", grid * param)[column] for grid in owned]
        self._replica_reduces = [self._over_replicas("reduce", grid * reduce)[column] for grid in owned]

    def _over_shards(self, kind: Collective, grid: NDArray[np.float64]) -> float:
        """One collective per owning shard."""
        calls = int(np.count_nonzero(grid.sum(axis=0)))
        return self.seconds(kind, "shard", float(grid.sum()), calls)

    def _over_replicas(self, kind: Collective, grid: NDArray[np.float64]) -> Times:
        """One collective per owner in each column of replicas; the columns work side by side."""
        if self.topology.replicate == 1:
            return np.zeros(self.topology.shard)
        sums = zip(grid.sum(axis=0), np.count_nonzero(grid, axis=0), strict=True)
        return np.array([self.seconds(kind, "replicate", float(nbytes), int(calls)) for nbytes, calls in sums])

    def sharded_elements(self, block: Block) -> float:
        return block.other_elements

    def enter_forward(self, index: int) -> None:
        super().enter_forward(index)
        self._finish_fill(index)
        if index + 1 < len(self.workload.blocks):
            self._publish(index + 1)
            ready = self._updated if self.keeps else self.sim.now(COMPUTE)
            self._start_fill(index + 1, ready)

    def enter_backward(self, index: int) -> None:
        super().enter_backward(index)
        if self.keeps:
            return
        if index not in self._fills:
            self._start_fill(index, self.sim.now(COMPUTE))
        self._finish_fill(index)
        if index > 0:
            self._start_fill(index - 1, self.sim.now(COMPUTE))

    def leave_backward(self, index: int) -> None:
        block = self.workload.blocks[index]
        while len(self._reductions) >= _MAX_REDUCTIONS:
            self.sim.wait(COMPUTE, self._reductions.popleft())
        self.pack(block.matrix_elements / self.topology.tp)
        ready = self.sim.now(COMPUTE)
        reduced = self.travel("reduce", "reduce", "shard", self._reduces[index], ready)
        name, seconds = "reduce over replicas", self._replica_reduces[index]
        self._reductions.append(self.travel(name, name, "replicate", seconds, ready, reduced))
        super().leave_backward(index)

    def finish_backward(self) -> None:
        while self._reductions:
            self.sim.wait(COMPUTE, self._reductions.popleft())
        super().finish_backward()
        # Which gradients exist anywhere: one flag per matrix.
        seconds = self.seconds("all_reduce", "data", 4 * len(self.scenario.plan.matrices))
        self.sim.wait(COMPUTE, self.travel("reduce", "votes", "data", seconds, self.sim.now(COMPUTE)))

    def update(self) -> None:
        for seconds in self._chunks:
            self.sim.compute("ns", seconds)
        self._updated = self.sim.now(COMPUTE)
        self._publications = []
        self._publish(0)
        self._start_fill(0, self._updated)
        super().update()

    def _publish(self, index: int) -> None:
        """Send a block's new weights to the stand-ins of its owners in all replicas.

        They leave in the order of forward as soon as the stream is free. Each is submitted beside the fill of the block
        before it: both take turns on a link that they share.
        """
        published = self.travel("publish", "publish", "replicate", self._publishes[index], self._updated)
        self._publications.append(published)

    def _start_fill(self, index: int, ready: Times) -> None:
        """Copy weights into the block's buffer and broadcast them, one broadcast per owner."""
        after = (ready, self._publications[index])
        filled = self.sim.run(self.beside(("fill",)), "copy", self._copies[index], after=after)
        self._fills[index] = self.travel("fill", "fill", "shard", self._broadcasts[index], filled)

    def _finish_fill(self, index: int) -> None:
        if index in self._fills:
            self.sim.wait(COMPUTE, self._fills.pop(index))


class _DedicatedKeep(_Dedicated):
    keeps = True


PROGRAMS: Mapping[ProgramName, type[_AdamW]] = {
    "dedicated": _Dedicated,
    "dedicated keep": _DedicatedKeep,
    "gather": _Gather,
    "adamw": _AdamW,
}
