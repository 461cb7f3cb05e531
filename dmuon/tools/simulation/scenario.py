"""What a step time depends on: a model's work, who owns what at what cost, a grid of ranks, and their rates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dmuon.model.blocks import MatrixShape
from dmuon.model.config import ModelConfig, expert_count, matrices_of
from dmuon.platform.options import is_integer
from dmuon.solver import CostTable, Matrix, Plan, Rank, SolveOptions, plan
from dmuon.tools.simulation.hardware import Hardware, Network, Topology

# -- what a model computes ------------------------------------------------------------------------------------------

_NORMS_PER_BLOCK = 2
_NUMBERED = re.compile(r"\.experts\.(?:(?P<number>\d+)\.|.*\[(?P<matrix>\d+)\]$)")
_PARAM_BYTES = 2
_BACKWARD = 2  # products per forward product: one for the input's gradient, one for the weight's


@dataclass(frozen=True, slots=True)
class Block:
    """One part of a model that computes and communicates together.

    Attributes:
        name: canonical name, as in the plan.
        forward_flops, backward_flops: work of one rank's tokens.
        matrix_elements: elements of the matrices that Muon takes.
        other_elements: elements of everything else in it.
        expert_elements: those of the matrices that are routed experts.
        dispatch_bytes: of one rank's tokens on their way to their experts; as many come back.
    """

    name: str
    forward_flops: float
    backward_flops: float
    matrix_elements: int
    other_elements: int
    expert_elements: int = 0
    dispatch_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of a model on one rank's tokens.

    Attributes:
        blocks: in the order of forward.
        ends: embedding, final norm and output head, which the root FSDP2 unit holds; their work runs between the
            blocks' forward and backward.
        tokens: per rank and step.
        param_bytes: per element of a weight as it travels.
        reduce_bytes: per element of a gradient as it travels.
    """

    blocks: tuple[Block, ...]
    ends: Block
    tokens: int
    param_bytes: int = _PARAM_BYTES
    reduce_bytes: int = 4

    @classmethod
    def from_config(cls, path: str | Path, *, tokens: int, sequence: int, recompute: bool = False) -> Workload:
        """The workload of a model's ``config.json``, of the model types that ``dmuon.model.config`` reads.

        Counted are matrix products, two operations per element and token, and causal attention, half of the full
        square. A token meets ``num_experts_per_tok`` of the routed experts. Backward is twice forward, and three
        times with ``recompute``; the head is never recomputed. A config without ``vocab_size`` has no embedding and
        no head here; every stack of a ``towers`` config sees all tokens. Left out are biases, and attention whose
        projections have names that no listed model type uses.

        Args:
            tokens: per rank and step, a multiple of ``sequence``.
            sequence: tokens that attend to one another.
            recompute: activation checkpointing of whole blocks.

        Raises:
            ValueError: as ``read_model``, or a field or argument that cannot be used, with the remedy.
        """
        for name, count in (("tokens", tokens), ("sequence", sequence)):
            if not is_integer(count, 1):
                raise ValueError(f"{name}={count!r} must be a whole number of at least 1")
        if tokens % sequence:
            raise ValueError(f"tokens={tokens} must be a multiple of sequence={sequence}; give whole sequences")
        config = ModelConfig.load(path)
        matrices = matrices_of(config)
        chosen, experts = _experts(config, matrices)
        members: dict[str, list[MatrixShape]] = {}
        for matrix in matrices:
            members.setdefault(matrix.block, []).append(matrix)
        blocks = []
        for name, owned in members.items():
            active = chosen / experts
            forward = 2.0 * tokens * sum(m.rows * m.cols * (active if is_expert(m.name) else 1.0) for m in owned)
            forward += tokens * sequence * _attention_width(owned)
            hidden = _hidden(config, owned)
            routed = sum(m.rows * m.cols for m in owned if is_expert(m.name))
            blocks.append(
                Block(
                    name,
                    forward,
                    forward * (_BACKWARD + recompute),
                    sum(m.rows * m.cols for m in owned),
                    _NORMS_PER_BLOCK * hidden,
                    routed,
                    float(tokens * chosen * hidden * _PARAM_BYTES) if routed else 0.0,
                )
            )
        ends = _ends(config, tokens, _hidden(config, members[blocks[-1].name]))
        return cls(tuple(blocks), ends, tokens)

    @property
    def flops(self) -> float:
        """Forward and backward of one rank's tokens."""
        return sum(b.forward_flops + b.backward_flops for b in (*self.blocks, self.ends))

    @property
    def elements(self) -> int:
        """Parameters of the model."""
        return sum(b.matrix_elements + b.other_elements for b in (*self.blocks, self.ends))


