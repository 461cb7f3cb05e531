"""Configurations of models, as Hugging Face's ``config.json`` has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_LLAMA = LLAMA_8B | {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10,
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
}  # fmt: skip
TOWER = {
    "name": "vision", "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "gated_mlp": False,
}  # fmt: skip


def towers(*of: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "towers", "towers": list(of)}


def written(folder: Path, config: object) -> Path:
    """The ``config.json`` of ``folder`` that now holds ``config``."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path
