"""What a step time depends on: a workload, who owns what at what cost, a grid of ranks, and their rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from dmuon.simulation.hardware import Hardware
from dmuon.simulation.network import AlphaBeta, Network, Topology
from dmuon.simulation.terms import FITTED, NO_TERMS, Terms
from dmuon.simulation.workload import Block, Workload, is_expert
from dmuon.solver import CostTable, Matrix, Plan

MASTER_BYTES = 4  # of an element of masters, gradients and momentum: fp32
_HALF_BYTES = 2
# Of the peak. The steps that dmuon.simulation.terms are fitted to reach 0.44 to 0.56 on A800; Llama 3 405B was trained
# at 0.38 to 0.43 on H100 (arXiv 2407.21783).
_EFFICIENCY = 0.5
_ADAMW_BYTES = 28  # per element: weight, gradient and two moments read, all but the gradient written, fp32


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one rank.

    Attributes:
        flops_per_s: of forward and backward.
        copy_bytes_per_s: bytes read and written together.
        adamw_elements_per_s: elements that AdamW updates.
        network: how long collectives take.
        ns_scale: factor on every cost of Newton–Schulz.
        communication_computes: communication takes the compute stream, as on CPU ranks with one core each.
        ns_bytes: of an element as Newton–Schulz takes and leaves it, and as it is exchanged.
        terms: what operations alone leave out.
    """

    flops_per_s: float
    copy_bytes_per_s: float
    adamw_elements_per_s: float
    network: Network
    ns_scale: float = 1.0
    communication_computes: bool = False
    ns_bytes: int = MASTER_BYTES
    terms: Terms = NO_TERMS

    @classmethod
    def of(cls, hardware: Hardware, efficiency: float | None = None, terms: Terms = FITTED) -> Machine:
        """Rates of a preset, whose Newton–Schulz is in half precision.

        Args:
            efficiency: part of the peak that forward and backward reach; ``None`` is a half, as published training
                has it. Large matrix products alone reach 0.8: then steps come out short, and overheads long.

        Raises:
            ValueError: an efficiency outside (0, 1].
        """
        device = hardware.device
        if efficiency is not None and not 0 < efficiency <= 1:
            raise ValueError(f"efficiency={efficiency!r} must be above 0 and at most 1; give the part of the peak")
        return cls(
            device.peak_flops * (_EFFICIENCY if efficiency is None else efficiency),
            device.memory_bandwidth,
            device.memory_bandwidth / _ADAMW_BYTES,
            AlphaBeta.of(hardware),
            ns_bytes=_HALF_BYTES,
            terms=terms,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a step time depends on.

    Attributes:
        speeds: ranks that are not as fast as the machine says, and how many times as fast they are. Slow ranks slow
            down forward and backward too.
        merge_bytes: as in ``CommOptions``: neighbouring blocks of dedicated weights communicate together up to so many.
        hierarchical: as in ``CommOptions``, of rows that can; experts that ranks divide travel as ever.
        gathers_once: weights stay whole from forward to backward, as pipeline stages with several micro-batches do.
        exchanged_costs: of matrices that are exchanged, if others: their pieces come from tensor-parallel ranks anyway,
            while ``costs`` have what these gather and scatter.
        stages: of a pipeline, of which this is one.
        bubble: seconds in which a pipeline stage waits for others, as a part of its forward and backward.

    Raises:
        ValueError: plan, costs, workload and topology that do not belong together.
    """

    workload: Workload
    plan: Plan
    costs: CostTable
    machine: Machine
    topology: Topology
    speeds: Mapping[int, float] = field(default_factory=dict)
    merge_bytes: int = 0
    hierarchical: bool = False
    gathers_once: bool = False
    exchanged_costs: CostTable | None = None
    stages: int = 1
    bubble: float = 0.0

    @property
    def forward_backward_s(self) -> float:
        """Computation of forward and backward on one rank."""
        return self.workload.flops / self.topology.tp / self.machine.flops_per_s

    def __post_init__(self) -> None:
        if self.plan.world != self.topology.world:
            raise ValueError(f"plan is for {self.plan.world} ranks, topology for {self.topology.world}; plan again")
        elements: dict[str, int] = {}
        for m in self.plan.matrices:
            elements[m.block] = elements.get(m.block, 0) + m.rows * m.cols
            self.costs.cost(m.shape, 1)
        blocks = {b.name: b.matrix_elements for b in self.workload.blocks if b.matrix_elements}
        for name in sorted(set(blocks) | set(elements)):
            if blocks.get(name, 0) != elements.get(name, 0):
                raise ValueError(
                    f"block {name!r} has {blocks.get(name, 0)} matrix elements in the workload and "
                    f"{elements.get(name, 0)} in the plan; make both from one model"
                )


def ns_chunks(scenario: Scenario) -> NDArray[np.float64]:
    """Seconds of each rank's batched updates in the order in which it runs them, shape ``(batches, ranks)``.

    As ``dmuon.Muon`` batches: per stored shape, in chunks of the cost table.
    """
    order = {block.name: i for i, block in enumerate(scenario.workload.blocks)}
    owned: list[list[Matrix]] = [[] for _ in range(scenario.topology.world)]
    for m in sorted(scenario.plan.matrices, key=lambda m: order[m.block]):
        owned[scenario.plan.owners[m.name]].append(m)
    rows = [batches(scenario, stored_shapes(matrices)) for matrices in owned]
    table = np.zeros((max(map(len, rows)), len(rows)))
    for rank, seconds in enumerate(rows):
        table[: len(seconds), rank] = seconds
    return table


def stored_shapes(matrices: Iterable[Matrix]) -> Counter[tuple[int, int]]:
    """Matrices per shape as they are stored, in the order in which the shapes come."""
    return Counter((m.rows, m.cols) for m in matrices)


def gathered_shapes(scenario: Scenario) -> dict[str, Counter[tuple[int, int]]]:
    """By the group that shards them, what a rank orthogonalizes if it gathers all matrices that it has a part of."""
    matrices, ep = scenario.plan.matrices, scenario.topology.ep
    experts = stored_shapes(m for m in matrices if ep > 1 and is_expert(m.name))
    shared = stored_shapes(m for m in matrices if ep == 1 or not is_expert(m.name))
    return {"shard": shared, "expert shard": Counter({shape: -(-count // ep) for shape, count in experts.items()})}


def batches(scenario: Scenario, counts: Mapping[tuple[int, int], int]) -> list[float]:
    """Seconds of the batches that ``counts`` matrices per stored shape make on one rank."""
    costs, scale = scenario.costs, 1e-9 * scenario.machine.ns_scale
    seconds: list[float] = []
    for (rows, cols), count in counts.items():
        shape = min(rows, cols), max(rows, cols)
        whole, rest = divmod(count, costs.chunk(shape))
        seconds += [costs.cost(shape, costs.chunk(shape)) * scale] * whole
        seconds += [costs.cost(shape, rest) * scale] * bool(rest)
    return seconds


def tensors(matrices: Iterable[Matrix]) -> int:
    """Weights of which the matrices are made: those of a fused tensor or of a stack count once."""
    return len({m.name.partition("[")[0] for m in matrices})


def owned_elements(scenario: Scenario, experts: bool) -> list[NDArray[np.float64]]:
    """Per block, elements of one tensor-parallel rank by their owner's coordinates, shape ``(replicate, shard)``.

    Args:
        experts: of the routed experts where ranks divide these, or of everything else.
    """
    topology = scenario.topology
    index = {block.name: i for i, block in enumerate(scenario.workload.blocks)}
    owned = [np.zeros((topology.replicate, topology.shard)) for _ in index]
    for m in scenario.plan.matrices:
        if (topology.ep > 1 and is_expert(m.name)) == experts:
            row, column = divmod(scenario.plan.owners[m.name] // topology.tp, topology.shard)
            owned[index[m.block]][row, column] += m.rows * m.cols / topology.tp
    return owned


def merged(scenario: Scenario) -> Scenario:
    """The scenario with neighbouring blocks as one, as long as their weights fit into ``merge_bytes``."""
    if not scenario.merge_bytes:
        return scenario
    workload = scenario.workload
    groups: list[list[Block]] = []
    room = 0
    for block in workload.blocks:
        nbytes = block.matrix_elements * workload.param_bytes // scenario.topology.tp
        if groups and nbytes <= room:
            groups[-1].append(block)
        else:
            groups.append([block])
            room = scenario.merge_bytes
        room -= nbytes
    names = {block.name: group[0].name for group in groups for block in group}
    matrices = tuple(replace(m, block=names[m.block]) for m in scenario.plan.matrices)
    blocks = tuple(
        Block(group[0].name, *(sum(getattr(block, f.name) for block in group) for f in fields(Block)[1:]))
        for group in groups
    )
    return replace(
        scenario,
        workload=replace(workload, blocks=blocks),
        plan=replace(scenario.plan, matrices=matrices),
        merge_bytes=0,
    )
