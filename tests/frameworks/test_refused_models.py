"""Models of `transformers` that are refused as they are: the remedies of their messages, followed, train them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.hugging_face import OPTIONS, launched, weights_of
from harness.on_ranks import assert_same_over_ranks, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

import dmuon

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VOCAB, STEPS = 32, 2
ZAMBA: dict[str, dict[str, Any]] = {
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 32, "mamba_dt_rank": 4}
    | {"attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": {"mamba_ngroups": 1, "num_mem_blocks": 1, "hybrid_layer_ids": [2, 5], "adapter_rank": 4}
    | {"layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "use_mem_rope": False},
}


def zamba(kind: str) -> Any:
    """Layers of which some share an attention block."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_mamba_heads=2,
        mamba_d_state=4,
        mamba_expand=2,
        use_mamba_kernels=False,
        use_cache=False,
        **ZAMBA[kind],
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def train(model: Any, optimizer: dmuon.Muon, rank: int = 0, world: int = 1) -> None:
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))[rank::world]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def refused(model: nn.Module, mesh: Any) -> str:
    with pytest.raises(ValueError, match=r"is shared by blocks model\.layers\.2, model\.layers\.5, and so are") as told:
        dmuon.dedicate_params(model, mesh, costs="flops")
    return str(told.value)


def excluded(message: str) -> list[str]:
    """What the message says to write."""
    found = re.search(r"exclude=\['([^']+)'\]", message)
    assert found is not None, message
    return [found[1]]


def untied(model: Any) -> Any:
    layer = model.model.layers[5]
    (name,) = (n for n, _ in layer.named_children() if n.startswith("shared_transf"))
    setattr(layer, name, copy.deepcopy(getattr(layer, name)))
    return model


@pytest.mark.parametrize(("kind", "remedy"), [("zamba", "exclude"), ("zamba2", "blocks"), ("zamba2", "untie")])
@on_ranks(2, timeout=180.0)
def test_shared_layers_train_dedicated_by_each_remedy(rank: int, world: int, kind: str, remedy: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    message = refused(zamba(kind), mesh)
    make: Callable[[str], Any] = (lambda k: untied(zamba(k))) if remedy == "untie" else zamba
    routing = {"exclude": excluded(message)} if remedy == "exclude" else {}
    with launched(rank, 1):
        alone = make(kind)
        expected = dmuon.Muon(alone, **OPTIONS, **routing)
        train(alone, expected)
        model = make(kind)
        blocks = [model] if remedy == "blocks" else None
        dmuon.dedicate_params(model, mesh, costs="flops", blocks=blocks, **routing)
        optimizer = dmuon.Muon(model, **OPTIONS)
        taken = [sum(len(g["params"]) for g in o.param_groups if g["use_muon"]) for o in (optimizer, expected)]
        assert taken[0] == taken[1] > 10
        train(model, optimizer, rank, world)
        weights = weights_of(model)
        assert_equal_weights(weights, {n: v for n, v in alone.state_dict().items() if n in weights}, 1e-4)
        assert_same_over_ranks(weights)


def test_weights_that_are_all_normalized_train_without_their_parametrizations_or_by_adamw() -> None:
    config = transformers.AutoConfig.for_model(
        "encodec", num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=32, num_residual_layers=1,
        upsampling_ratios=[2, 2], num_lstm_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    with pytest.raises(ValueError, match=r"apart from those that are parametrized .* remove the parametrizations"):
        dmuon.Muon(model, **OPTIONS)
    sound = torch.randn(2, 1, 64)
    before = model.decoder(model.encoder(sound))
    for module in list(model.modules()):
        if is_parametrized(module, "weight"):
            remove_parametrizations(module, "weight")
    assert torch.allclose(model.decoder(model.encoder(sound)), before, atol=1e-5), "the same model"
    optimizer = dmuon.Muon(model, **OPTIONS)
    muon = [p for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]
    assert len(muon) > 10
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model.decoder(model.encoder(sound)) - sound).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] and optimizer.last_step.ns_matrices >= len(muon)
