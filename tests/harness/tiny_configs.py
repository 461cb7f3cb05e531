"""Tiny configurations of models of ``transformers`` that fuse projections, one for each way to do so."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 64}
_FALCON: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
_MOE: dict[str, Any] = _BASE | {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"], "head_dim": 8,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4, "time_step_rank": 3
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 8
}  # fmt: skip

# By model type; what follows # tells several of one type apart.
TINY: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "openai-gpt": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_bigcode#heads": _GPT | {"multi_query": False},
    "gpt_neox": _BASE,
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64},
    "falcon": _FALCON,
    "falcon#new": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon#old": _FALCON | {"multi_query": False, "alibi": True},
    "persimmon": _BASE,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64, "max_seq_len": 64},
    "codegen": _GPT | {"rotary_dim": 4},
    "phi3": _BASE | {"pad_token_id": 0},
    "glm4": _BASE | {"head_dim": 8, "pad_token_id": 0},
    "modernbert": _BASE | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    "deberta": _BASE | {"type_vocab_size": 0},
    "gpt_oss": _MOE | {"layer_types": ["full_attention"]},
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
    "deepseek_v3": _MOE | _LATENT | {"head_dim": 4},
    "minicpm3": _BASE | _LATENT,
    "llama4_text": _MOE | {"intermediate_size_mlp": 48, "moe_layers": [0], "pad_token_id": 0},
    "qwen3_next": _MOE | _DELTA,
    "qwen3_next#full": _MOE | {"layer_types": ["full_attention"]},
    "qwen3_5_text": _BASE | _DELTA,
    "mamba": _MAMBA,
    "mamba2": _MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": _BASE | _MAMBA2 | {"attn_layer_indices": []},
    "falcon_h1": _BASE | _MAMBA2 | {"mamba_d_ssm": 64},
    "jetmoe": _MOE | {"kv_channels": 8, "activation_function": "silu"},
    "lfm2": _BASE | {"layer_types": ["conv"], "block_auto_adjust_ff_dim": False},
    "minimax": _MOE | {"layer_types": ["linear_attention"], "block_size": 8},
    "llama": _BASE,
    "bert": _BASE,
}
