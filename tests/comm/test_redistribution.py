"""What generated functions gather is the whole tensor, and what they redistribute comes back as it was."""

from __future__ import annotations

import random
from itertools import product
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.on_ranks import on_ranks
from harness.pieces import numbered, part_of
from harness.pool import RankPool
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuon import create_dtensor_config
from dmuon.comm import domain as exchange
from dmuon.comm import process_groups
from dmuon.comm.domain import AllToAll, Copies, Copying, Domain, Redistribution, connect_copies, make_domain
from dmuon.layout.matrices import Parcel, spread_over_all
from dmuon.layout.parameters import place_dtensor
from dmuon.layout.shards import Piece, ShardLayout, layout_of

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
            local = part_of(whole, layout.pieces[mesh.mesh.flatten().tolist().index(rank)])
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
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
        *(pytest.param(w, 150, 100 + number, marks=pytest.mark.slow) for w in (1, 2, 3, 4) for number in range(3)),
    ],
)
def test_gather_then_redistribute_is_the_identity(ranks: RankPool, world: int, count: int, number: int) -> None:
    some = drawn(world, count, number)
    assert len(some) >= count
    assert ranks(world, there_and_back, some) == [len(some)] * world


@pytest.mark.pitfall("P14")
@pytest.mark.slow
@on_ranks(4)
def test_the_smallest_matrices_travel(rank: int, world: int) -> None:
    """Every placement of ``(1, 1)``, ``(1, n)`` and ``(n, 1)``: most ranks have nothing."""
    placements = [("replicate", 0, 0), ("shard", 0, 0), ("shard", 1, 0), ("strided", 0, 2)]
    some: list[Case] = [
        (sizes, shape, pair[: len(sizes)], "fp32", rank_)
        for sizes in [(world,), (2, 2)]
        for shape in [(1, 1), (1, 5), (3, 1)]
        for pair in product(placements, repeat=len(sizes))
        for rank_ in (0, world - 1)
    ]
    assert there_and_back(rank, world, some) == 3 * 2 * (4 + 16)


# -- many at once -----------------------------------------------------------------------------------------------------


def random_layout(source: random.Random, world: int, shape: tuple[int, int]) -> ShardLayout:
    sizes = source.choice([sizes for sizes in MESHES[world] if prod(sizes) == world])
    kinds = ["replicate", "shard", "shard", "strided"]
    placements = [placement_of(source.choice(kinds), source.randrange(2), source.randint(2, 3)) for _ in sizes]
    return layout_of(shape, sizes, placements)


def part_of_each(whole: Tensor, piece: Piece) -> Tensor:
    return torch.stack([part_of(matrix, piece) for matrix in whole])


@pytest.mark.pitfall("P04", "P14")
@pytest.mark.parametrize(("world", "count"), [(2, 40), (3, 40), (4, 40), pytest.param(4, 800, marks=pytest.mark.slow)])
@on_ranks()
def test_batches_of_parts_travel_to_their_owners_and_back(rank: int, world: int, count: int) -> None:
    """Random batches of random layouts and owners, to their owners; twice what arrived, back to all holders.

    What goes on to copies travels part by part, or padded as where owners have alike parts on NCCL.
    """
    domain: Domain = make_domain(range(world), torch.device("cpu"))
    for case in range(count):
        source = random.Random(case)
        generator = torch.Generator().manual_seed(case)
        dtype = source.choice([torch.float32, torch.float64, torch.bfloat16])
        wholes, parcels = [], []
        for _ in range(source.randint(1, 6)):
            layout = random_layout(source, world, (source.randint(1, 9), source.randint(1, 9)))
            parcels.append(Parcel(source.randint(1, 4), spread_over_all(layout), source.randrange(world)))
            wholes.append(torch.randn(parcels[-1].count, *layout.shape, generator=generator).to(dtype))
        pieces = [parcel.layout.pieces[rank] for parcel in parcels]
        like = torch.empty(0, dtype=dtype)
        sent = {i: part_of_each(wholes[i], piece) for i, piece in enumerate(pieces) if piece.numel}
        collected = Redistribution(AllToAll([p.to_owner for p in parcels], domain), sent, like, "a test").wait()
        assert sorted(collected) == [i for i, parcel in enumerate(parcels) if parcel.owner == rank]
        for i, whole in collected.items():
            assert torch.equal(whole, wholes[i]), f"case {case}: {parcels[i]}"
        twice = {i: 2 * whole for i, whole in collected.items()}
        back = Redistribution(AllToAll([p.from_owner for p in parcels], domain), twice, like, "a test").wait()
        connect_copies(domain, [parcel.spread for parcel in parcels])
        transport = source.choice(["broadcast", "single"])
        with patch.object(exchange, "choose_transport", lambda *_: transport):  # noqa: B023
            copies = Copies(parcels, domain)
        assert copies.needed == any(max(parcel.layout.replicas) for parcel in parcels)
        copied = any(p.spread.copies > 1 and rank in p.spread.parts for p in parcels)
        assert {load.transport for load in copies.loads} == ({transport} if copied else set())
        back = Copying(copies, back, like, "a test").wait()
        assert back.keys() == sent.keys(), f"case {case}: {parcels}"
        for i, arrived in back.items():
            assert torch.equal(arrived, 2 * sent[i]), f"case {case}: {parcels[i]}"


