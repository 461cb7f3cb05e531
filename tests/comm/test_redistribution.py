"""What generated functions gather is the whole tensor, and what they redistribute comes back as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.dtensors import noise
from harness.on_ranks import on_ranks
from harness.pieces import numbered, part_of
from harness.toy import OPTIONS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dmuon
from dmuon import create_dtensor_config
from dmuon.comm import domain as exchange
from dmuon.layout.shards import layout_of
from dmuon.solver import CostTable

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2), (2, 1)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (4, 1), (1, 2, 2)],
}


def drawn(source: random.Random, dims: int, count: int) -> list[Placement]:
    """Placements of a tensor of ``dims`` dimensions on a mesh of ``count``; often FSDP2's over tensor parallelism."""
    if count > 1 and source.random() < 0.3:
        dim = source.randrange(dims)
        return [*[Replicate()] * (count - 2), _StridedShard(dim, split_factor=2), Shard(dim)]
    kinds: list[Callable[[], Placement]] = [
        Replicate,
        lambda: Shard(source.randrange(dims)),
        lambda: Shard(source.randrange(dims)),
        lambda: _StridedShard(source.randrange(dims), split_factor=source.randint(2, 4)),
    ]
    return [source.choice(kinds)() for _ in range(count)]


def laid(whole: Tensor, piece: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    local = part_of(whole, piece)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.pitfall("P14")
@pytest.mark.parametrize(
    ("world", "count"), [(2, 40), (4, 40), *(pytest.param(n, 40, marks=pytest.mark.slow) for n in (1, 3))]
)
@on_ranks()
def test_gather_then_redistribute_is_the_identity(rank: int, world: int, count: int) -> None:
    source = random.Random(count + world)
    config = create_dtensor_config(costs="flops")
    meshes = [init_device_mesh("cpu", sizes) for sizes in MESHES[world]]
    for _ in range(count):
        mesh, owner, dtype = source.choice(meshes), source.randrange(world), source.choice(DTYPES)
        most, dims = source.choice([(9, 2), (5, 3)])
        shape, placements = [source.randint(1, most) for _ in range(dims)], drawn(source, dims, mesh.ndim)
        case = f"{shape} of {dtype} by {placements} on {mesh} for {owner}"
        whole = numbered(shape, dtype)
        piece = layout_of(shape, mesh.shape, placements).pieces[mesh.mesh.flatten().tolist().index(rank)]
        tensor = laid(whole, piece, mesh, placements)
        before = tensor.to_local().clone()
        found = config.gather_fn(tensor, owner, config.state)
        assert (found is not None) == (rank == owner), f"{case}: {found}"
        if found is not None:
            assert found.dtype == dtype and torch.equal(found, whole), f"{case}: gathered {found}"
            found = found.clone()
        back = config.redistribute_fn(found, owner, config.state)
        assert torch.equal(tensor.to_local(), before), f"{case}: the tensor itself has changed"
        assert back.dtype == dtype and torch.equal(back, before), f"{case}: {back} came back, not {before}"


# -- many at once -----------------------------------------------------------------------------------------------------

ONE_BY_ONE = CostTable({(a, b): {1: 1000} for a in range(1, 10) for b in range(a, 10)})


def trained_as_one_process(rank: int, meshes: list[DeviceMesh], case: int) -> None:
    """Random matrices with random placements, in few rounds or many, with and without gradients.

    What goes on to copies travels part by part, or padded as where owners have alike parts on NCCL.
    """
    source = random.Random(case)
    mesh = source.choice(meshes)
    places = [drawn(source, 2, mesh.ndim) for _ in range(2)]
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


@pytest.mark.pitfall("P04", "P14", "P26", "P79")
@pytest.mark.parametrize(
    ("world", "first", "last"),
    [(2, 0, 4), (3, 0, 4), (4, 0, 6), pytest.param(4, 8, 24, marks=pytest.mark.slow)],
)
@on_ranks(timeout=180.0)
def test_random_layouts_train_as_one_process(rank: int, world: int, first: int, last: int) -> None:
    meshes = [init_device_mesh("cpu", sizes) for sizes in MESHES[world] if len(sizes) < 3]
    for case in range(first, last):
        trained_as_one_process(rank, meshes, 100 * world + case)
