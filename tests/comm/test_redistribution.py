"""What generated functions gather is the whole tensor, and what they redistribute comes back as it was."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.dtensors import noise
from harness.on_ranks import on_ranks
from harness.pieces import numbered, part_of
from harness.pool import RankPool
from harness.toy import OPTIONS
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dmuon
from dmuon import create_dtensor_config
from dmuon.comm import domain as exchange
from dmuon.layout.shards import layout_of
from dmuon.solver import CostTable

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2), (2, 1)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (4, 1), (1, 2, 2)],
}

Case = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, int, int], ...], str, int]


@st.composite
def cases(draw: Any, world: int) -> Case:
    """Mesh, shape, placements (kind, dim, split factor), dtype, and the owner."""
    sizes = draw(st.sampled_from(MESHES[world]))
    shape = draw(st.tuples(*[st.integers(1, 9)] * 2) | st.tuples(*[st.integers(1, 5)] * 3))
    kinds = ["replicate", "shard", "shard", "strided"]
    placements = []
    for _ in sizes:
        kind = draw(st.sampled_from(kinds))
        placements.append((kind, draw(st.integers(0, len(shape) - 1)), draw(st.integers(2, 4))))
    return sizes, shape, tuple(placements), draw(st.sampled_from(sorted(DTYPES))), draw(st.integers(0, world - 1))


def placement_of(kind: str, dim: int, factor: int) -> Placement:
    if kind == "replicate":
        return Replicate()
    return Shard(dim) if kind == "shard" else _StridedShard(dim, split_factor=factor)


def there_and_back(rank: int, world: int, some: list[Case]) -> int:
    config = create_dtensor_config(costs="flops")
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes, *_ in some}
    done = 0
    for case in some:
        sizes, shape, described, dtype, owner = case
        mesh, placements = meshes[sizes], [placement_of(*one) for one in described]
        whole = numbered(shape, DTYPES[dtype])
        if any(isinstance(placement, _StridedShard) for placement in placements):
            layout = layout_of(shape, sizes, placements)
            tensor = laid(whole, layout.pieces[mesh.mesh.flatten().tolist().index(rank)], mesh, placements)
        else:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(tensor.full_tensor(), whole)
        before = tensor.to_local().clone()
        found = config.gather_fn(tensor, owner, config.state)
        assert (found is not None) == (rank == owner), f"{case}: a rank that is not {owner} has {found}"
        if found is not None:
            assert found.dtype == whole.dtype and torch.equal(found, whole), f"{case}: gathered {found}"
            found = found.clone()
        back = config.redistribute_fn(found, owner, config.state)
        assert torch.equal(tensor.to_local(), before), f"{case}: the tensor itself has changed"
        assert back.dtype == before.dtype and torch.equal(back, before), f"{case}: {back} came back, not {before}"
        done += 1
    return done


def drawn(world: int, count: int, number: int) -> list[Case]:
    """Random cases, of hypothesis, to run at once; a case that fails is in the message."""
    found: list[Case] = []

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases(world))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.mark.pitfall("P14")
@pytest.mark.parametrize(
    ("world", "count", "number"),
    [
        *((world, 40, world) for world in (2, 4)),
        *(pytest.param(world, 150, 100, marks=pytest.mark.slow) for world in (1, 2, 3, 4)),
    ],
)
def test_gather_then_redistribute_is_the_identity(ranks: RankPool, world: int, count: int, number: int) -> None:
    some = drawn(world, count, number)
    assert len(some) >= count
    assert ranks(world, there_and_back, some) == [len(some)] * world


# -- many at once -----------------------------------------------------------------------------------------------------

ONE_BY_ONE = CostTable({(a, b): {1: 1000} for a in range(1, 10) for b in range(a, 10)})


def trained_as_one_process(rank: int, world: int, case: int) -> None:
    """Random matrices with random placements, in few rounds or many, with and without gradients.

    What goes on to copies travels part by part, or padded as where owners have alike parts on NCCL.
    """
    source = random.Random(case)
    mesh = init_device_mesh("cpu", source.choice([sizes for sizes in MESHES[world] if len(sizes) < 3]))
    kinds = ["replicate", "shard", "shard", "strided"]
    places = [
        [placement_of(source.choice(kinds), source.randrange(2), source.randint(2, 3)) for _ in range(mesh.ndim)]
        for _ in range(2)
    ]
    shapes = [(source.randint(1, 9), source.randint(1, 9)) for _ in range(2)]
    pieces, params, twins = [], [], []
    for i in range(source.randint(2, 9)):
        shape, placements = source.choice(shapes), source.choice(places)
        whole = noise(i, *shape)
        pieces.append(layout_of(shape, tuple(mesh.mesh.shape), placements).pieces[rank])
        params.append(torch.nn.Parameter(laid(whole, pieces[-1], mesh, placements)))
        twins.append(torch.nn.Parameter(whole))
    config = create_dtensor_config(
        prefetch_count=source.randrange(3),
        costs=source.choice(["flops", ONE_BY_ONE]),
        small_param_numel_threshold=source.choice([0, 65536]),
    )
    optimizer = dmuon.Muon([{"params": params, "use_muon": True}], distributed_config=config, **OPTIONS)
    twin = dmuon.Muon([{"params": twins, "use_muon": True}], **OPTIONS)
    transport = source.choice(["broadcast", "single"])
    for step in range(3):
        for i, (param, of_twin, piece) in enumerate(zip(params, twins, pieces, strict=True)):
            of_twin.grad = noise(100 * step + i, *of_twin.shape) if source.random() < 0.8 else None
            param.grad = None
            if of_twin.grad is not None:
                param.grad = laid(of_twin.grad, piece, mesh, param.placements)
        with patch.object(exchange, "choose_transport", lambda *_: transport):
            optimizer.step()
        twin.step()
    for param, of_twin, piece in zip(params, twins, pieces, strict=True):
        momenta = (opt.state[p]["momentum_buffer"] for opt, p in ((optimizer, param), (twin, of_twin)))
        for found, expected in ((param, of_twin), momenta):
            part = part_of(expected.detach(), piece)
            torch.testing.assert_close(found.detach().to_local(), part, atol=1e-5, rtol=1e-4, msg=f"case {case}")


def laid(whole: Tensor, piece: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    local = part_of(whole, piece)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.pitfall("P04", "P14", "P26", "P79")
@pytest.mark.parametrize(("world", "count"), [(2, 8), (3, 8), (4, 8), pytest.param(4, 80, marks=pytest.mark.slow)])
@on_ranks(timeout=180.0)
def test_random_layouts_train_as_one_process(rank: int, world: int, count: int) -> None:
    for case in range(count):
        trained_as_one_process(rank, world, 100 * world + case)
