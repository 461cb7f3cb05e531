"""Which mesh, residency and merging to take: all of them predicted beside the best AdamW, and one line to paste."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dmuon.planning.merging import merge_bytes
from dmuon.simulation.network import AlphaBeta, Topology
from dmuon.simulation.programs import simulate
from dmuon.simulation.scenario import Scenario, merged, owned_elements
from dmuon.simulation.terms import ERROR, verdict

Residency = Literal["dedicated", "exchanged"]

_ROOM = 0.6  # of a device's memory: the rest is for activations, workspaces and fragments
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        step_s: predicted.
        adamw_s: of AdamW on the same mesh.
        nbytes: of weights, gradients, optimizer state and buffers on the rank that holds most.
        fits: leaves room on the device.
    """

    topology: Topology
    residency: Residency
    merge_bytes: int
    step_s: float
    adamw_s: float
    nbytes: float
    fits: bool

    @property
    def mesh(self) -> str:
        return f"{self.topology.replicate} × {self.topology.shard}"

    def code(self) -> str:
        """What to write."""
        t = self.topology
        sizes, names = (t.replicate, t.shard), ("replicate", "shard")
        if t.replicate == 1:
            mesh = f'init_device_mesh("cuda", ({t.shard},))'
        elif t.shard == 1:
            mesh = f'init_device_mesh("cuda", ({t.replicate},), mesh_dim_names=("replicate",))'
        else:
            mesh = f'init_device_mesh("cuda", {sizes}, mesh_dim_names={names})'.replace("'", '"')
        if self.residency == "exchanged":
            return f"mesh = {mesh}; fully_shard(model, mesh=mesh); optimizer = dmuon.Muon(model)"
        comm = f", comm=dmuon.CommOptions(merge_bytes={self.merge_bytes})" if self.merge_bytes else ""
        return f"mesh = {mesh}; dmuon.dedicate_params(model, mesh{comm})"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All ways, fastest first, and the one to take.

    Attributes:
        adamw_s: AdamW on the mesh that suits it best, of those that fit.
        equal: ways that fit and whose predicted steps cannot be told from the fastest.
        taken: of these the one that holds least.
        error: of predicted overheads.
    """

    ways: tuple[Way, ...]
    adamw_s: float
    equal: tuple[Way, ...]
    taken: Way
    error: float

    @property
    def overhead(self) -> float:
        """Of the way that is taken, over the best AdamW."""
        return self.taken.step_s / self.adamw_s - 1

    def report(self) -> str:
        """The table of alternatives, and the line to paste, as text for people."""
        lines = [
            f"ways to train, predicted; over the best AdamW ({1e3 * self.adamw_s:.1f} ms), ± {self.error:.1%}:",
            f"{'mesh':>12} {'residency':<10} {'merge MiB':>9} {'step ms':>9} {'of AdamW here':>14} {'over AdamW':>16}"
            f" {'GiB':>7}",
        ]
        for way in self.ways:
            mark = " <" if way is self.taken else "" if way.fits else "  does not fit"
            lines.append(
                f"{way.mesh:>12} {way.residency:<10} {way.merge_bytes / 2**20:>9.0f} {1e3 * way.step_s:>9.1f} "
                f"{way.step_s / way.adamw_s:>14.3f} {verdict(way.step_s / self.adamw_s - 1, self.error):>16} "
                f"{way.nbytes / _GIB:>7.1f}{mark}"
            )
        if not self.taken.fits:
            return "\n".join([*lines, "none of them fits into the memory of a device: add ranks, --tp, --ep or --pp"])
        fastest = len(self.equal) == 1
        why = "it is the fastest that fits" if fastest else (
            f"{len(self.equal)} ways are equal within the error of the prediction, and of these it holds least"
        )  # fmt: skip
        lines += [f"recommended, because {why}:", f"    {self.taken.code()}"]
        return "\n".join(lines)


def recommend(scenario: Scenario, memory: float, error: float = ERROR) -> Recommendation:
    """Predict every mesh of whole nodes, both residencies, and merging by the latency of a lap.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
        memory: bytes of a device.
        error: steps that differ by less are equal.
    """
    ways: list[Way] = []
    best: list[tuple[bool, float]] = []
    for topology in meshes(scenario.topology):
        here = replace(scenario, topology=topology, merge_bytes=0)
        merging = _merge_bytes(here)
        together = replace(here, merge_bytes=merging)
        adamw = min(simulate("adamw", one).step_s for one in ([here, merged(together)] if merging else [here]))
        best.append((_adamw_bytes(here) <= _ROOM * memory, adamw))
        dedicated = [here, together] if merging else [here]
        for residency, one in [("dedicated", one) for one in dedicated] + [("exchanged", here)]:
            kind: Residency = "dedicated" if residency == "dedicated" else "exchanged"
            nbytes = _dedicated_bytes(one) if kind == "dedicated" else _exchanged_bytes(one)
            step = simulate(kind, one).step_s
            ways.append(Way(topology, kind, one.merge_bytes, step, adamw, nbytes, nbytes <= _ROOM * memory))
    ways.sort(key=lambda way: (not way.fits, way.step_s))
    fitting = [way for way in ways if way.fits] or ways
    equal = tuple(way for way in fitting if way.step_s / fitting[0].step_s - 1 < error) or (fitting[0],)
    taken = min(equal, key=lambda way: (way.nbytes, way.step_s))
    adamw_s = min([step for fits, step in best if fits] or [step for _, step in best])
    return Recommendation(tuple(ways), adamw_s, equal, taken, error)


def meshes(given: Topology) -> Iterator[Topology]:
    """Sharded over all ranks, and replicas that are sharded over 1, 8, 64, … nodes' ranks, or parts of a node."""
    data = given.world // given.tp
    per_node = max(1, given.gpus_per_node // given.tp)
    shards = {data, *(per_node * 8**i for i in range(5))}
    for shard in sorted(shards):
        if shard <= data and data % shard == 0 and shard % given.ep == 0:
            yield replace(given, replicate=data // shard)


def _merge_bytes(scenario: Scenario) -> int:
    """By the blocks in the middle of the model, whose weights go around one row."""
    network, topology, workload = scenario.machine.network, scenario.topology, scenario.workload
    ring = topology.ring(topology.group_ids()["shard"])
    if not isinstance(network, AlphaBeta) or ring.size == 1:
        return 0
    block = sorted(workload.blocks, key=lambda b: b.matrix_elements)[len(workload.blocks) // 2]
    nbytes = block.matrix_elements * workload.param_bytes // topology.tp
    compute = block.forward_flops / topology.tp / scenario.machine.flops_per_s
    return merge_bytes(nbytes, network.lap(ring), nbytes / network.bandwidth(ring), compute)


# -- memory -----------------------------------------------------------------------------------------------------------


def _whole_block(scenario: Scenario) -> float:
    """Elements of the largest block on one rank while it computes."""
    experts = 1 - 1 / scenario.topology.ep
    blocks = merged(scenario).workload.blocks
    return max(b.matrix_elements - experts * b.expert_elements for b in blocks) / scenario.topology.tp


def _sharded(scenario: Scenario) -> tuple[float, float]:
    """Elements of one rank's shards: of matrices, and of everything else."""
    topology, workload = scenario.topology, scenario.workload
    blocks = (*workload.blocks, workload.ends)
    return (
        sum(b.matrix_elements for b in blocks) / topology.shard / topology.tp,
        sum(b.other_elements for b in blocks) / topology.shard,
    )


def _adamw_bytes(scenario: Scenario) -> float:
    """fp32 weight, gradient and two moments, and two blocks whole in what travels."""
    matrices, others = _sharded(scenario)
    return 16 * (matrices + others) + 2 * scenario.workload.param_bytes * _whole_block(scenario)


def _exchanged_bytes(scenario: Scenario) -> float:
    """As AdamW, with one moment for matrices."""
    matrices, others = _sharded(scenario)
    return 12 * matrices + 16 * others + 2 * scenario.workload.param_bytes * _whole_block(scenario)


def _dedicated_bytes(scenario: Scenario) -> float:
    """Masters, gradients and momentum; stand-ins; two buffers of weights and two of gradients.

    As docs/communication.md says, with AdamW's state of the rest.
    """
    topology, workload = scenario.topology, scenario.workload
    held = np.sum([grid for experts in (False, True) for grid in owned_elements(scenario, experts)], axis=0)
    owned, column = float(held.max()), float(held.sum(axis=0).max())
    standins = workload.param_bytes * column if topology.replicate > 1 else 0.0
    block = _whole_block(scenario)
    _, others = _sharded(scenario)
    return 12 * owned + standins + 16 * others + 2 * (workload.param_bytes + workload.reduce_bytes) * block
