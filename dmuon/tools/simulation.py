"""How long a training step takes, of a model on a grid of ranks: one recurrence over the blocks, for any program.

``dedicated``  as the dedicated residency runs it: one block is prefetched, two reductions are on their way.
``exchanged``  FSDP2; parts of momentum travel to one owner and those of its update back, in rounds.
``gather``     FSDP2; every rank gathers every momentum matrix, orthogonalizes all, and applies its own shard.
``adamw``      FSDP2 with AdamW on everything.

A rank has a clock for what it computes, and one for each stream of messages. Streams share the links: while the
latency of one message passes, a link carries what the others send. All ranks are taken to be as late as the latest. Not
modelled: activations on their way by tensor parallelism, experts that ranks divide, clipping, the allocator, and the
host, which runs ahead.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmuon.model.config import ModelConfig, expert_count, matrices_of
from dmuon.platform.options import is_integer
from dmuon.solver import CostTable, Matrix, Plan
from dmuon.tools.hardware import UPDATE_BYTES, Collective, Group, Hardware, Topology, travel

# -- what a model computes ------------------------------------------------------------------------------------------

_NORMS_PER_BLOCK = 2
_BACKWARD = 2  # products per forward product: one for the input's gradient, one for the weight's
PARAM_BYTES, REDUCE_BYTES = 2, 4  # of an element of a weight, and of a gradient, as they travel: bf16 and fp32


@dataclass(frozen=True, slots=True)
class Block:
    """One part of a model that computes and communicates together.

    Attributes:
        name: canonical name, as in the plan.
        flops: work of one rank's tokens in forward; backward is twice that.
        matrix_elements: elements of the matrices that Muon takes.
        other_elements: elements of everything else in it.
    """

    name: str
    flops: float
    matrix_elements: int
    other_elements: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of a model on one rank's tokens.

    Attributes:
        blocks: in the order of forward.
        ends: embedding, final norm and output head, which the root FSDP2 unit holds; their work runs between the
            blocks' forward and backward.
        tokens: per rank and step.
    """

    blocks: tuple[Block, ...]
    ends: Block
    tokens: int

    @classmethod
    def from_config(cls, path: str | Path, *, tokens: int, sequence: int) -> Workload:
        """The workload of a model's ``config.json``, of the model types that ``dmuon.model.config`` reads.

        Counted are matrix products, two operations per element and token, and causal attention, half of the full
        square. A token meets ``num_experts_per_tok`` of the routed experts. Backward is twice forward. A config without
        ``vocab_size`` has no embedding and no head here; every stack of a ``towers`` config sees all tokens. Left out
        are biases, and attention whose projections have names that no listed model type uses.

        Args:
            tokens: per rank and step, a multiple of ``sequence``.
            sequence: tokens that attend to one another.

        Raises:
            ValueError: as ``read_model``, a field that cannot be used, or a part of a sequence; with the remedy.
        """
        if tokens % sequence:
            raise ValueError(f"tokens={tokens} must be a multiple of sequence={sequence}; give whole sequences")
        config = ModelConfig.load(path)
        members: dict[str, list[Matrix]] = {}
        for matrix in matrices_of(config):
            members.setdefault(matrix.block, []).append(matrix)
        met = _experts_met(config) if any(is_expert(m) for owned in members.values() for m in owned) else 1.0
        blocks = []
        for name, owned in members.items():
            forward = 2.0 * tokens * sum(m.rows * m.cols * (met if is_expert(m) else 1.0) for m in owned)
            forward += tokens * sequence * _attention_width(owned)
            elements = sum(m.rows * m.cols for m in owned)
            others = _NORMS_PER_BLOCK * _hidden(config, owned)
            blocks.append(Block(name, forward, elements, others))
        ends = _ends(config, tokens, _hidden(config, members[blocks[-1].name]))
        return cls(tuple(blocks), ends, tokens)

    @property
    def flops(self) -> float:
        """Forward and backward of one rank's tokens."""
        return (1 + _BACKWARD) * sum(block.flops for block in (*self.blocks, self.ends))


def is_expert(matrix: Matrix) -> bool:
    """Whether a matrix is a routed expert."""
    return ".experts." in matrix.name


