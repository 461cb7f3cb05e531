"""One step of the dedicated residency, operation by operation: owners fill, reduce, update and publish."""

from __future__ import annotations

from collections import Counter, deque
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dmuon.layout.buffer import BufferLayout, make_layout
from dmuon.simulation.engine import COMPUTE, Simulation, Times, latest
from dmuon.simulation.fsdp import AdamW
from dmuon.simulation.network import NOTHING, Collective, Travel, of_ranks
from dmuon.simulation.scenario import MASTER_BYTES, Scenario, merged, ns_chunks, owned_elements, tensors
from dmuon.simulation.workload import Block, is_expert

_MAX_REDUCTIONS = 2  # as in dmuon.dedicated.runtime
_ALIGN = 256  # bytes, as in dmuon.dedicated.buffer
_Leg = tuple[str, Travel]  # the group that it goes over
_Grid = NDArray[np.float64]  # elements by replica and shard of their owner


@lru_cache(maxsize=4096)  # of thousands of blocks, over all the scenarios that are compared
def _laid_out(
    owned: tuple[tuple[int, int, int], ...], grid: tuple[int, int], backend: str, resident: bool, align: int
) -> BufferLayout:
    return make_layout(owned, *grid, wanted="auto", backend=backend, resident=resident, align=align)


