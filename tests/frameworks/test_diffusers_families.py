"""What is known of the layouts of `diffusers`' models, against what their forwards take apart and keep apart."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.row_groups import row_groups
from harness.source_splits import Sites, disagreements

from dmuon.model.routing import route_parameters

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.pitfall("P91"), pytest.mark.filterwarnings("ignore")]

_DIT: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
# Classes that have no defaults, or hide what they can do behind them: more of them, by class.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "AutoencoderKLLTXVideo": [{"timestep_conditioning": True}],
    "EasyAnimateTransformer3DModel": [
        _DIT | {"num_layers": 1, "mmdit_layers": 1, "in_channels": 4, "out_channels": 4, "patch_size": 2}
    ],
    "HiDreamImageTransformer2DModel": [
        _DIT
        | {"patch_size": 2, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "caption_channels": [8, 8]}
        | {"llama_layers": [0, 0], "axes_dims_rope": (4, 4, 8), "text_emb_dim": 8},
    ],
    "HunyuanDiT2DModel": [{"patch_size": 2, "in_channels": 4, "hidden_size": 32, "sample_size": 8, "num_layers": 2}],
    "HunyuanVideoTransformer3DModel": [
        {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "image_condition_type": "token_replace"}
    ],
    "LatteTransformer3DModel": [
        _DIT | {"in_channels": 4, "sample_size": 8, "patch_size": 2, "num_layers": 1, "caption_channels": 8}
    ],
    "LuminaNextDiT2DModel": [{"hidden_size": 32, "num_attention_heads": 2, "num_kv_heads": 2, "num_layers": 2}],
    "OmniGenTransformer2DModel": [
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
        | {"num_layers": 2, "vocab_size": 16, "pad_token_id": 0}
        | {"rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}},
    ],
    "SD3Transformer2DModel": [{"num_layers": 2, "dual_attention_layers": (0,)}],
    "Transformer2DModel": [
        _DIT | {"in_channels": 32, "norm_num_groups": 8, "activation_fn": "geglu"},
        _DIT | {"in_channels": 4, "patch_size": 2, "sample_size": 8, "norm_type": "ada_norm_zero"}
        | {"num_embeds_ada_norm": 10},
    ],
    "UNet2DConditionModel": [{"resnet_time_scale_shift": "scale_shift"}],
    "UNet2DModel": [{"resnet_time_scale_shift": "scale_shift"}],
}  # fmt: skip
# What the reader of sources cannot follow: into functions, slices, names that are made as they are used. Read by hand.
BY_HAND: Sites = {
    ("Flux2FeedForward", "linear_in"): 2,  # Flux2SwiGLU slices
    ("Flux3FeedForward", "linear_in"): 2,
    ("Flux2ParallelSelfAttention", "to_qkv_mlp_proj"): 5,  # and slices the rest of its attention
    ("QwenImageTransformerBlock", "img_mod.1"): 6,  # in halves, and those by a method
    ("QwenImageTransformerBlock", "txt_mod.1"): 6,
    ("PRXAttention", "img_qkv_proj"): 3,
    ("PRXAttention", "txt_kv_proj"): 2,
    ("Modulation", "lin"): 6,  # PRX's
    ("MiniMaxH3AudioCausalAttention", "qkv"): 3,
    ("MiniMaxH3AdaLayerNormModulation", "linear"): 18,  # six of each modality
    ("SDCascadeTimestepBlock", "mapper_sca"): 2,
    ("SDCascadeTimestepBlock", "mapper_crp"): 2,
    ("SwiGLUExperts", "gate_up_proj"): 2,
    ("LTXVideoMidBlock3d", "time_embedder.timestep_embedder.linear_2"): 4,  # in its resnets
    ("LTXVideoUpBlock3d", "time_embedder.timestep_embedder.linear_2"): 4,
    # halves of what is rotated, or tokens: no projections
    ("MiniMaxH3VideoAttention", "to_q"): 1,
    ("MiniMaxH3VideoAttention", "to_k"): 1,
    ("HiDreamAttention", "to_q"): 1,
    ("HiDreamAttention", "to_k"): 1,
}
# What has no hidden matrix: one layer, or weights that are all normalized.
NOTHING = {
    "AutoencoderOobleck", "CLIPImageProjection", "Ideogram4PromptEnhancerHead", "LongCatAudioDiTVae",
    "MiniMaxMusic3ConditionEncoder", "StableAudio3DurationEmbedder",
}  # fmt: skip


def classes() -> dict[str, type]:
    found = {name: getattr(diffusers, name, None) for name in dir(diffusers)}
    base = diffusers.ModelMixin
    return {n: c for n, c in found.items() if isinstance(c, type) and issubclass(c, base) and c is not base}


def on_meta(cls: type, options: dict[str, Any]) -> Any:
    """With few layers; None for a class that needs options of its own."""
    few = {
        name: 2
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if isinstance(parameter.default, int) and parameter.default > 2 and ("_layers" in name or name == "depth")
    }
    for given in (few | options, options):
        try:
            with torch.device("meta"):
                return cls(**given)
        except (AttributeError, AssertionError, ImportError, IndexError, KeyError, TypeError, ValueError):
            continue
    return None


def test_what_a_forward_takes_apart_is_split_in_every_class_that_builds() -> None:
    wrong: list[Any] = []
    outcomes: Counter[str] = Counter()
    for name, cls in sorted(classes().items()):
        for options in ({}, *OPTIONS.get(name, ())):
            model = on_meta(cls, options)
            if model is None:
                assert not options, (name, options)
                continue
            if name in NOTHING:
                try:
                    assert not any(route.muon for route in route_parameters(model)), name
                except ValueError as error:
                    assert "no matrix was selected for Muon" in str(error)
                outcomes["nothing for Muon"] += 1
                continue
            splits, found = disagreements(model, BY_HAND)
            wrong += [(name, *fault) for fault in found]
            outcomes["split" if splits else "plain"] += 1
    print(dict(outcomes))
    assert not wrong, wrong
    assert outcomes["split"] > 70 and outcomes["plain"] > 50


B, L, E = 2, 7, 32
T = torch.randn
# A class, its options and what its forward takes.
RUNS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "FluxTransformer2DModel": (
        _DIT
        | {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": E}
        | {"pooled_projection_dim": E, "axes_dims_rope": [4, 4, 8]},
        lambda: {
            "hidden_states": T(B, 6, 4), "encoder_hidden_states": T(B, L, E), "pooled_projections": T(B, E),
            "timestep": torch.rand(B), "img_ids": torch.rand(6, 3), "txt_ids": torch.rand(L, 3),
        },
    ),
    "Flux2Transformer2DModel": (
        _DIT
        | {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": E}
        | {"axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 16, "guidance_embeds": False},
        lambda: {
            "hidden_states": T(B, 6, 4), "encoder_hidden_states": T(B, L, E), "timestep": torch.rand(B),
            "img_ids": torch.rand(6, 4), "txt_ids": torch.rand(L, 4),
        },
    ),
    "SD3Transformer2DModel": (
        _DIT
        | {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "joint_attention_dim": E}
        | {"caption_projection_dim": 32, "pooled_projection_dim": E, "pos_embed_max_size": 8},
        lambda: {
            "hidden_states": T(B, 4, 8, 8), "encoder_hidden_states": T(B, L, E), "pooled_projections": T(B, E),
            "timestep": torch.rand(B),
        },
    ),
    "QwenImageTransformer2DModel": (
        _DIT
        | {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "joint_attention_dim": E}
        | {"axes_dims_rope": (8, 4, 4)},
        lambda: {
            "hidden_states": T(B, 16, 16), "encoder_hidden_states": T(B, L, E), "timestep": torch.rand(B),
            "encoder_hidden_states_mask": torch.ones(B, L, dtype=torch.long), "img_shapes": [(1, 4, 4)] * B,
        },
    ),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "patch_size": 2, "context_in_dim": E, "hidden_size": 32, "num_heads": 2, "depth": 1}
        | {"axes_dim": [8, 8]},
        lambda: {
            "hidden_states": T(B, 4, 8, 8), "encoder_hidden_states": T(B, L, E), "timestep": torch.rand(B),
        },
    ),
}  # fmt: skip
FUSED_LATER = ("FluxTransformer2DModel", "SD3Transformer2DModel")


@pytest.mark.parametrize("name", [*RUNS, *(f"{name}#fused" for name in FUSED_LATER)])
def test_parts_are_what_a_forward_keeps_apart(name: str) -> None:
    """By numbers: also of attention whose projections were fused after it was built."""
    name, _, fused = name.partition("#")
    options, inputs = RUNS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**options).eval()
    if fused:
        model.fuse_qkv_projections()
    for param in model.parameters():
        if param.ndim > 1:
            nn.init.normal_(param, std=0.1)  # a forward that keeps nothing apart by chance
    routes = {route.fqn: route for route in route_parameters(model) if route.muon}
    params = {fqn: route.param for fqn, route in routes.items()}
    found = row_groups(model, inputs(), params, dict.fromkeys(params, 0))
    split = 0
    for fqn, route in routes.items():
        runs = route.spec.runs(route.param.shape[0])
        parts = sorted([row for start, stop in part for row in range(start, stop)] for part in runs)
        assert found[fqn] in ([], parts), (fqn, tuple(route.param.shape), route.spec)
        split += len(parts) > 1 and found[fqn] == parts
    assert split >= (3 if fused else 2)
