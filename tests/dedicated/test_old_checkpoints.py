"""Checkpoints in ``tests/data/checkpoints``, of even shards as dmuon once saved them, hold what they held."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.assertions import assert_same_tensors
from harness.fused import FusedModel, fused
from harness.on_ranks import on_ranks
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

SAVED = Path(__file__).parent.parent / "data" / "checkpoints"


def value(name: str, shape: torch.Size) -> Tensor:
    """Whole numbers, each exact in any dtype, which tell one element from its neighbours."""
    return ((torch.arange(shape.numel()) * 7 + zlib.crc32(name.encode())) % 251 - 125).float().reshape(shape)


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """Of the model, and of the optimizer by names."""
    found = dict(state["model"])
    for name, values in state["optimizer"]["state"].items():
        found |= {f"{name}.{key}": tensor for key, tensor in values.items() if key != "step"}
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(SAVED / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


@pytest.mark.parametrize(("layout", "world"), [("shard-2", 2), pytest.param("tp", 4, marks=pytest.mark.slow)])
@on_ranks()
def test_old_checkpoints_load_bit_for_bit_and_are_saved_by_the_same_keys(
    rank: int, world: int, layout: str, tmp_path: Path
) -> None:
    """Of three topologies into others; what is saved then has the keys, shapes and values of what was loaded."""
    model, optimizer = fused(layout)
    for name in ("shard", "hsdp", "tp"):
        folder = unpacked(name, tmp_path / str(rank))
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=saved["optimizer"])
        weights, state = get_state_dict(model, optimizer)
        again = {"model": weights, "optimizer": state}
        found = flat(again)
        expected = {key: value(key, tensor.shape) for key, tensor in found.items()}
        assert_same_tensors({key: whole(tensor) for key, tensor in found.items()}, expected)
        dcp.save(again, checkpoint_id=tmp_path / f"again-{name}")
        old, new = (dcp.FileSystemReader(path).read_metadata() for path in (folder, tmp_path / f"again-{name}"))
        assert old.state_dict_metadata.keys() == new.state_dict_metadata.keys()
        for key, of_key in old.state_dict_metadata.items():
            assert getattr(of_key, "size", None) == getattr(new.state_dict_metadata[key], "size", None), key
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()


@pytest.mark.parametrize("name", ["shard", "hsdp", "tp"])
def test_old_checkpoints_load_in_one_process(tmp_path: Path, name: str) -> None:
    model = FusedModel()
    saved = {"model": dict(model.state_dict())}
    dcp.load(saved, checkpoint_id=unpacked(name, tmp_path))
    assert_same_tensors(saved["model"], {key: value(key, tensor.shape) for key, tensor in saved["model"].items()})
