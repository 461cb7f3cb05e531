"""What one training step computes and moves, block by block, before anything is divided over ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dmuon.model.blocks import MatrixShape
from dmuon.model.config import ModelConfig, expert_count, matrices_of
from dmuon.platform.options import is_integer

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
