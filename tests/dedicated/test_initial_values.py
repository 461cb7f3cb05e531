"""Dedication makes the first rank's values everyone's, in as few broadcasts as fit a bucket."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_same_tensors
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.toy import build
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.dedicated import initial_values


def network(seed: int) -> nn.Module:
    """With buffers of the dtypes, sizes and strides that may come."""
    model = build(seed=seed)
    torch.manual_seed(seed)
    model.register_buffer("flags", torch.rand(5) > 0.5)
    model.register_buffer("count", torch.randint(99, ()))
    model.register_buffer("nothing", torch.empty(0, 3))
    model.register_buffer("angles", torch.randn(3, 2, dtype=torch.complex64))
    model.register_buffer("turned", torch.randn(3, 5, dtype=torch.float64).T)
    model.register_buffer("short", torch.randn(7).to(torch.bfloat16))
    return model


@pytest.mark.pitfall("P79")
@pytest.mark.parametrize("nbytes", [2**28, 2000, 1], ids=["one bucket", "some buckets", "one tensor each"])
@on_ranks(2)
def test_all_ranks_begin_with_the_first_ranks_values(rank: int, world: int, nbytes: int) -> None:
    model, expected = network(seed=rank), dict(network(seed=0).state_dict())
    sizes: list[int] = []
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.nbytes)
        return broadcast(tensor, *args, **options)

    with mock.patch.object(initial_values, "BUCKET_BYTES", nbytes), mock.patch.object(dist, "broadcast", counted):
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    assert model.turned.stride() == (1, 5)
    assert_same_tensors(full_state(model), expected)
    first_use = [size for size in sizes if size <= 8]  # of process groups
    if nbytes == 2**28:
        assert len(sizes) - len(first_use) == 1
    else:
        largest = max(tensor.nbytes for tensor in expected.values())
        assert max(sizes) <= max(nbytes, largest + 16)
        assert len(sizes) > 2 * len(model.blocks)
