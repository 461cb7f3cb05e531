"""One training step of four programs, operation by operation as they run, on the engine of ``dmuon.simulation.engine``.

``dedicated``       as the dedicated residency runs it: depth-1 prefetch, two reductions on their way; but the first
                    block is published after the last update, where the runtime publishes it after its own.
``dedicated keep``  the same with ``reshard_after_forward=False``: all blocks are published at once.
``gather``          FSDP2; every rank gathers every momentum matrix, orthogonalizes all, and applies its own shard.
``adamw``           FSDP2 with AdamW on everything.

With replicas gradients are reduced over the shards, then over the replicas to the owner; the update is published over
the replicas while the next forward runs. With tensor parallelism matrices are divided over its ranks, and the gathers
of Newton–Schulz inputs are left to the cost table.

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
from dmuon.simulation.scenario import Scenario, batches, ns_chunks, owned_elements
from dmuon.simulation.workload import Block

__all__ = ["PROGRAMS", "ProgramName", "StepTrace", "simulate"]

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
        topology = self.topology
        ids = {
            "shard": topology.shard_ids(),
            "replicate": topology.replicate_ids(),
            "data": topology.data_ids(),
        }
        self.groups = {name: Groups(i) for name, i in ids.items()}
        self.rings = {name: topology.ring(i) for name, i in ids.items()}
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
            self._flops("forward", block.forward_flops, block)
        if not self.keeps:
            self._copied = self.sim.now(COMPUTE)  # the gather for backward waits for the weights to be freed
            self._gather(blocks[-1])
        self._flops("head", ends.forward_flops + ends.backward_flops, ends)
        for index in reversed(range(len(blocks))):
            self.enter_backward(index)
            self._flops("backward", blocks[index].backward_flops, blocks[index])
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

    def collective(
        self,
        stream: str,
        name: str,
        kind: Collective,
        group: str,
        nbytes: float,
        *,
        block: str = "",
        after: tuple[Times, ...] = (),
    ) -> Times:
        """Submit one collective of everybody; nothing happens where nothing travels."""
        seconds = self.machine.network.seconds(kind, self.rings[group], nbytes) if nbytes else 0.0
        return self.travel(stream, name, group, seconds, block=block, after=after)

    def travel(
        self,
        stream: str,
        name: str,
        group: str,
        seconds: float | Times,
        *,
        block: str = "",
        after: tuple[Times, ...] = (),
    ) -> Times:
        """Hold ``stream`` and the link of ``group``; streams that use one link at once share it one by one."""
        if not np.any(seconds):
            return latest(np.zeros(self.sim.ranks), *after)
        resources: tuple[str, ...] = (stream, f"{self.rings[group].link} link")
        if self.machine.communication_computes:
            resources += (COMPUTE,)
        return self.sim.run(resources, name, seconds, block=block, after=after, groups=self.groups[group])

    def copy(self, name: str, nbytes: float, block: Block) -> None:
        if nbytes:
            self.sim.compute(name, nbytes / self.machine.copy_bytes_per_s, block=block.name)

    def _flops(self, name: str, flops: float, block: Block) -> None:
        if flops:
            self.sim.compute(name, flops / self.topology.tp / self.machine.flops_per_s, block=block.name)

    def _gather(self, block: Block) -> None:
        nbytes = self.sharded_elements(block) * self.workload.param_bytes
        self._gathers[block.name] = self.collective(
            "FSDP2 gather", "all-gather", "all_gather", "shard", nbytes, block=block.name, after=(self._copied,)
        )

    def _unshard(self, block: Block) -> None:
        if block.name not in self._gathers:
            self._gather(block)
        self.sim.wait(COMPUTE, self._gathers.pop(block.name))
        if self.topology.shard > 1:
            self.copy("copy-out", 2 * self.sharded_elements(block) * self.workload.param_bytes, block)
        self._copied = self.sim.now(COMPUTE)

    def _scatter_gradients(self, block: Block) -> None:
        elements, topology = self.sharded_elements(block), self.topology
        if not elements:
            return
        if self._scatter is not None:
            self.sim.wait(COMPUTE, self._scatter)
        self.pack(elements, block)
        nbytes = elements * self.workload.reduce_bytes
        ready = self.sim.now(COMPUTE)
        self._scatter = self.collective(
            "FSDP2 reduce", "reduce-scatter", "reduce_scatter", "shard", nbytes, block=block.name, after=(ready,)
        )
        self._replicated = self.collective(
            "FSDP2 all-reduce",
            "all-reduce",
            "all_reduce",
            "replicate",
            nbytes / topology.shard,
            block=block.name,
            after=(self._scatter,),
        )

    def pack(self, elements: float, block: Block) -> None:
        """Copy a block's gradients into what travels."""
        if self.topology.shard * self.topology.replicate > 1:
            self.copy("pack", elements * (self.workload.param_bytes + self.workload.reduce_bytes), block)

    def _adamw(self, elements: float) -> None:
        if elements:
            seconds = elements / self.topology.shard / self.machine.adamw_elements_per_s
            self.sim.compute("adamw", seconds)


