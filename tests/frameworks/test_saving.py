"""Hugging Face's ways to save, of a dedicated model: each refuses with the line that works, or writes all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness.assertions import assert_same_tensors
from harness.hugging_face import build, launched, shared_folder
from harness.on_ranks import on_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import dmuon

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REFUSED = r"in a state dict of a dedicated model cannot be written .* get_model_state_dict\(model, options=StateDictO"
# Of what FSDP2 shards, when that comes first: safetensors' own words, as without dmuon.
OF_SHARDS = rf"{REFUSED}|data pointer on an invalid python storage"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def dedicated(world: int, *, sharded: bool) -> Any:
    model = build()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops")
    if sharded:
        dmuon.fully_shard(model, mesh=mesh)
    return model


def ways(model: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """That take a state dict of shards on every rank."""
    import safetensors.torch

    weights = model.state_dict()
    return {
        "save_pretrained": lambda: model.save_pretrained(folder),
        "several files": lambda: model.save_pretrained(folder, max_shard_size="1KB"),
        "save_file": lambda: safetensors.torch.save_file(weights, folder / "file.safetensors"),
        "save": lambda: safetensors.torch.save(weights),
        "save_model": lambda: safetensors.torch.save_model(model, str(folder / "model.safetensors")),
    }


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2, timeout=180.0)
def test_model_is_saved_whole_or_not_at_all(rank: int, world: int, sharded: bool) -> None:
    expected = dict(build().state_dict())
    with shared_folder() as folder, launched(rank, 1):
        model = dedicated(world, sharded=sharded)
        own = folder / str(rank)  # ranks that write the same file would hide what each does
        own.mkdir()
        for way in ways(model, own).values():
            with pytest.raises(RuntimeError, match=OF_SHARDS if sharded else REFUSED):
                way()
        left = sorted(path.name for path in own.iterdir())
        assert not any(name == "model.safetensors" or name.endswith(".index.json") for name in left), left
        whole = get_model_state_dict(model, options=WHOLE)
        model.save_pretrained(folder / "whole", state_dict=whole)
        dist.barrier()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole")
        assert_same_tensors(dict(loaded.state_dict()), expected)