def _experts_met(config: ModelConfig) -> float:
    """The part of the routed experts that one token meets."""
    experts, name = expert_count(config), "num_experts_per_tok"
    chosen = config.data.get(name)
    config.check(name, is_integer(chosen, 1, experts), f"an integer from 1 to {experts}", chosen)
    return config.integer(name) / experts


def _attention_width(matrices: Iterable[Matrix]) -> int:
    """Width of all heads' keys and values together, which is what an ordered pair of tokens costs in operations.

    A pair takes ``2 · key width`` for its score and ``2 · value width`` for its value; half of the pairs are masked.
    """
    width = 0
    for m in matrices:
        if m.name.endswith(("self_attn.q_proj.weight", "self_attn.q_b_proj.weight", "attn.c_attn.q.weight")):
            width += m.rows
        elif m.name.endswith(("self_attn.o_proj.weight", "attn.c_proj.weight")):
            width += m.cols
    return width


def _hidden(config: ModelConfig, matrices: Iterable[Matrix]) -> int:
    """Width of the residual stream: what attention writes, or what the config says; 0 where neither tells."""
    for m in matrices:
        if m.name.endswith(("self_attn.o_proj.weight", "attn.c_proj.weight")):
            return m.rows
    width = config.data.get("hidden_size", config.data.get("n_embd", 0))
    return width if is_integer(width) else 0


def _ends(config: ModelConfig, tokens: int, hidden: int) -> Block:
    if config.data.get("vocab_size") is None:
        return Block("ends", 0.0, 0, 0)
    gpt2 = config.data["model_type"] == "gpt2"
    tied = config.flag("tie_word_embeddings", default=gpt2)  # the defaults of Hugging Face
    positions = config.integer("n_positions", 0, least=0) if gpt2 else 0
    table = config.integer("vocab_size") * hidden
    return Block("ends", 2.0 * tokens * table, 0, table * (1 if tied else 2) + positions * hidden + hidden)


# -- where and at what rate -----------------------------------------------------------------------------------------

