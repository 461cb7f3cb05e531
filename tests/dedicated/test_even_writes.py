"""Even shards that checkpointing writes into what `to_local()` of an owned parameter gives."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.dedicated_toy import dedicated
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.toy import batch
from torch import Tensor

import dmuon


def owned(model: nn.Module) -> dict[str, Tensor]:
    found = dmuon.owned_parameters(model)
    return {name: param for name, param in model.named_parameters() if param in found}


@on_ranks(2)
def test_written_even_shards_become_the_weights_without_gathering_objects(rank: int, world: int) -> None:
    model = dedicated()
    torch.manual_seed(7)
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("an object for each matrix")):
        expected = {}
        for name, param in owned(model).items():
            expected[name] = torch.randn(param.shape)
            param.to_local().copy_(expected[name].chunk(world)[rank])
        assert len(expected) == 9
    with dmuon.summon_full_params(model, writeback=False):
        for name, param in model.named_parameters():
            if name in expected:
                assert torch.equal(param, expected[name])


@on_ranks(2)
def test_an_even_shard_of_another_shape_is_refused_on_all_ranks(rank: int, world: int) -> None:
    model = dedicated()
    name, param = next(iter(owned(model).items()))
    shard = torch.zeros(param.shape).chunk(world)[rank]
    with pytest.raises(ValueError, match=f"{name}: some rank writes an even shard of another shape"):
        param.to_local().copy_(shard[1:] if rank else shard)
    param.to_local().copy_(shard)
    with dmuon.summon_full_params(model, writeback=False):
        assert not dict(model.named_parameters())[name].any()


@on_ranks(2)
def test_a_write_that_one_rank_cannot_make_is_refused_on_all_ranks(rank: int, world: int) -> None:
    """Weights that are kept are not gathered for a second forward, so that one rank can be inside one alone."""
    model = dedicated(reshard_after_forward=False)
    name, param = next(iter(owned(model).items()))
    shard = torch.zeros(param.shape).chunk(world)[rank]
    x, _ = batch(0)
    with torch.no_grad():
        model(x)

    def write(*_: object) -> None:
        param.to_local().copy_(shard)

    before = full_state(model)
    hook = model.get_submodule(name.rpartition(".")[0]).register_forward_hook(write)
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match=r"a write to to_local\(\) while block"):
        model(x) if rank else write()
    hook.remove()
    assert_equal_weights(full_state(model), before)
