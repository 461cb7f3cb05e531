"""What a step computes and moves, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.configs import LLAMA_8B, QWEN_MOE, SMALL_LLAMA, written

from dmuon.tools.simulation.scenario import Workload

MOE = QWEN_MOE | {
    "hidden_size": 8, "intermediate_size": 16, "moe_intermediate_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip


def workload(folder: Path, config: dict[str, Any], tokens: int = 6, sequence: int = 3, **options: Any) -> Workload:
    return Workload.from_config(written(folder, config), tokens=tokens, sequence=sequence, **options)


def test_llama_8b_has_its_published_size(tmp_path: Path) -> None:
    model = workload(tmp_path, LLAMA_8B, 8192, 8192)
    assert model.elements == 8_030_261_248  # of the published model


def test_block_by_hand(tmp_path: Path) -> None:
    block, _ = workload(tmp_path, SMALL_LLAMA).blocks
    matrices = 2 * 8 * 8 + 2 * 4 * 8 + 3 * 8 * 16  # q and o; k and v, one head of two; gate, up, down
    assert block.matrix_elements == matrices
    assert block.other_elements == 2 * 8
    # Two sequences of three tokens; scores and values of width 8 each, four operations a pair for both, half masked.
    assert block.forward_flops == 2 * 6 * matrices + 2 * (3 * 3) * 4 * 8 / 2
    assert block.backward_flops == 2 * block.forward_flops


def test_experts_and_their_tokens_by_hand(tmp_path: Path) -> None:
    (block,) = workload(tmp_path, MOE).blocks
    assert block.expert_elements == 8 * 3 * 4 * 8
    assert block.dispatch_bytes == 6 * 2 * 8 * 2  # six tokens to two experts each, of width 8 in two bytes
    assert workload(tmp_path, SMALL_LLAMA).blocks[0].expert_elements == 0


def test_a_token_meets_its_share_of_the_experts(tmp_path: Path) -> None:
    (block,) = workload(tmp_path, MOE).blocks
    attention, router, expert = 2 * 8 * 8 + 2 * 4 * 8, 8 * 8, 3 * 4 * 8
    assert block.matrix_elements == attention + router + 8 * expert
    assert block.forward_flops == pytest.approx(2 * 6 * (attention + router + 2 * expert) + 6 * 3 * 16)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (SMALL_LLAMA | {"vocab_size": 0}, {}, "field 'vocab_size' is .*set it to"),
        (SMALL_LLAMA | {"vocab_size": "many"}, {}, "field 'vocab_size' is .*set it to"),
        (SMALL_LLAMA | {"tie_word_embeddings": 1}, {}, "field 'tie_word_embeddings' is .*set it to"),
        *((MOE | {"num_experts_per_tok": chosen}, {}, "field 'num_experts_per_tok'") for chosen in (None, 0, 9, True)),
        (SMALL_LLAMA, {"tokens": 0}, "tokens=0 must be a whole number"),
        (SMALL_LLAMA, {"sequence": True}, "sequence=True must be a whole number"),
        (SMALL_LLAMA, {"tokens": 7}, "tokens=7 must be a multiple of sequence=3"),
    ],
)
def test_bad_fields_and_arguments_are_named(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        workload(tmp_path, config, **options)