def is_expert(name: str) -> bool:
    """Whether a matrix of this name is a routed expert."""
    return ".experts." in name


def expert_number(name: str) -> int | None:
    """The number in the name of an expert, of the matrix in its stack or of the module; None for what is no expert."""
    found = _NUMBERED.search(name)
    return int(found["number"] or found["matrix"]) if found else None


def _experts(config: ModelConfig, matrices: Iterable[MatrixShape]) -> tuple[int, int]:
    """How many of the routed experts one token meets, and how many there are; ``(1, 1)`` without experts."""
    if not any(is_expert(m.name) for m in matrices):
        return 1, 1
    experts = expert_count(config)
    name = "num_experts_per_tok"
    chosen = config.data.get(name)
    config.check(name, is_integer(chosen, 1, experts), f"an integer from 1 to {experts}", chosen)
    return config.integer(name), experts


def _attention_width(matrices: Iterable[MatrixShape]) -> int:
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


def _hidden(config: ModelConfig, matrices: Iterable[MatrixShape]) -> int:
    """Width of the residual stream: what attention writes, or what the config says; 0 where neither tells."""
    for m in matrices:
        if m.name.endswith(("self_attn.o_proj.weight", "attn.c_proj.weight")):
            return m.rows
    width = config.data.get("hidden_size", config.data.get("n_embd", 0))
    return width if is_integer(width) else 0


def _ends(config: ModelConfig, tokens: int, hidden: int) -> Block:
    if config.data.get("vocab_size") is None:
        return Block("ends", 0.0, 0.0, 0, 0)
    gpt2 = config.data["model_type"] == "gpt2"
    tied = config.flag("tie_word_embeddings", default=gpt2)  # the defaults of Hugging Face
    positions = config.integer("n_positions", 0, least=0) if gpt2 else 0
    table = config.integer("vocab_size") * hidden
    forward = 2.0 * tokens * table
    return Block("ends", forward, _BACKWARD * forward, 0, table * (1 if tied else 2) + positions * hidden + hidden)


# -- where and at what rate -----------------------------------------------------------------------------------------