class _Ways:
    """How one block's weights and gradients travel: that of all ranks, or of those that share the same experts.

    Attributes:
        fill, reduce: along the row, in one leg or two, each with the group that it goes over.
        publish, replica_reduce: along the column.
    """

    def __init__(self, program: Dedicated, grid: _Grid, group: str) -> None:
        row = program.rings[group].size
        rows = grid.shape[1] // row  # of other experts each
        param, reduce = program.workload.param_bytes, program.workload.reduce_bytes
        layouts = [self._layout(program, grid[:, i::rows]) for i in range(rows)]
        self._group, self._program = group, program
        self._shard = program.topology.coordinates()[1]
        along = self._in_levels if program.in_levels and group == "shard" else self._along_row
        self.fill = along(layouts, ("broadcast", "all_gather"), param)
        self.reduce = along(layouts, ("reduce", "reduce_scatter"), reduce)[::-1]
        self.publish = self._along_column("broadcast", grid * param)
        self.replica_reduce = self._along_column("reduce", grid * reduce)

    @staticmethod
    def _layout(program: Dedicated, grid: _Grid) -> BufferLayout:
        replicas, shards = np.nonzero(grid)
        owned = zip(
            replicas.tolist(), shards.tolist(), np.rint(grid[replicas, shards]).astype(int).tolist(), strict=True
        )
        backend = "gloo" if program.machine.communication_computes else "nccl"
        return _laid_out(tuple(owned), grid.shape, backend, program.keeps, _ALIGN // program.workload.param_bytes)

    def _along_row(
        self, layouts: list[BufferLayout], kinds: tuple[Collective, Collective], itemsize: int
    ) -> list[_Leg]:
        ways = [
            self._way(layout, self._group, [size for _, size in _sizes(layout)], kinds, itemsize) for layout in layouts
        ]
        return [(self._group, of_ranks(ways, self._shard % len(layouts)))]

    def _in_levels(
        self, layouts: list[BufferLayout], kinds: tuple[Collective, Collective], itemsize: int
    ) -> list[_Leg]:
        """Along each rail what its ranks own, then everything within nodes."""
        (layout,), rails = layouts, self._program.topology.rails
        sizes = _sizes(layout)
        ways = [
            self._way(layout, "rail", [size for s, size in sizes if s % rails == rail], kinds, itemsize)
            for rail in range(rails)
        ]
        node = self._way(layout, "node", [size for _, size in sizes], kinds, itemsize)
        return [("rail", of_ranks(ways, self._shard % rails)), ("node", node)]

    def _way(
        self, layout: BufferLayout, group: str, sizes: list[int], kinds: tuple[Collective, Collective], itemsize: int
    ) -> Travel:
        """Parts of all owners by one launch, or what is padded to one size by one collective."""
        nbytes = sum(sizes) * itemsize
        if layout.row == "single":
            return self._program.way(kinds[1], group, nbytes)
        return self._program.way(kinds[0], group, nbytes, sum(size > 0 for size in sizes))

    def _along_column(self, kind: Collective, nbytes: _Grid) -> Travel:
        """One collective per owner in each column of replicas, in one launch; the columns work side by side."""
        topology = self._program.topology
        if topology.replicate == 1:
            return NOTHING
        sums = zip(nbytes.sum(axis=0), np.count_nonzero(nbytes, axis=0), strict=True)
        ways = [self._program.way(kind, "replicate", float(total), int(calls)) for total, calls in sums]
        return of_ranks(ways, topology.coordinates()[1])


def _sizes(layout: BufferLayout) -> list[tuple[int, int]]:
    """Shards, and elements of their segments."""
    return [(shard, end - start) for shard, (start, end) in layout.segments.filled.items()]


class Dedicated(AdamW):
    """Owners: fill, reduce, update, publish. FSDP2 moves what they do not own."""

    def __init__(self, sim: Simulation, scenario: Scenario) -> None:
        super().__init__(sim, merged(scenario))
        self.keeps = self.keeps or self._keeps_weights()
        self.in_levels = scenario.hierarchical and self.topology.rails > 0
        self._chunks = ns_chunks(scenario)
        self._fills: dict[int, Times] = {}
        self._reductions: deque[Times] = deque()
        self._passed_on = np.zeros(sim.ranks)
        self._updated = np.zeros(sim.ranks)
        self._publications = [np.zeros(sim.ranks)]  # of the first block, before any step
        column = self.topology.coordinates()[1]
        copied = (MASTER_BYTES + self.workload.param_bytes) / self.machine.copy_bytes_per_s
        shared, experts = (owned_elements(self.scenario, of_experts) for of_experts in (False, True))
        # Seconds per block, and per rank where ranks differ.
        self._copies = [(a + b).sum(axis=0)[column] * copied for a, b in zip(shared, experts, strict=True)]
        self._ways = [
            [("", "shard", _Ways(self, grid, "shard"))]
            + ([(" experts", "expert shard", _Ways(self, of_experts, "expert shard"))] if of_experts.any() else [])
            for grid, of_experts in zip(shared, experts, strict=True)
        ]

    def _keeps_weights(self) -> bool:
        return False

    def host_s(self) -> float:
        terms = self.machine.terms
        host = (terms.host_module_s + terms.host_weight_s) * tensors(self.scenario.plan.matrices)
        return host + terms.host_call_s * self._calls() * (2 if self.keeps else 3)

    def _calls(self) -> int:
        """Collectives by which the rank with most fills, or reduces, every block once: one for each owner it meets."""
        plan, topology = self.scenario.plan, self.topology
        shared: dict[str, set[int]] = {}
        experts: dict[int, set[tuple[str, int]]] = {}  # by the part of them that a rank has
        for m in plan.matrices:
            owner = plan.owners[m.name] // topology.tp
            if topology.ep > 1 and is_expert(m.name):
                experts.setdefault(owner % topology.shard % topology.ep, set()).add((m.block, owner))
            else:
                shared.setdefault(m.block, set()).add(owner)
        calls = sum(map(len, shared.values())) + max(map(len, experts.values()), default=0)
        if self.in_levels:
            places = (Counter(owner % topology.rails for owner in owners) for owners in shared.values())
            calls += sum(max(place.values()) for place in places)
        return calls

    def units(self, block: Block) -> list[tuple[str, float]]:
        return [("shard", float(block.other_elements))]

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
        while len(self._reductions) >= _MAX_REDUCTIONS:
            self.sim.wait(COMPUTE, self._reductions.popleft())
        block = self.workload.blocks[index]
        experts = block.expert_elements * (1 - 1 / self.topology.ep)  # what other ranks have of them
        self.pack((block.matrix_elements - experts) / self.topology.tp)
        ready = self.sim.now(COMPUTE)
        arrived = ready
        for suffix, _, ways in self._ways[index]:
            reduced = self._along_legs("reduce", suffix, ways.reduce, latest(ready, self._passed_on))
            if len(ways.reduce) > 1 and self.topology.replicate > 1:
                self._passed_on = reduced  # the stream that starts legs waits for both, to start that over replicas
            name = "reduce over replicas"
            replicated = self.travel(f"{name}{suffix}", name, "replicate", ways.replica_reduce, ready, reduced)
            arrived = latest(arrived, replicated)
        self._reductions.append(arrived)
        super().leave_backward(index)

    def finish_backward(self) -> None:
        while self._reductions:
            self.sim.wait(COMPUTE, self._reductions.popleft())
        super().finish_backward()
        # Which gradients exist anywhere: one flag per matrix.
        way = self.way("all_reduce", "data", 4 * len(self.scenario.plan.matrices))
        self.sim.wait(COMPUTE, self.travel("reduce", "votes", "data", way, self.sim.now(COMPUTE)))

    def update(self) -> None:
        for seconds in self._chunks:
            self.sim.compute("ns", seconds)
        self._updated = self.sim.now(COMPUTE)
        self._publications = []
        self._publish(0)
        self._start_fill(0, self._updated)
        self._adamw(self.others())

    def _publish(self, index: int) -> None:
        """Send a block's new weights to the stand-ins of its owners in all replicas.

        They leave in the order of forward as soon as the stream is free. Each is submitted beside the fill of the block
        before it: both take turns on a link that they share.
        """
        arrived = self._updated
        for suffix, _, ways in self._ways[index]:
            published = self.travel(f"publish{suffix}", "publish", "replicate", ways.publish, self._updated)
            arrived = latest(arrived, published)
        self._publications.append(arrived)

    def _start_fill(self, index: int, ready: Times) -> None:
        """Copy weights into the block's buffer and send them along the row."""
        after = (ready, self._publications[index])
        filled = self.sim.run(self.beside(("fill",)), "copy", self._copies[index], after=after)
        arrived = filled
        for suffix, _, ways in self._ways[index]:
            arrived = latest(arrived, self._along_legs("fill", suffix, ways.fill, filled))
        self._fills[index] = arrived

    def _along_legs(self, name: str, suffix: str, legs: list[_Leg], ready: Times) -> Times:
        """One leg behind the other, each on a stream of its own."""
        for group, way in legs:
            within = f" {group}" if len(legs) > 1 else ""
            ready = self.travel(f"{name}{suffix}{within}", name, group, way, ready)
        return ready

    def _finish_fill(self, index: int) -> None:
        if index in self._fills:
            self.sim.wait(COMPUTE, self._fills.pop(index))


class DedicatedKeep(Dedicated):
    """The same with ``reshard_after_forward=False``."""

    def _keeps_weights(self) -> bool:
        return True
