"""Models of `transformers` whose tensors are several matrices, trained on two ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.on_ranks import on_ranks
from harness.tiny_configs import TINY
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
FAMILIES = ["gpt2", "falcon#new", "gpt_oss", "deepseek_v3", "qwen3_next"]


def build(key: str) -> nn.Module:
    torch.manual_seed(0)
    fields: dict[str, Any] = {name: 2 if name in LAYERS else value for name, value in TINY[key].items()}
    if "layer_types" in fields:
        fields["layer_types"] = 2 * fields["layer_types"]
    config = transformers.AutoConfig.for_model(key.partition("#")[0], **fields)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def train(model: nn.Module, part: slice = slice(None)) -> None:
    """Three steps on this rank's part of each batch."""
    optimizer = dmuon.Muon(model, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(3, 60, (4, 16), generator=generator)[part]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()


def lay_out(model: nn.Module, residency: str, mesh: DeviceMesh) -> None:
    if residency == "dedicated":
        dmuon.dedicate_params(model, mesh, costs="flops")
        dmuon.fully_shard(model, mesh=mesh)
        return
    stacks = [m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.count(".") == 1]
    for block in (block for stack in stacks for block in stack):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.pitfall("P77", "P78")
@pytest.mark.parametrize("residency", ["dedicated", "exchanged"])
@pytest.mark.parametrize("key", FAMILIES)
@on_ranks(2)
def test_two_ranks_train_what_one_process_does(rank: int, world: int, key: str, residency: str) -> None:
    expected = build(key)
    train(expected)
    model = build(key)
    lay_out(model, residency, init_device_mesh("cpu", (world,)))
    train(model, slice(2 * rank, 2 * rank + 2))
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        weights: dict[str, Tensor] = dict(expected.state_dict())
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=3e-5, msg=lambda text, n=name: f"{n}: {text}")
