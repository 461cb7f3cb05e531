"""What a step time depends on: a model's work, who owns what at what cost, a grid of ranks, and their rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dmuon.model.blocks import MatrixShape
from dmuon.model.config import ModelConfig, expert_count, matrices_of
from dmuon.platform.options import is_integer
from dmuon.solver import CostTable, Plan
from dmuon.tools.simulation.hardware import Hardware, Topology

# -- what a model computes ------------------------------------------------------------------------------------------

_NORMS_PER_BLOCK = 2
_BACKWARD = 2  # products per forward product: one for the input's gradient, one for the weight's


@dataclass(frozen=True, slots=True)
class Block:
    """One part of a model that computes and communicates together.

    Attributes:
        name: canonical name, as in the plan.
        forward_flops, backward_flops: work of one rank's tokens.
        matrix_elements: elements of the matrices that Muon takes.
        other_elements: elements of everything else in it.
    """

    name: str
    forward_flops: float
    backward_flops: float
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
        param_bytes: per element of a weight as it travels.
        reduce_bytes: per element of a gradient as it travels.
    """

    blocks: tuple[Block, ...]
    ends: Block
    tokens: int
    param_bytes: int = 2
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
        members: dict[str, list[MatrixShape]] = {}
        for matrix in matrices_of(config):
            members.setdefault(matrix.block, []).append(matrix)
        met = _experts_met(config) if any(_is_expert(m) for owned in members.values() for m in owned) else 1.0
        blocks = []
        for name, owned in members.items():
            forward = 2.0 * tokens * sum(m.rows * m.cols * (met if _is_expert(m) else 1.0) for m in owned)
            forward += tokens * sequence * _attention_width(owned)
            elements = sum(m.rows * m.cols for m in owned)
            others = _NORMS_PER_BLOCK * _hidden(config, owned)
            blocks.append(Block(name, forward, forward * (_BACKWARD + recompute), elements, others))
        ends = _ends(config, tokens, _hidden(config, members[blocks[-1].name]))
        return cls(tuple(blocks), ends, tokens)

    @property
    def flops(self) -> float:
        """Forward and backward of one rank's tokens."""
        return sum(b.forward_flops + b.backward_flops for b in (*self.blocks, self.ends))


def _is_expert(matrix: MatrixShape) -> bool:
    """Whether a matrix is a routed expert."""
    return ".experts." in matrix.name


def _experts_met(config: ModelConfig) -> float:
    """The part of the routed experts that one token meets."""
    experts, name = expert_count(config), "num_experts_per_tok"
    chosen = config.data.get(name)
    config.check(name, is_integer(chosen, 1, experts), f"an integer from 1 to {experts}", chosen)
    return config.integer(name) / experts


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
NS_BYTES = 2  # of an element as Newton–Schulz takes and leaves it, and as it is exchanged
# Of the peak. The steps that contention is fitted to reach 0.44 to 0.56 on A800; Llama 3 405B was trained at 0.38 to
# 0.43 on H100 (arXiv 2407.21783). Large matrix products alone reach 0.8: then steps come out short.
EFFICIENCY = 0.5
CONTENTION = 0.1  # ``python bench/simulate.py --fit`` finds it, and writes how each case comes out to bench/results


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

    Raises:
        ValueError: an efficiency outside (0, 1].
    """

    workload: Workload
    plan: Plan
    costs: CostTable
    hardware: Hardware
    topology: Topology
    kept: bool = False
    efficiency: float = EFFICIENCY
    contention: float = CONTENTION

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency={self.efficiency!r} must be above 0 and at most 1; give the part of the peak")

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