class _Gather(_AdamW):
    """FSDP2; every rank gathers and orthogonalizes every matrix, one shape after another, then applies its rows."""

    def update(self) -> None:
        matrices = self.scenario.plan.matrices
        shapes: dict[tuple[int, int], int] = {}
        for m in matrices:
            shapes[m.rows, m.cols] = shapes.get((m.rows, m.cols), 0) + 1
        for (rows, cols), count in shapes.items():
            nbytes = rows * cols * count * _MASTER_BYTES / self.topology.tp
            seconds = self.machine.network.seconds("all_gather", self.rings["shard"], nbytes, count)
            ready = self.sim.now(COMPUTE)
            self.sim.wait(COMPUTE, self.travel("FSDP2 gather", "gather momentum", "shard", seconds, after=(ready,)))
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
        return self.machine.network.seconds(kind, self.rings["shard"], float(grid.sum()), calls)

    def _over_replicas(self, kind: Collective, grid: NDArray[np.float64]) -> Times:
        """One collective per owner in each column of replicas; the columns work side by side."""
        if self.topology.replicate == 1:
            return np.zeros(self.topology.shard)
        network, ring = self.machine.network, self.rings["replicate"]
        sums = zip(grid.sum(axis=0), np.count_nonzero(grid, axis=0), strict=True)
        return np.array([network.seconds(kind, ring, float(nbytes), int(calls)) for nbytes, calls in sums])

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
        self.pack(block.matrix_elements / self.topology.tp, block)
        ready = self.sim.now(COMPUTE)
        reduced = self.travel("reduce", "reduce", "shard", self._reduces[index], block=block.name, after=(ready,))
        name, seconds = "reduce over replicas", self._replica_reduces[index]
        reduced = self.travel(name, name, "replicate", seconds, block=block.name, after=(ready, reduced))
        self._reductions.append(reduced)
        super().leave_backward(index)

    def finish_backward(self) -> None:
        while self._reductions:
            self.sim.wait(COMPUTE, self._reductions.popleft())
        super().finish_backward()
        # Which gradients exist anywhere: one flag per matrix.
        flags = 4 * len(self.scenario.plan.matrices)
        voted = self.collective("reduce", "votes", "all_reduce", "data", flags, after=(self.sim.now(COMPUTE),))
        self.sim.wait(COMPUTE, voted)

    def update(self) -> None:
        for seconds in self._chunks:
            self.sim.compute("ns", seconds)
        self._updated = self.sim.now(COMPUTE)
        self._publications = []
        self._publish(0)
        self._start_fill(0, self._updated)
        workload = self.workload
        self._adamw(sum(b.other_elements for b in (*workload.blocks, workload.ends)))

    def _publish(self, index: int) -> None:
        """Send a block's new weights to the stand-ins of its owners in all replicas.

        They leave in the order of forward as soon as the stream is free; submitting each beside the fill before it lets
        both take turns on a link that they share.
        """
        block, seconds = self.workload.blocks[index].name, self._publishes[index]
        after = (self._updated,)
        self._publications.append(self.travel("publish", "publish", "replicate", seconds, block=block, after=after))

    def _start_fill(self, index: int, ready: Times) -> None:
        """Copy weights into the block's buffer and broadcast them, one broadcast per owner."""
        block = self.workload.blocks[index].name
        resources: tuple[str, ...] = ("fill",)
        if self.machine.communication_computes:
            resources += (COMPUTE,)
        after = (ready, self._publications[index])
        filled = self.sim.run(resources, "copy", self._copies[index], block=block, after=after)
        seconds = self._broadcasts[index]
        self._fills[index] = self.travel("fill", "fill", "shard", seconds, block=block, after=(filled,))

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
