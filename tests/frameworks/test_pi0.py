"""π0, whose action expert reads keys and values of the vision-language model from a cache, trains as in one process."""

from __future__ import annotations

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.pitfall("P83")]

TEXT = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 64}
IMAGE_TOKEN, CHUNK, BATCH, STEPS = 60, 4, 4, 3


def build() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", "hidden_size": 32, "intermediate_size": 48, **TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
                "vision_use_head": False,
            },
            "projection_dim": 32,
            "image_token_id": IMAGE_TOKEN,
        },
        dit_config={"model_type": "gemma", "hidden_size": 16, "intermediate_size": 24, **TEXT},
        chunk_size=CHUNK,
        max_state_dim=4,
        max_action_dim=4,
    )
    return transformers.PI0ForConditionalGeneration(config)


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    image, text = torch.full((BATCH, 4), IMAGE_TOKEN), torch.randint(0, IMAGE_TOKEN, (BATCH, 3), generator=draw)
    return {
        "state": torch.randn(BATCH, 4, generator=draw),
        "noise": torch.randn(BATCH, CHUNK, 4, generator=draw),
        "timestep": torch.rand(BATCH, generator=draw),
        "actions": torch.randn(BATCH, CHUNK, 4, generator=draw),
        "input_ids": torch.cat([image, text], dim=1),
        "pixel_values": torch.randn(BATCH, 1, 3, 16, 16, generator=draw),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "attention_mask": torch.ones(BATCH, 7, dtype=torch.long),
    }


def train(model: nn.Module, rows: slice) -> list[float]:
    """The norms of all gradients, by which they are clipped."""
    optimizer = dmuon.Muon(model, lr=0.01, adamw_lr=1e-3)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**{name: value[rows] for name, value in batch(step).items()}).loss.backward()
        norms.append(float(dmuon.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms


@on_ranks(2)
def test_pi0_equals_one_process(rank: int, world: int) -> None:
    twin = build()
    expected = train(twin, slice(None))
    model = build()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops")
    dmuon.fully_shard(model, mesh=mesh)
    share = BATCH // world
    assert train(model, slice(rank * share, (rank + 1) * share)) == pytest.approx(expected, rel=1e-4)
    owned = {p.fqn for p in dmuon.owned_parameters(model)}
    assert any("vlm" in name for name in owned) and any("dit" in name for name in owned)
    with dmuon.summon_full_params(model, writeback=False):
        found = {n: p.detach() for n, p in model.named_parameters() if n in owned}
    assert_equal_weights(found, {n: p.detach() for n, p in twin.named_parameters() if n in owned}, 1e-4)