@pytest.mark.pitfall("P04", "P14", "P79")
@pytest.mark.parametrize(("world", "count"), [(3, 40), pytest.param(4, 800, marks=pytest.mark.slow)])
@on_ranks()
def test_parts_of_one_stack_arrive_as_parts_by_themselves_do(rank: int, world: int, count: int) -> None:
    """Random batches; what this rank does not own of those with alike parts is a stack or two.

    In some layouts ranks have nothing, or one copy of several.
    """
    domain: Domain = make_domain(range(world), torch.device("cpu"))
    joined = 0
    for case in range(count):
        source = random.Random(case)
        generator = torch.Generator().manual_seed(case)
        layouts = [random_layout(source, world, (source.randint(1, 9), 3)) for _ in range(2)]
        parcels = []
        for _ in range(source.randint(2, 9)):
            spread = spread_over_all(source.choice(layouts))
            parcels.append(Parcel(source.randint(1, 3), spread, source.randrange(world)))
        if source.random() < 0.5:
            parcels.sort(key=lambda parcel: parcel.owner)  # so that neighbours travel together
        wholes = [torch.randn(parcel.count, *parcel.layout.shape, generator=generator) for parcel in parcels]
        parts = {
            i: part_of_each(whole, p.layout.pieces[rank])
            for i, (whole, p) in enumerate(zip(wholes, parcels, strict=True))
        }
        stacks = []
        for layout in dict.fromkeys(layouts):
            part = layout.pieces[rank]
            alike = [i for i, p in enumerate(parcels) if p.layout == layout and p.owner != rank and part.numel]
            middle = source.choice([0, len(alike) // 2])
            stacks += [numbers for numbers in (alike[:middle], alike[middle:]) if numbers]
        apart = {i: part for i, part in parts.items() if parcels[i].owner == rank}
        held = apart | {numbers[0]: torch.cat([parts[i] for i in numbers]) for numbers in stacks}
        like = torch.empty(0)
        there = AllToAll([parcel.to_owner for parcel in parcels], domain, stacks)
        found = Redistribution(there, held, like, "to owners").wait()
        assert sorted(found) == sorted(apart)
        assert all(torch.equal(whole, wholes[i]) for i, whole in found.items())
        home = AllToAll([parcel.from_owner for parcel in parcels], domain, stacks)
        back = Redistribution(home, {i: 2 * whole for i, whole in found.items()}, like, "back").wait()
        for numbers in [*([i] for i in apart), *stacks]:
            wanted = [i for i in numbers if rank in parcels[i].from_owner.receivers]  # of the owner's copy
            runs = [back.pop(i) for i in numbers if i in back]
            joined += len(wanted) - len(runs)
            assert bool(runs) == bool(wanted)
            if runs:
                expected = torch.cat([2 * parts[i] for i in wanted])
                assert torch.equal(torch.cat(runs), expected), f"case {case}: {parcels}, {stacks}"
        assert not back
    assert joined > count / 4


@pytest.mark.pitfall("P26")
@on_ranks(2)
def test_several_gathers_may_be_under_way(rank: int, world: int) -> None:
    """Gathers started before earlier ones were waited for, waited for in order and against it."""
    domain = make_domain(range(world), torch.device("cpu"))
    layout = layout_of((5, 3), (world,), [Shard(0)])
    wholes = [torch.full((2, 5, 3), float(i)) + torch.arange(15.0).view(5, 3) / 100 for i in range(4)]
    parcels = [Parcel(2, spread_over_all(layout), i % world) for i in range(4)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        gatherings = [
            Redistribution(
                AllToAll([parcel.to_owner], domain),
                {0: part_of_each(whole, layout.pieces[rank])},
                whole.new_empty(0),
                f"{i}",
            )
            for i, (whole, parcel) in enumerate(zip(wholes, parcels, strict=True))
        ]
        for i in order:
            found = gatherings[i].wait()
            assert (0 in found) == (i % world == rank)
            assert all(torch.equal(whole, wholes[i]) for whole in found.values())


@on_ranks(2)
def test_copies_are_not_gathered(rank: int, world: int) -> None:
    """Copies need no gather: what the owner has is what it gets, and no collective is started."""
    domain = make_domain(range(world), torch.device("cpu"))
    layout = layout_of((4, 3), (world,), [Replicate()])
    parcel = Parcel(1, spread_over_all(layout), 1)
    whole = numbered((1, 4, 3))
    gathering = Redistribution(AllToAll([parcel.to_owner], domain), {0: whole}, whole.new_empty(0), "copies")
    assert not domain.monitor.counts["exchange"], "a collective was started"
    found = gathering.wait()
    assert found.keys() == ({0} if rank == 1 else set())
    assert all(one.data_ptr() == whole.data_ptr() for one in found.values()), "copied"


@pytest.mark.pitfall("P04", "P14")
@on_ranks(4)
def test_strided_shards_of_fsdp_over_tensor_parallelism_travel(rank: int, world: int) -> None:
    """FSDP2 over tensor parallelism makes the strided shards; the whole is known from before."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = create_dtensor_config(costs="flops")
    for rows, cols in [(8, 4), (7, 5), (3, 2), (1, 4)]:
        torch.manual_seed(rows)
        layer = nn.Linear(cols, rows, bias=False)
        whole = layer.weight.detach().clone()
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=mesh["dp"])
        weight = layer.weight
        assert isinstance(weight, DTensor) and isinstance(weight.placements[0], _StridedShard)
        assert place_dtensor(weight, "w", rank).ranks == tuple(range(world))
        for owner in range(world):
            found = config.gather_fn(weight, owner, config.state)
            assert (found is not None) == (rank == owner)
            if found is not None:
                assert torch.equal(found, whole)
            back = config.redistribute_fn(found, owner, config.state)
            assert torch.equal(back, weight.to_local())
        dist.barrier()


@pytest.mark.slow
@on_ranks(4)
def test_copies_travel_where_all_ranks_have_to_make_all_groups(rank: int, world: int) -> None:
    """As with a default process group that is bound to a device; one of the matrices is too small for all ranks."""
    domain = make_domain(range(world), torch.device("cpu"))
    layouts = [layout_of(shape, (2, 2), [Replicate(), Shard(0)]) for shape in ((1, 3), (4, 3))]
    parcels = [Parcel(1, spread_over_all(layout), owner) for owner, layout in zip((2, 3), layouts, strict=True)]
    with (
        patch.object(exchange, "default_group_is_bound", lambda: True),
        patch.object(process_groups, "default_group_is_bound", lambda: True),
    ):
        connect_copies(domain, [parcel.spread for parcel in parcels])
    updates = {}
    for i, parcel in enumerate(parcels):
        if rank in parcel.spread.parts and rank >= 2:  # the owners' copy
            updates[i] = part_of_each(numbered((1, *parcel.layout.shape)) + i, parcel.spread.parts[rank])
    arrived = Copying(Copies(parcels, domain), updates, torch.empty(0), "a test").wait()
    assert arrived.keys() == {i for i, parcel in enumerate(parcels) if rank in parcel.spread.parts}
    for i, part in arrived.items():
        whole = numbered((1, *parcels[i].layout.shape)) + i
        assert torch.equal(part, part_of_each(whole, parcels[i].spread.parts[rank]))
