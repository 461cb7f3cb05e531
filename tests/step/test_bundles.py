"""Batches of whose matrices a rank has small parts that are alike are folded and applied by one operation."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from harness.assertions import assert_same_tensors
from harness.clipping import operations
from harness.dtensors import give, local_tensor, noise, parameter
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import dmuon
from dmuon.solver import CostTable
from dmuon.step import batches

SHAPES = [(8, 6)] * 8 + [(6, 8)] * 6 + [(5, 7)] * 6
ONE_BY_ONE = CostTable({(6, 8): {1: 1000}, (5, 7): {1: 1000}})


def train(mesh: DeviceMesh, most: int) -> tuple[dict[str, Tensor], Counter[str], list[int]]:
    """Weights, momentum, what the last step computed, and how many batches each bundle has.

    Args:
        most: elements of a small part.
    """
    with mock.patch.object(batches, "_SMALL_PART", most):
        params = [parameter(noise(i, *shape), mesh, [Shard(0)]) for i, shape in enumerate(SHAPES)]
        optimizer = dmuon.Muon(
            [{"params": params, "use_muon": True}],
            distributed_config=dmuon.create_dtensor_config(costs=ONE_BY_ONE),
            **OPTIONS,
        )
        for step in range(3):
            for i, param in enumerate(params):
                give(param, noise(100 * step + i, *param.shape))
            with operations() as names:
                optimizer.step()
    found = {f"weight {i}": local_tensor(param) for i, param in enumerate(params)}
    found |= {f"momentum {i}": local_tensor(optimizer.state[p]["momentum_buffer"]) for i, p in enumerate(params)}
    bundles = [bundle for round_ in optimizer._rounds for bundle in getattr(round_, "bundles", ())]
    return found, Counter(names), [len(bundle.numbers) for bundle in bundles if len(bundle.numbers) > 1]


@pytest.mark.pitfall("P79")
@on_ranks(3)
def test_bundles_change_no_bit_and_compute_less_often(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    bundled, few, members = train(mesh, 2**16)
    apart, many, none = train(mesh, 0)
    assert_same_tensors(bundled, apart)
    assert sum(members) > len(SHAPES) / 2 and not none, "each matrix is a batch of its own"
    saved = sum(members) - len(members)
    assert saved >= 8
    assert many["_foreach_mul_"] - few["_foreach_mul_"] == saved
    assert many["lerp_"] - few["lerp_"] == 2 * saved