MASTER_BYTES = 4  # of an element of masters, gradients and momentum: fp32
NS_BYTES = 2  # of an element as Newton–Schulz takes and leaves it, and as it is exchanged
# Of the peak. The steps that contention is fitted to reach 0.44 to 0.56 on A800; Llama 3 405B was trained at 0.38 to
# 0.43 on H100 (arXiv 2407.21783). Large matrix products alone reach 0.8: then steps come out short.
EFFICIENCY = 0.5
CONTENTION = 0.1  # ``python bench/simulate.py --fit`` finds it, and writes how each case comes out to bench/results
# Of an overhead: root mean square over published cases, each predicted by terms that are fitted to the others.
ERROR = 0.035
# Of Newton–Schulz, a factor: root mean square over published products from 2048 on (bench/simulate.py --products).
NS_ERROR = 1.3


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a step time depends on.

    Attributes:
        plan: owners, which the exchanged residency is taken to share, and what each takes for its matrices.
        costs: of a batch whose parts are not gathered first, as tensor parallelism makes owners do.
        kept: weights stay whole from forward to backward (``reshard_after_forward=False``).
        efficiency: part of the peak that forward and backward reach.
        contention: how much longer computation takes while a collective of owners is under way, as a part of the time
            of both, beyond what FSDP2's collectives do to it; the efficiency of forward and backward has those.
    """

    workload: Workload
    plan: Plan
    costs: CostTable
    hardware: Hardware
    topology: Topology
    kept: bool = False
    efficiency: float = EFFICIENCY
    contention: float = CONTENTION

    @property
    def flops_per_s(self) -> float:
        """Of the whole computation of a block, which tensor-parallel ranks divide."""
        return self.hardware.device.peak_flops * self.efficiency * self.topology.tp

    def batches(self, shapes: Mapping[tuple[int, int], int]) -> list[float]:
        """Seconds of the batches that so many matrices per stored shape make on one rank."""
        seconds: list[float] = []
        for (rows, cols), count in shapes.items():
            shape = min(rows, cols), max(rows, cols)
            whole, rest = divmod(count, self.costs.chunk(shape))
            sizes = [self.costs.chunk(shape)] * whole + [rest] * bool(rest)
            seconds += [1e-9 * self.costs.cost(shape, size) for size in sizes]
        return seconds


# -- messages -------------------------------------------------------------------------------------------------------

Program = Literal["dedicated", "exchanged", "gather", "adamw"]
Purpose = Literal[
    "weights",  # FSDP2 gathers them before a block computes
    "gradients",  # FSDP2 scatters them behind it
    "averages",  # of these over replicas
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
    table: list[Message] = []
    for i, block in enumerate((*workload.blocks, workload.ends)):
        elements = sharded(program, block, topology.tp)
        table.append(Message("weights", i, "shard", "all_gather", elements * PARAM_BYTES))
        table.append(Message("gradients", i, "shard", "reduce_scatter", elements * REDUCE_BYTES))
        table.append(Message("averages", i, "replicate", "all_reduce", elements / topology.shard * REDUCE_BYTES))
    grids = owned_elements(scenario)
    if program == "dedicated":
        for i, grid in enumerate(grids):
            owners, replicas = int(np.count_nonzero(grid.any(axis=0))), int(np.count_nonzero(grid, axis=0).max())
            row, column = float(grid.sum()), float(grid.sum(axis=0).max())
            table.append(Message("fill", i, "shard", "broadcast", row * PARAM_BYTES, owners))
            table.append(Message("reduce", i, "shard", "reduce", row * REDUCE_BYTES, owners))
            table.append(Message("replicas", i, "replicate", "reduce", column * REDUCE_BYTES, replicas))
            table.append(Message("publish", i, "replicate", "broadcast", column * PARAM_BYTES, replicas))
    elif program == "gather":
        for (rows, cols), count in stored_shapes(scenario).items():
            nbytes = rows * cols * count * MASTER_BYTES / topology.tp
            table.append(Message("momentum", None, "shard", "all_gather", nbytes, count))
    elif program == "exchanged":
        total, parts = grids.sum(axis=0), rings["replica"].size
        # An owner gets what others have of its matrices, and sends its parts of theirs, in its own replica.
        most = max(float(total.max()), float(total.sum(axis=1).max()) / parts) * NS_BYTES
        copied = float(total.sum()) / parts * NS_BYTES
        replicas = int(np.count_nonzero(total.any(axis=1)))
        table.append(Message("parts", None, "replica", "all_to_all", most))
        table.append(Message("updates", None, "replica", "all_to_all", most))
        table.append(Message("copies", None, "replicate", "broadcast", copied, replicas))
        table.append(Message("norms", None, "replica", "all_reduce", _NORM_BYTES * len(scenario.plan.matrices)))
    return [message for message in table if message.nbytes and rings[message.group].size > 1]


def sharded(program: Program, block: Block, tp: int) -> float:
    """Elements of what FSDP2 shards of a block, that a rank has while it computes."""
    return block.other_elements + (0 if program == "dedicated" else block.matrix_elements / tp)


def owned_elements(scenario: Scenario) -> NDArray[np.float64]:
    """Elements of one tensor-parallel rank by their owner, shape ``(blocks, replicate, shard)``."""
    topology = scenario.topology
    index = {block.name: i for i, block in enumerate(scenario.workload.blocks)}
    owned = np.zeros((len(index), topology.replicate, topology.shard))
    for m in scenario.plan.matrices:
        replica, shard = divmod(scenario.plan.owners[m.name] // topology.tp, topology.shard)
        owned[index[m.block], replica, shard] += m.rows * m.cols / topology.tp
    return owned


def stored_shapes(scenario: Scenario) -> Counter[tuple[int, int]]:
    """Matrices per shape as they are stored."""
    return Counter((m.rows, m.cols) for m in scenario.plan.matrices)


def held_bytes(program: Program, scenario: Scenario) -> float:
    """Weights, gradients, optimizer state and buffers of the rank that holds most.

    fp32 weight, gradient and one moment of a matrix, two of everything else, and whole weights in what travels: two of
    the largest block, or all that are kept. Dedicated owners hold what they own and stand in for, and two buffers of
    gradients, as docs/communication.md says. Who gathers everywhere holds the momentum of a shape.
    """
    topology, workload = scenario.topology, scenario.workload
    whole = [block.matrix_elements / topology.tp for block in workload.blocks]
    others = 16 * sum(b.other_elements for b in (*workload.blocks, workload.ends)) / topology.shard
    buffers = PARAM_BYTES * (sum(whole) if scenario.kept else 2 * max(whole))
    if program != "dedicated":
        together = [rows * cols * count / topology.tp for (rows, cols), count in stored_shapes(scenario).items()]
        gathered = MASTER_BYTES * max(together) if program == "gather" else 0.0
        return (16 if program == "adamw" else 12) * sum(whole) / topology.shard + others + buffers + gathered
    held = owned_elements(scenario).sum(axis=0)
    standins = 0.0 if scenario.kept or topology.replicate == 1 else PARAM_BYTES * float(held.sum(axis=0).max())
    return 12 * float(held.max()) + standins + others + buffers + REDUCE_BYTES * 2 * max(whole)


# -- the recurrence -------------------------------------------------------------------------------------------------

_MAX_REDUCTIONS = 2  # as in dmuon.dedicated.gradients
_OWNERS = ("broadcast", "reduce", "all_to_all")  # AdamW's step has no such collectives
_FOLD_BYTES = 3 * MASTER_BYTES  # of an element: its gradient and its momentum read, this written
_READ_BYTES = 2 * MASTER_BYTES  # both read again
_ADAMW_BYTES = 28  # of one: weight, gradient and two moments read, all but the gradient written, fp32
_JOINED = 4  # of each element: read and written when it has come, and before it goes back


class _Rank:
    """The clocks of a rank."""

    def __init__(self, program: Program, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0  # when everything that was computed so far has ended
        self._rings = scenario.topology.rings()
        self._streams: dict[Purpose, float] = defaultdict(float)
        self._links: dict[bool, float] = defaultdict(float)  # within a node, and between nodes
        self._arrived = 0.0  # the last of what contends and has started
        self.table: dict[tuple[Purpose, int | None], list[Message]] = defaultdict(list)
        for message in messages(program, scenario):
            self.table[message.purpose, message.block].append(message)

    def compute(self, seconds: float) -> None:
        hindered = min(seconds, max(0.0, self._arrived - self.now))
        self.now += seconds + self.scenario.contention * hindered

    def copy(self, nbytes: float) -> None:
        self.compute(nbytes / self.scenario.hardware.device.memory_bandwidth)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def send(self, purpose: Purpose, block: int | None, ready: float, part: float = 1.0) -> float:
        """Start messages as soon as they are ``ready`` and those before them are through; when they have arrived.

        Args:
            part: of their bytes.
        """
        arrived = ready
        for message in self.table[purpose, block]:
            ring = self._rings[message.group]
            latency, busy = travel(self.scenario.hardware, message.kind, ring, message.nbytes * part, message.calls)
            between = ring.nodes > 1
            self._links[between] = max(arrived, self._streams[purpose], self._links[between]) + busy
            arrived = self._streams[purpose] = self._links[between] + latency
            if message.kind in _OWNERS:
                self._arrived = max(self._arrived, arrived)
        return arrived


def step_s(program: Program, scenario: Scenario) -> float:
    """Seconds of a step in steady state, from one update to the next."""
    rank = _Rank(program, scenario)
    workload, topology = scenario.workload, scenario.topology
    blocks = (*workload.blocks, workload.ends)
    last = len(blocks) - 1  # the ends
    arriving: dict[int, float] = {}
    reductions: deque[float] = deque()
    scattered = averaged = 0.0
    travelled = PARAM_BYTES + REDUCE_BYTES
    bandwidth = scenario.hardware.device.memory_bandwidth
    owned = owned_elements(scenario)
    filled = [*owned.sum(axis=1).max(axis=1).tolist(), 0.0]

    def fetch(i: int, forward: bool = True) -> None:
        """Start what brings the weights of a block."""
        gathered = rank.send("weights", i, rank.now)
        published = rank.send("publish", i, 0.0) if forward else 0.0
        copied = filled[i] * (MASTER_BYTES + PARAM_BYTES) / bandwidth
        ready = published if scenario.kept else max(published, rank.now)
        arriving[i] = max(gathered, rank.send("fill", i, ready + copied))

    def unshard(i: int) -> None:
        rank.wait(arriving.pop(i))
        rank.copy(2 * PARAM_BYTES * sharded(program, blocks[i], topology.tp))

    def scatter(i: int) -> None:
        """Start what brings the gradients of a block to their ranks."""
        nonlocal scattered, averaged
        if program == "dedicated" and i < last:
            while len(reductions) >= _MAX_REDUCTIONS:
                rank.wait(reductions.popleft())
            rank.copy(travelled * blocks[i].matrix_elements / topology.tp)
            reductions.append(rank.send("replicas", i, rank.send("reduce", i, rank.now)))
        rank.wait(scattered)
        rank.copy(travelled * sharded(program, blocks[i], topology.tp))
        scattered = rank.send("gradients", i, rank.now)
        averaged = max(averaged, rank.send("averages", i, scattered))

    def adamw(elements: float) -> None:
        rank.copy(_ADAMW_BYTES * elements / topology.shard)

    if program != "adamw":
        adamw(sum(block.other_elements for block in blocks))
    fetch(last)
    unshard(last)
    fetch(0)
    for i in range(last):
        unshard(i)
        if i + 1 < last:
            fetch(i + 1)
        rank.compute(blocks[i].flops / scenario.flops_per_s)
    if not scenario.kept:
        fetch(last - 1, forward=False)
    rank.compute((1 + _BACKWARD) * workload.ends.flops / scenario.flops_per_s)
    for i in reversed(range(last)):
        if not scenario.kept:
            unshard(i)
            if i:
                fetch(i - 1, forward=False)
        rank.compute(_BACKWARD * blocks[i].flops / scenario.flops_per_s)
        scatter(i)
    scatter(last)
    rank.wait(max([scattered, averaged, *reductions]))
    if program == "adamw":
        adamw(sum(sharded(program, block, topology.tp) for block in blocks))
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
        return sum(scenario.batches(stored_shapes(scenario)))
    if program == "dedicated":
        return 1e-9 * max(scenario.plan.loads_ns)
    return max(sum(taken) for taken in _owned_batches(scenario))


def _owned_batches(scenario: Scenario) -> list[list[float]]:
    """Seconds of the batches of every rank that owns any."""
    owned: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for m in scenario.plan.matrices:
        owned[scenario.plan.owners[m.name]][m.rows, m.cols] += 1
    return [scenario.batches(shapes) for shapes in owned.values()]


def _exchange(scenario: Scenario, rank: _Rank, elements: NDArray[np.float64]) -> None:
    """Rounds: while one is orthogonalized, the next one is gathered and the last one scattered.

    Gradients are folded into momentum before the first round and norms of whole matrices added up, so that parts travel
    in half precision, as Newton–Schulz takes them.

    Args:
        elements: by owner.
    """
    parts, owned = float(elements.sum()) / scenario.topology.shard, float(elements.max())
    travels = bool(rank.table["parts", None] or rank.table["copies", None])
    rounds = max(len(taken) for taken in _owned_batches(scenario)) if travels else 1
    part = 1 / rounds
    # The owner runs no passes over parts, which each rank does; it joins them, and lays out those of the update.
    bandwidth = scenario.hardware.device.memory_bandwidth
    passes = (UPDATE_BYTES - _JOINED * NS_BYTES) * owned / bandwidth if travels else 0.0
    seconds = max(0.0, newton_schulz_s("exchanged", scenario) - passes) * part
    rank.copy(parts * _FOLD_BYTES)
    rank.wait(rank.send("norms", None, rank.now))
    # One round, and for each further one as long as its longest part takes, behind which the others are hidden.
    start = rank.now
    rank.copy(parts * part * (_READ_BYTES + 2 * NS_BYTES))
    rank.wait(rank.send("parts", None, rank.now, part))
    gathered = rank.now
    rank.compute(seconds)
    computed = rank.now
    scattered = rank.send("updates", None, rank.now, part)
    rank.wait(rank.send("copies", None, scattered, part))
    rank.copy(parts * part * (NS_BYTES + 2 * MASTER_BYTES))
    rank.now += (rounds - 1) * max(gathered - start, computed - gathered, rank.now - computed)
