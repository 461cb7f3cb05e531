"""Values of a dedicated model's state dict go where torch takes DTensors, and into no file as if they were whole."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.assertions import assert_same_tensors
from harness.checkpoints import FULL_ON_RANK_0, start
from harness.on_ranks import on_ranks
from harness.toy import build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate

REFUSED = r"in a state dict of a dedicated model cannot be written to a file or pickled as it is, since each rank has "


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("layout", ["1d", "1d-two-lines"])
@on_ranks(2, timeout=60.0)
def test_shards_are_written_by_nobody_and_the_remedy_writes_the_whole(rank: int, world: int, layout: str) -> None:
    run = start(layout)
    expected = dict(build().state_dict())
    weights, moments = run.model.state_dict(), run.optimizer.state_dict()
    on_cpu = {name: value.cpu() for name, value in weights.items()}
    kept = {name: value.detach().clone() for name, value in weights.items()}
    half = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    for thing in (weights, on_cpu, kept, half, moments, {"model": weights}):
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.save(thing, io.BytesIO())
        copy.deepcopy(thing)
    with pytest.raises(RuntimeError, match=REFUSED):
        next(value for value in weights.values() if isinstance(value, DTensor)).storage()

    whole = get_model_state_dict(run.model, options=FULL_ON_RANK_0)
    state = get_optimizer_state_dict(run.model, run.optimizer, options=FULL_ON_RANK_0)
    if rank == 0:
        assert_same_tensors(saved(whole), expected)
        assert saved(state)["state"].keys() == state["state"].keys() != set()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@on_ranks(2, timeout=60.0)
def test_shards_compute_and_load_as_any_dtensor(rank: int, world: int) -> None:
    run = start("1d")
    expected = dict(build().state_dict())
    weights = copy.deepcopy(run.model.state_dict())
    assert_same_tensors({name: whole(value) for name, value in weights.items()}, expected)
    name, shard = next((name, value) for name, value in weights.items() if name.endswith("up.weight"))
    everywhere = shard.redistribute(placements=[Replicate()])
    assert torch.equal(everywhere.to_local(), expected[name])
    assert torch.equal(whole(shard * 2 + shard), expected[name] * 3)
    twin = shard.clone()
    twin.mul_(0.5).add_(shard)
    assert torch.equal(whole(twin), expected[name] * 1.5)
    twin.to_local().zero_()
    assert torch.equal(whole(twin), torch.zeros_like(expected[name])), "it shares its memory"

    other = start("1d", seed=3)
    other.model.load_state_dict(weights)
    assert_same_tensors({name: whole(value) for name, value in other.model.state_dict().items()}, expected)


@on_ranks(2, timeout=60.0)
def test_shards_are_staged_and_saved_while_training_goes_on(rank: int, world: int, tmp_path: Any) -> None:
    run = start("1d")
    future = dcp.async_save({"model": run.model.state_dict()}, checkpoint_id=tmp_path / "saved")
    future.result()
    other = start("1d", seed=3)
    found = {"model": other.model.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "saved")
    other.model.load_state_dict(found["model"])
    assert_same_tensors({n: whole(v) for n, v in other.model.state_dict().items()}, dict(build().state_dict()))
    dist.barrier()
