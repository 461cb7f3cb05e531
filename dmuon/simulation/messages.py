"""Every message of a training step, as a table: for what, over which ranks, and how many bytes."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmuon.simulation.network import Collective, Group, Topology
from dmuon.simulation.scenario import MASTER_BYTES, Scenario, stored_shapes
from dmuon.simulation.workload import Block, is_expert

Program = Literal["dedicated", "exchanged", "gather", "adamw"]
Purpose = Literal[
    "weights",  # FSDP2 gathers them before a block computes
    "gradients",  # FSDP2 scatters them behind it
    "averages",  # of these over replicas
    "tokens",  # on their way to their experts; as many come back
    "fill",  # owners' weights along the row
    "reduce",  # gradients to the owners along the row
    "replicas",  # the same over the replicas
    "publish",  # owners' new weights over the replicas
    "momentum",  # gathered on every rank, of one shape
    "parts",  # of momentum to owners
    "updates",  # parts of them from owners
    "copies",  # these to the replicas that have the same parts
    "norms",  # of whole matrices, before parts travel in half precision
]
_NORM_BYTES = 8  # of a matrix: the sum of its squares


class Message(NamedTuple):
    """Collectives of one launch: ``calls`` of one kind over each group of a kind, with ``nbytes`` together.

    Attributes:
        block: that it is for; None for the update.
        nbytes: of whole tensors; of an all-to-all, the most that a rank has for all others.
    """

    purpose: Purpose
    block: int | None
    group: Group
    kind: Collective
    nbytes: float
    calls: int = 1


def messages(program: Program, scenario: Scenario) -> list[Message]:
    """What ``program`` sends in a step; ``"weights"`` and ``"fill"`` twice unless weights are kept."""
    workload, topology, rings = scenario.workload, scenario.topology, scenario.topology.rings()
    param, reduce = workload.param_bytes, workload.reduce_bytes
    table: list[Message] = []
    for i, block in enumerate((*workload.blocks, workload.ends)):
        for group, elements in sharded(program, block, topology):
            shard = elements / rings[group].size
            table.append(Message("weights", i, group, "all_gather", elements * param))
            table.append(Message("gradients", i, group, "reduce_scatter", elements * reduce))
            table.append(Message("averages", i, "replicate", "all_reduce", shard * reduce))
        if topology.ep > 1:
            table.append(Message("tokens", i, "experts", "all_to_all", block.dispatch_bytes))
    for experts, grids in zip((False, True) if topology.ep > 1 else (False,), owned_elements(scenario), strict=False):
        row_group: Group = "expert shard" if experts else "shard"
        if program == "dedicated":
            for i, grid in enumerate(grids):
                parts = topology.ep if experts else 1  # ranks of a row that own other experts each
                owners = max(int(np.count_nonzero(grid.any(axis=0)[part::parts])) for part in range(parts))
                row, column = float(grid.sum()) / parts, float(grid.sum(axis=0).max())
                replicas = int(np.count_nonzero(grid, axis=0).max())
                table.append(Message("fill", i, row_group, "broadcast", row * param, owners))
                table.append(Message("reduce", i, row_group, "reduce", row * reduce, owners))
                table.append(Message("replicas", i, "replicate", "reduce", column * reduce, replicas))
                table.append(Message("publish", i, "replicate", "broadcast", column * param, replicas))
        elif program == "gather":
            for (rows, cols), count in gathered_shapes(scenario, experts).items():
                nbytes = rows * cols * count * MASTER_BYTES / topology.tp
                table.append(Message("momentum", None, row_group, "all_gather", nbytes, count))
        elif program == "exchanged":
            over: Group = row_group if experts else "replica"
            total = grids.sum(axis=0)
            parts = rings[over].size * (topology.ep if experts else 1)
            # An owner gets what others have of its matrices, and sends its parts of theirs, in its own replica.
            most = max(float(total.max()), float(total.sum(axis=1).max()) / parts) * scenario.machine.ns_bytes
            copied = float(total.sum()) / parts * scenario.machine.ns_bytes
            replicas = int(np.count_nonzero(total.any(axis=1)))
            matrices = sum((topology.ep > 1 and is_expert(m.name)) == experts for m in scenario.plan.matrices)
            table.append(Message("parts", None, over, "all_to_all", most))
            table.append(Message("updates", None, over, "all_to_all", most))
            table.append(Message("copies", None, "replicate", "broadcast", copied, replicas))
            table.append(Message("norms", None, over, "all_reduce", _NORM_BYTES * matrices))
    return [message for message in table if message.nbytes and rings[message.group].size > 1]


def sharded(program: Program, block: Block, topology: Topology) -> list[tuple[Group, float]]:
    """What FSDP2 shards: by the group that shards it, elements that a rank has while it computes."""
    if program == "dedicated":
        return [("shard", float(block.other_elements))]
    experts = block.expert_elements if topology.ep > 1 else 0
    shared = (block.matrix_elements - experts) / topology.tp + block.other_elements
    return [("shard", shared), ("expert shard", experts / topology.ep / topology.tp)]


def owned_elements(scenario: Scenario) -> NDArray[np.float64]:
    """Elements of one tensor-parallel rank by their owner, shape ``(2, blocks, replicate, shard)``.

    First of all that is not a routed expert that ranks divide, then of these.
    """
    topology = scenario.topology
    index = {block.name: i for i, block in enumerate(scenario.workload.blocks)}
    owned = np.zeros((2, len(index), topology.replicate, topology.shard))
    for m in scenario.plan.matrices:
        replica, shard = topology.coordinate(scenario.plan.owners[m.name])
        expert = int(topology.ep > 1 and is_expert(m.name))
        owned[expert, index[m.block], replica, shard] += m.rows * m.cols / topology.tp
    return owned


def gathered_shapes(scenario: Scenario, experts: bool) -> Counter[tuple[int, int]]:
    """Matrices per stored shape that a rank orthogonalizes if it gathers all that it has a part of."""
    ep = scenario.topology.ep
    shapes = stored_shapes(m for m in scenario.plan.matrices if (ep > 1 and is_expert(m.name)) == experts)
    return Counter({shape: -(-count // (ep if experts else 1)) for shape, count in shapes.items()})
