"""What a step computes and moves, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dmuon.simulation.workload import Block, Workload

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 16, "moe_intermediate_size": 4,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
TOWER = {
    "name": "vision", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "gated_mlp": False,
}  # fmt: skip


def workload(folder: Path, config: dict[str, Any], tokens: int = 6, sequence: int = 3, **options: Any) -> Workload:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return Workload.from_config(path, tokens=tokens, sequence=sequence, **options)


def test_llama_8b_has_its_published_size(tmp_path: Path) -> None:
    model = workload(tmp_path, LLAMA_8B, 8192, 8192)
    assert model.elements == 8_030_261_248  # of the published model


def test_block_by_hand(tmp_path: Path) -> None:
    block, _ = workload(tmp_path, SMALL).blocks
    matrices = 2 * 8 * 8 + 2 * 4 * 8 + 3 * 8 * 16  # q and o; k and v, one head of two; gate, up, down
    assert block.matrix_elements == matrices
    assert block.other_elements == 2 * 8
    # Two sequences of three tokens; scores and values of width 8 each, four operations a pair for both, half masked.
    assert block.forward_flops == 2 * 6 * matrices + 2 * (3 * 3) * 4 * 8 / 2
    assert block.backward_flops == 2 * block.forward_flops


def test_ends_by_hand(tmp_path: Path) -> None:
    ends = workload(tmp_path, SMALL).ends
    assert ends.other_elements == 2 * 10 * 8 + 8
    assert (ends.forward_flops, ends.backward_flops) == (2 * 6 * 10 * 8, 4 * 6 * 10 * 8)


def test_a_tied_head_adds_work_but_no_elements(tmp_path: Path) -> None:
    untied, tied = workload(tmp_path, SMALL), workload(tmp_path, SMALL | {"tie_word_embeddings": True})
    assert tied.ends.forward_flops == untied.ends.forward_flops
    assert untied.ends.other_elements - tied.ends.other_elements == 10 * 8


def test_recomputation_is_one_more_forward_of_the_blocks_only(tmp_path: Path) -> None:
    plain, again = workload(tmp_path, SMALL), workload(tmp_path, SMALL, recompute=True)
    assert again.flops - plain.flops == sum(block.forward_flops for block in plain.blocks)


def test_a_token_meets_its_share_of_the_experts(tmp_path: Path) -> None:
    (block,) = workload(tmp_path, MOE).blocks
    attention, router, expert = 2 * 8 * 8 + 2 * 4 * 8, 8 * 8, 3 * 4 * 8
    assert block.matrix_elements == attention + router + 8 * expert
    assert block.forward_flops == pytest.approx(2 * 6 * (attention + router + 2 * expert) + 6 * 3 * 16)


def test_towers_have_no_ends(tmp_path: Path) -> None:
    model = workload(tmp_path, {"model_type": "towers", "towers": [TOWER]})
    assert model.ends == Block("ends", 0.0, 0.0, 0, 0)
    assert model.blocks[0].matrix_elements == 4 * 8 * 8 + 2 * 8 * 16


def test_scaling_tokens_scales_work_only(tmp_path: Path) -> None:
    model = workload(tmp_path, SMALL)
    more = model.scaled(2.0)
    assert more.flops == pytest.approx(2 * model.flops)
    assert (more.elements, more.tokens) == (model.elements, 12)
    assert more.flops == pytest.approx(workload(tmp_path, SMALL, 12, 3).flops)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"field '{field}' is .*set it to"):
        workload(tmp_path, SMALL | change)


@pytest.mark.parametrize("chosen", [None, 0, 9, True])
def test_bad_experts_per_token_are_named(tmp_path: Path, chosen: object) -> None:
    with pytest.raises(ValueError, match=r"field 'num_experts_per_tok' is .* set it to an integer from 1 to 8"):
        workload(tmp_path, MOE | {"num_experts_per_tok": chosen})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0 must be a whole number"),
        ({"sequence": True}, "sequence=True must be a whole number"),
        ({"tokens": 7}, "tokens=7 must be a multiple of sequence=3"),
        ({"param_bytes": 0}, "param_bytes=0"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(tmp_path, SMALL, **options)


def test_bad_blocks_are_named() -> None:
    ends = Block("ends", 0.0, 0.0, 0, 0)
    with pytest.raises(ValueError, match="block 'a': forward_flops is nan"):
        Block("a", float("nan"), 0.0, 0, 0)
    with pytest.raises(ValueError, match="'a' is there twice"):
        Workload((Block("a", 1.0, 2.0, 1, 0),) * 2, ends, 1)
    with pytest.raises(ValueError, match="there is none"):
        Workload((), ends, 1)
