"""How long a training step takes: one recurrence over the blocks, for the messages of any program.

``dedicated``  as the dedicated residency runs it: one block is prefetched, two reductions are on their way.
``exchanged``  FSDP2; parts of momentum travel to one owner and those of its update back, in rounds.
``gather``     FSDP2; every rank gathers every momentum matrix, orthogonalizes all, and applies its own shard.
``adamw``      FSDP2 with AdamW on everything.

A rank has a clock for what it computes, and one for each stream of messages. Streams share the links: while the
latency of one message passes, a link carries what the others send. All ranks are taken to be as late as the latest. Not
modelled: activations on their way by tensor parallelism, experts that get more tokens than others, clipping, the
allocator, and the host, which runs ahead.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmuon.tools.simulation.hardware import Collective, Group, Topology
from dmuon.tools.simulation.scenario import MASTER_BYTES, Block, Scenario, batches, is_expert, stored_shapes
from dmuon.tools.simulation.wave_model import UPDATE_BYTES

# -- messages -------------------------------------------------------------------------------------------------------

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
            holders: Group = row_group if experts else "replica"
            total = grids.sum(axis=0)
            parts = rings[holders].size * (topology.ep if experts else 1)
            # An owner gets what others have of its matrices, and sends its parts of theirs, in its own replica.
            most = max(float(total.max()), float(total.sum(axis=1).max()) / parts) * scenario.machine.ns_bytes
            copied = float(total.sum()) / parts * scenario.machine.ns_bytes
            replicas = int(np.count_nonzero(total.any(axis=1)))
            matrices = sum((topology.ep > 1 and is_expert(m.name)) == experts for m in scenario.plan.matrices)
            table.append(Message("parts", None, holders, "all_to_all", most))
            table.append(Message("updates", None, holders, "all_to_all", most))
            table.append(Message("copies", None, "replicate", "broadcast", copied, replicas))
            table.append(Message("norms", None, holders, "all_reduce", _NORM_BYTES * matrices))
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


# -- the recurrence -------------------------------------------------------------------------------------------------

_MAX_REDUCTIONS = 2  # as in dmuon.dedicated.runtime
_OWNERS = ("broadcast", "reduce", "all_to_all")  # AdamW's step has no such collectives, but for tokens
_FOLD_BYTES = 3 * MASTER_BYTES  # of an element: its gradient and its momentum read, this written
_READ_BYTES = 2 * MASTER_BYTES  # both read again
_JOINED = 4  # of each element: read and written when it has come, and before it goes back


class _Rank:
    """The clocks of a rank."""

    def __init__(self, program: Program, scenario: Scenario) -> None:
        self.scenario, self.machine = scenario, scenario.machine
        self.now = 0.0  # when everything that was computed so far has ended
        self._rings = scenario.topology.rings()
        self._streams: dict[str, float] = defaultdict(float)
        self._links: dict[str, float] = defaultdict(float)
        self._arrived = 0.0  # the last of what contends and has started
        self._table: dict[tuple[Purpose, int | None], list[Message]] = defaultdict(list)
        for message in messages(program, scenario):
            self._table[message.purpose, message.block].append(message)

    def messages_for(self, purpose: Purpose, block: int | None = None) -> Sequence[Message]:
        return self._table[purpose, block]

    def compute(self, seconds: float) -> None:
        hindered = min(seconds, max(0.0, self._arrived - self.now))
        self.now += seconds + self.machine.contention * hindered

    def copy(self, nbytes: float) -> None:
        self.compute(nbytes / self.machine.copy_bytes_per_s)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def send(self, purpose: Purpose, block: int | None, ready: float, part: float = 1.0) -> float:
        """Start messages as soon as they are ``ready`` and those before them are through; when they have arrived.

        Args:
            part: of their bytes.
        """
        arrived = ready
        for message in self._table[purpose, block]:
            contends = message.kind in _OWNERS and purpose != "tokens"
            ring = self._rings[message.group]
            travel = self.machine.network.travel(message.kind, ring, message.nbytes * part, message.calls)
            stream = f"{purpose} {message.group}"
            # Owners' rows of shared weights and of experts go side by side; FSDP2's one after the other.
            start = max(ready if contends else arrived, self._streams[stream])
            if self.machine.communication_computes:
                start = max(start, self.now)
            self._links[ring.link] = max(start, self._links[ring.link]) + travel.busy
            self._streams[stream] = self._links[ring.link] + travel.latency
            arrived = max(arrived, self._streams[stream])
            if self.machine.communication_computes:
                self.now = arrived
            if contends:
                self._arrived = max(self._arrived, arrived)
        return arrived


def step_s(program: Program, scenario: Scenario) -> float:
    """Seconds of a step in steady state, from one update to the next."""
    rank = _Rank(program, scenario)
    workload, topology, machine = scenario.workload, scenario.topology, scenario.machine
    blocks = (*workload.blocks, workload.ends)
    last = len(blocks) - 1  # the ends
    arriving: dict[int, float] = {}
    reductions: deque[float] = deque()
    scattered = averaged = 0.0
    travelled = workload.param_bytes + workload.reduce_bytes
    is_dedicated = program == "dedicated"
    owned = owned_elements(scenario).sum(axis=0)
    filled = [*owned.sum(axis=1).max(axis=1).tolist(), 0.0]

    def fetch(i: int, forward: bool = True) -> None:
        """Start what brings the weights of a block."""
        gathered = rank.send("weights", i, rank.now)
        published = rank.send("publish", i, 0.0) if forward else 0.0
        copied = filled[i] * (MASTER_BYTES + workload.param_bytes) / machine.copy_bytes_per_s if is_dedicated else 0.0
        ready = published if scenario.kept else max(published, rank.now)
        arriving[i] = max(gathered, rank.send("fill", i, ready + copied))

    def unshard(i: int) -> None:
        rank.wait(arriving.pop(i))
        rank.copy(2 * workload.param_bytes * sum(elements for _, elements in sharded(program, blocks[i], topology)))

    def dispatch(i: int) -> None:
        for _ in range(2):  # to the ranks that hold the tokens' experts, and back
            rank.wait(rank.send("tokens", i, rank.now))

    def scatter(i: int) -> None:
        """Start what brings the gradients of a block to their ranks."""
        nonlocal scattered, averaged
        if is_dedicated and i < last:
            while len(reductions) >= _MAX_REDUCTIONS:
                rank.wait(reductions.popleft())
            others = blocks[i].expert_elements * (1 - 1 / topology.ep)  # experts of other ranks
            rank.copy(travelled * (blocks[i].matrix_elements - others) / topology.tp)
            reductions.append(rank.send("replicas", i, rank.send("reduce", i, rank.now)))
        rank.wait(scattered)
        rank.copy(travelled * sum(elements for _, elements in sharded(program, blocks[i], topology)))
        scattered = rank.send("gradients", i, rank.now)
        averaged = max(averaged, rank.send("averages", i, scattered))

    if program != "adamw":
        _adamw(rank, [block.other_elements / topology.shard for block in blocks])
    fetch(last)
    unshard(last)
    fetch(0)
    for i in range(last):
        unshard(i)
        if i + 1 < last:
            fetch(i + 1)
        dispatch(i)
        rank.compute(blocks[i].forward_flops / scenario.flops_per_s)
    if not scenario.kept:
        fetch(last - 1, forward=False)
    rank.compute((workload.ends.forward_flops + workload.ends.backward_flops) / scenario.flops_per_s)
    for i in reversed(range(last)):
        if not scenario.kept:
            unshard(i)
            if i:
                fetch(i - 1, forward=False)
        dispatch(i)
        rank.compute(blocks[i].backward_flops / scenario.flops_per_s)
        scatter(i)
    scatter(last)
    rank.wait(max([scattered, averaged, *reductions]))
    if program == "adamw":
        rings = topology.rings()
        units = [unit for block in blocks for unit in sharded(program, block, topology)]
        _adamw(rank, [elements / rings[group].size for group, elements in units])
    elif program == "exchanged":
        _exchange(scenario, rank, owned.sum(axis=0))
    else:
        rank.wait(rank.send("momentum", None, rank.now))
        rank.compute(newton_schulz_s(program, scenario))
    return rank.now


def newton_schulz_s(program: Program, scenario: Scenario) -> float:
    """Seconds of Newton–Schulz with momentum and weight update, on the busiest rank."""
    if program == "adamw":
        return 0.0
    if program == "gather":
        return sum(sum(batches(scenario, gathered_shapes(scenario, routed))) for routed in (False, True))
    if program == "dedicated":
        return 1e-9 * scenario.machine.ns_scale * max(scenario.plan.loads_ns)
    return max(sum(taken) for taken in _owned_batches(scenario))


def _owned_batches(scenario: Scenario) -> list[list[float]]:
    """Seconds of the batches of every rank that owns any."""
    owned = defaultdict(list)
    for m in scenario.plan.matrices:
        owned[scenario.plan.owners[m.name]].append(m)
    return [batches(scenario, stored_shapes(matrices)) for matrices in owned.values()]


def _adamw(rank: _Rank, elements: Sequence[float]) -> None:
    rank.compute(sum(elements) / rank.machine.adamw_elements_per_s)


def _exchange(scenario: Scenario, rank: _Rank, elements: NDArray[np.float64]) -> None:
    """Rounds: while one is orthogonalized, the next one is gathered and the last one scattered.

    Where Newton–Schulz is in half precision, gradients are folded into momentum before the first round and norms of
    whole matrices added up, so that parts travel as it takes them.

    Args:
        elements: by owner.
    """
    machine = scenario.machine
    parts, owned = float(elements.sum()) / scenario.topology.shard, float(elements.max())
    travel = rank.messages_for("parts") or rank.messages_for("copies")
    rounds = max(len(taken) for taken in _owned_batches(scenario)) if travel else 1
    part = 1 / rounds
    # The owner runs no passes over parts, which each rank does; it joins them, and lays out those of the update.
    passes = (UPDATE_BYTES - _JOINED * machine.ns_bytes) * owned / machine.copy_bytes_per_s if travel else 0.0
    seconds = max(0.0, newton_schulz_s("exchanged", scenario) - passes) * part
    rank.copy(parts * _FOLD_BYTES)
    if machine.ns_bytes < MASTER_BYTES:
        rank.wait(rank.send("norms", None, rank.now))
    # One round, and for each further one as long as its longest part takes, behind which the others are hidden.
    start = rank.now
    rank.copy(parts * part * (_READ_BYTES + 2 * machine.ns_bytes))
    rank.wait(rank.send("parts", None, rank.now, part))
    gathered = rank.now
    rank.compute(seconds)
    computed = rank.now
    scattered = rank.send("updates", None, rank.now, part)
    rank.wait(rank.send("copies", None, scattered, part))
    rank.copy(parts * part * (machine.ns_bytes + 2 * MASTER_BYTES))
    parts_of_round = (gathered - start, computed - gathered, rank.now - computed)
    rank.now += (rounds - 1) * (sum if machine.communication_computes else max)(parts_of_round)
