"""A transformers model on the meta device: initialized by its own function, and filled from safetensors files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytest.importorskip("safetensors", reason="safetensors is not installed (the extra 'frameworks')")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import transformers
from harness.assertions import assert_same_tensors
from harness.network import full_state
from harness.on_ranks import on_ranks
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import dmuon


def on_meta() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=31, max_position_embeddings=32,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def alone(seed: int) -> transformers.PreTrainedModel:
    model = on_meta().to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                model._init_weights(module)
    return model


def loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(20).view(2, 10) % 31
    found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


@pytest.mark.slow
@pytest.mark.pitfall("P78", "P79")
@on_ranks(2)
def test_its_own_function_initializes_it_and_safetensors_files_go_to_owners(
    rank: int, world: int, tmp_path: Path
) -> None:
    if rank == 0:
        alone(5).save_pretrained(tmp_path, max_shard_size="4KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    dist.barrier()
    expected = alone(3)
    model = on_meta()
    torch.manual_seed(3 + rank)
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops", initialize=model._init_weights)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert_same_tensors(full_state(model), dict(expected.state_dict()))
    assert torch.equal(loss(model), loss(expected)), "buffers that no state dict has, too"
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    set_model_state_dict(model, state)
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_tensors(full_state(model), dict(expected.state_dict()))
    assert torch.equal(loss(model), loss(expected))
