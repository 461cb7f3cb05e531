"""One step of FSDP2, operation by operation: with AdamW, and with Muon that gathers every matrix everywhere."""

from __future__ import annotations

import numpy as np

from dmuon.simulation.engine import COMPUTE, Groups, Simulation, Times, latest
from dmuon.simulation.network import NOTHING, Collective, Travel
from dmuon.simulation.scenario import MASTER_BYTES, Scenario, batches, gathered_shapes, tensors
from dmuon.simulation.workload import Block

_EVERYBODYS = ("FSDP2 gather", "FSDP2 reduce", "FSDP2 all-reduce", "tokens")  # streams of AdamW's step too


class AdamW:
    """FSDP2 over everything, and AdamW.

    Gathers run beside computation, one unit ahead: a unit's gather waits for the copy-out of the one before. One
    reduce-scatter of each group may be on its way when the next starts. With replicas an all-reduce over them follows.
    Where ranks divide the experts, these are a unit of their own, and nothing computes while tokens go to experts and
    back.

    Attributes:
        keeps: weights stay whole from forward to backward.
    """

    def __init__(self, sim: Simulation, scenario: Scenario) -> None:
        self.sim, self.scenario = sim, scenario
        self.keeps = scenario.gathers_once
        self.workload, self.machine, self.topology = scenario.workload, scenario.machine, scenario.topology
        ids = self.topology.group_ids()
        self.groups = {name: Groups(i) for name, i in ids.items()}
        self.rings = {name: self.topology.ring(i) for name, i in ids.items()}
        self._gathers: dict[str, Times] = {}
        self._copied = np.zeros(sim.ranks)
        self._scatters: dict[str, Times] = {}
        self._replicated = np.zeros(sim.ranks)

    def units(self, block: Block) -> list[tuple[str, float]]:
        """What FSDP2 manages: by the group that shards it, elements that a rank has while it computes."""
        experts = block.expert_elements if self.topology.ep > 1 else 0
        shared = (block.matrix_elements - experts) / self.topology.tp + block.other_elements
        return [("shard", shared), ("expert shard", experts / self.topology.ep / self.topology.tp)]

    def host_s(self) -> float:
        """Seconds of the host for one step on the busiest rank, which it spends ahead of the device."""
        return self.machine.terms.host_module_s * tensors(self.scenario.plan.matrices)

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        blocks, ends = self.workload.blocks, self.workload.ends
        self._copied = self.sim.now(COMPUTE)  # gathers wait for the update
        self._gather(ends)
        self._unshard(ends)
        for index, block in enumerate(blocks):
            self.enter_forward(index)
            self._dispatch(block)
            self._flops("forward", block.forward_flops)
        if not self.keeps:
            self._copied = self.sim.now(COMPUTE)  # the gather for backward waits for the weights to be freed
            self._gather(blocks[-1])
        self._flops("head", ends.forward_flops + ends.backward_flops)
        for index in reversed(range(len(blocks))):
            self.enter_backward(index)
            self._dispatch(blocks[index])
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
        for scattered in self._scatters.values():
            self.sim.wait(COMPUTE, scattered)
        self.sim.wait(COMPUTE, self._replicated)
        self._scatters = {}

    def update(self) -> None:
        self._adamw([unit for b in (*self.workload.blocks, self.workload.ends) for unit in self.units(b)])

    # -- operations ------------------------------------------------------------------------------------------------

    def way(self, kind: Collective, group: str, nbytes: float, calls: int = 1) -> Travel:
        """Of collectives of everybody; nothing happens where nothing travels."""
        return self.machine.network.travel(kind, self.rings[group], nbytes, calls) if nbytes else NOTHING

    def travel(self, stream: str, name: str, group: str, way: Travel, *after: Times) -> Times:
        """Hold ``stream`` until it has arrived, and the link of ``group`` for its bytes: streams share the link."""
        if not way:
            return latest(np.zeros(self.sim.ranks), *after)
        link = f"{self.rings[group].link} link"
        groups = self.groups[group]
        return self.sim.run(
            self.beside((stream,)), name, way.seconds, links={link: way.busy}, after=after, groups=groups,
            contends=stream not in _EVERYBODYS,
        )  # fmt: skip

    def beside(self, resources: tuple[str, ...]) -> tuple[str, ...]:
        """What an operation of communication holds: the compute stream too, where the machine has nothing else."""
        return (*resources, COMPUTE) if self.machine.communication_computes else resources

    def copy(self, name: str, nbytes: float) -> None:
        if nbytes:
            self.sim.compute(name, nbytes / self.machine.copy_bytes_per_s)

    def _flops(self, name: str, flops: float) -> None:
        if flops:
            self.sim.compute(name, flops / self.topology.tp / self.machine.flops_per_s)

    def _dispatch(self, block: Block) -> None:
        """Tokens to the ranks that hold their experts, and back."""
        ring = self.rings["experts"]
        if ring.size == 1 or not block.dispatch_bytes:
            return
        near = ring.size // ring.nodes if ring.nodes > 1 else 1  # ranks that the bounding link does not lead to
        away = block.dispatch_bytes * (ring.size - near) / ring.size
        way = self.way("all_to_all", "experts", away, ring.size - 1)
        for _ in range(2):
            arrived = self.travel("tokens", "tokens", "experts", way, self.sim.now(COMPUTE))
            self.sim.wait(COMPUTE, arrived)

    def _gather(self, block: Block) -> None:
        arrived = self._copied
        for group, elements in self.units(block):
            way = self.way("all_gather", group, elements * self.workload.param_bytes)
            arrived = latest(arrived, self.travel("FSDP2 gather", "all-gather", group, way, self._copied))
        self._gathers[block.name] = arrived

    def _unshard(self, block: Block) -> None:
        if block.name not in self._gathers:
            self._gather(block)
        self.sim.wait(COMPUTE, self._gathers.pop(block.name))
        gathered = sum(elements for group, elements in self.units(block) if self.rings[group].size > 1)
        self.copy("copy-out", 2 * gathered * self.workload.param_bytes)
        self._copied = self.sim.now(COMPUTE)

    def _scatter_gradients(self, block: Block) -> None:
        for group, elements in self.units(block):
            if not elements:
                continue
            if group in self._scatters:
                self.sim.wait(COMPUTE, self._scatters[group])
            self.pack(elements)
            nbytes = elements * self.workload.reduce_bytes
            way = self.way("reduce_scatter", group, nbytes)
            scattered = self.travel("FSDP2 reduce", "reduce-scatter", group, way, self.sim.now(COMPUTE))
            self._scatters[group] = scattered
            way = self.way("all_reduce", "replicate", nbytes / self.rings[group].size)
            self._replicated = self.travel("FSDP2 all-reduce", "all-reduce", "replicate", way, scattered)

    def pack(self, elements: float) -> None:
        """Copy a block's gradients into what travels."""
        if self.topology.shard * self.topology.replicate > 1:
            self.copy("pack", elements * (self.workload.param_bytes + self.workload.reduce_bytes))

    def others(self) -> list[tuple[str, float]]:
        """What AdamW updates beside Muon, as :meth:`units`."""
        return [("shard", float(b.other_elements)) for b in (*self.workload.blocks, self.workload.ends)]

    def _adamw(self, units: list[tuple[str, float]]) -> None:
        elements = sum(elements / self.rings[group].size for group, elements in units)
        if elements:
            self.sim.compute("adamw", elements / self.machine.adamw_elements_per_s)


class Gather(AdamW):
    """FSDP2; every rank gathers and orthogonalizes every matrix, one shape after another, then applies its rows."""

    def update(self) -> None:
        for group, shapes in gathered_shapes(self.scenario).items():
            for (rows, cols), count in shapes.items():
                nbytes = rows * cols * count * MASTER_BYTES / self.topology.tp
                way = self.way("all_gather", group, nbytes, count)
                gathered = self.travel("FSDP2 gather", "gather momentum", group, way, self.sim.now(COMPUTE))
                self.sim.wait(COMPUTE, gathered)
                for batch in batches(self.scenario, {(rows, cols): count}):
                    self.sim.compute("ns", batch)
        self._adamw(self.others())
