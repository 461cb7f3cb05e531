"""What is known of the layouts of `diffusers`' models, against what their forwards keep apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.row_groups import row_groups

from dmuon.model.routing import route_parameters

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.pitfall("P91"), pytest.mark.filterwarnings("ignore")]

_DIT: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}


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