MASTER_BYTES = 4  # of an element of masters, gradients and momentum: fp32
_HALF_BYTES = 2
# Of the peak. The steps that contention is fitted to reach 0.44 to 0.56 on A800; Llama 3 405B was trained at 0.38 to
# 0.43 on H100 (arXiv 2407.21783).
_EFFICIENCY = 0.5
_ADAMW_BYTES = 28  # per element: weight, gradient and two moments read, all but the gradient written, fp32
_CONTENTION = 0.15  # ``python bench/simulate.py --fit`` finds it, and writes how each case comes out to bench/results


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one rank.

    Attributes:
        flops_per_s: of forward and backward.
        copy_bytes_per_s: bytes read and written together.
        adamw_elements_per_s: elements that AdamW updates.
        network: how long collectives take.
        ns_bytes: of an element as Newton–Schulz takes and leaves it, and as it is exchanged.
        ns_scale: factor on every cost of Newton–Schulz.
        communication_computes: communication takes the compute stream, as on CPU ranks with one core each.
        contention: how much longer computation takes while a collective of owners is under way, as a part of the time
            of both, beyond what FSDP2's collectives do to it; the efficiency of forward and backward has those.
    """

    flops_per_s: float
    copy_bytes_per_s: float
    adamw_elements_per_s: float
    network: Network
    ns_bytes: int = MASTER_BYTES
    ns_scale: float = 1.0
    communication_computes: bool = False
    contention: float = 0.0

    @classmethod
    def from_hardware(cls, hardware: Hardware, efficiency: float | None = None) -> Machine:
        """Rates of a preset, whose Newton–Schulz is in half precision, with the fitted contention.

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
            Network(hardware.intra, hardware.inter),
            ns_bytes=_HALF_BYTES,
            contention=_CONTENTION,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a step time depends on.

    Attributes:
        plan: owners, which the exchanged residency is taken to share, and what each takes for its matrices.
        costs: of a batch whose parts are not gathered first, as tensor parallelism makes owners do.
        kept: weights stay whole from forward to backward (``reshard_after_forward=False``).
        speed: of the slowest rank, which all others wait for in forward and backward.

    Raises:
        ValueError: plan, costs, workload and topology that do not belong together.
    """

    workload: Workload
    plan: Plan
    costs: CostTable
    machine: Machine
    topology: Topology
    kept: bool = False
    speed: float = 1.0

    @property
    def flops_per_s(self) -> float:
        """Of the whole computation of a block, which tensor-parallel ranks divide."""
        return self.machine.flops_per_s * self.topology.tp * self.speed

    def __post_init__(self) -> None:
        if self.plan.world != self.topology.world:
            raise ValueError(f"plan is for {self.plan.world} ranks, topology for {self.topology.world}; plan again")
        elements: Counter[str] = Counter()
        for m in self.plan.matrices:
            elements[m.block] += m.rows * m.cols
            self.costs.cost(m.shape, 1)
        blocks = Counter({b.name: b.matrix_elements for b in self.workload.blocks})
        for name in sorted(set(blocks) | set(elements)):
            if blocks[name] != elements[name]:
                raise ValueError(
                    f"block {name!r} has {blocks[name]} matrix elements in the workload and {elements[name]} in the "
                    "plan; make both from one model"
                )

    def merged(self, count: int) -> Scenario:
        """The scenario with each ``count`` neighbouring blocks as one."""
        blocks = self.workload.blocks
        groups = [blocks[i : i + count] for i in range(0, len(blocks), count)]
        names = {block.name: group[0].name for group in groups for block in group}
        sums = [
            Block(group[0].name, *(sum(getattr(block, f.name) for block in group) for f in fields(Block)[1:]))
            for group in groups
        ]
        matrices = tuple(replace(m, block=names[m.block]) for m in self.plan.matrices)
        return replace(
            self,
            workload=replace(self.workload, blocks=tuple(sums)),
            plan=replace(self.plan, matrices=matrices),
        )


def batches(scenario: Scenario, shapes: Mapping[tuple[int, int], int]) -> list[float]:
    """Seconds of the batches that so many matrices per stored shape make on one rank."""
    costs, scale = scenario.costs, 1e-9 * scenario.machine.ns_scale
    seconds: list[float] = []
    for (rows, cols), count in shapes.items():
        shape = min(rows, cols), max(rows, cols)
        whole, rest = divmod(count, costs.chunk(shape))
        seconds += [costs.cost(shape, costs.chunk(shape)) * scale] * whole
        seconds += [costs.cost(shape, rest) * scale] * bool(rest)
    return seconds


def stored_shapes(matrices: Iterable[Matrix]) -> Counter[tuple[int, int]]:
    """Matrices per shape as they are stored."""
    return Counter((m.rows, m.cols) for m in matrices)


def plan_owners(
    matrices: Sequence[Matrix], ranks: Sequence[Rank], costs: CostTable, options: SolveOptions, topology: Topology
) -> Plan:
    """Plan as a model is dedicated: what all ranks share, and each part of the experts over the ranks that hold it.

    Raises:
        ValueError: as the solver.
    """
    if topology.ep == 1:
        return plan(matrices, ranks, costs, options)
    counts: Counter[tuple[str, str]] = Counter()  # of a block's gate_up projections there are twice as many as experts
    numbers = {m.name: expert_number(m.name) for m in matrices}

    def stack(m: Matrix) -> tuple[str, str]:
        return m.block, m.name.partition("[")[0] if m.name.endswith("]") else ""

    for m in matrices:
        counts[stack(m)] = max(counts[stack(m)], (numbers[m.name] or 0) + 1)
    pools: dict[str, list[Matrix]] = {}
    for m in sorted(matrices, key=lambda m: m.name):
        number = numbers[m.name]
        pool = "" if number is None else f"experts {number * topology.ep // counts[stack(m)]}"
        pools.setdefault(pool, []).append(replace(m, pool=pool))
    owners: dict[str, int] = {}
    loads, bounds = [0] * len(ranks), []
    known: dict[object, Plan] = {}
    for pool, members in pools.items():
        part = None if pool == "" else int(pool.split()[1])
        able = [rank for rank in ranks if part in (None, topology.coordinate(rank.index)[1] % topology.ep)]
        alone = [replace(rank, index=i) for i, rank in enumerate(able)]
        # By position: names of alike pools differ in their numbers only, and these share a plan.
        free = [replace(m, name=f"{i:06}", pool="") for i, m in enumerate(members)]
        key = (tuple(free), *((rank.speed, rank.memory) for rank in alone))
        solved = known.get(key) or plan(free, alone, costs, options)
        known[key] = solved
        owners |= {m.name: able[solved.owners[f"{i:06}"]].index for i, m in enumerate(members)}
        for rank, load in zip(able, solved.loads_ns, strict=True):
            loads[rank.index] += load
        bounds.append(solved.bound_ns)
    ordered = tuple(sorted((m for members in pools.values() for m in members), key=lambda m: m.name))
    return Plan(
        owners={m.name: owners[m.name] for m in ordered},
        matrices=ordered,
        loads_ns=tuple(loads),
        bound_ns=max(bounds),
        stage="+".join(sorted({solved.stage for solved in known.values()})),
        reason=f"{len(pools)} pools, each planned over its own ranks",
        estimated=tuple(shape for shape in costs.estimated if shape in {m.shape for m in ordered}),
    )
