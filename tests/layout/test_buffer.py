"""Where matrices lie and how they travel: nothing overlaps, nothing is lost, whatever the sizes and owners."""

from __future__ import annotations

import random
from itertools import pairwise, product
from math import prod
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from harness.on_ranks import on_ranks
from harness.pieces import mesh_on
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from dmuon.comm.lines import Line, gather, reduce, scratch
from dmuon.layout.buffer import BufferLayout, Transport, choose_transport, lay_spans, make_layout
from dmuon.layout.shards import layout_of
from dmuon.layout.topology import Coordinate, Topology, topology_of

TRANSPORTS: list[Transport] = ["auto", "broadcast", "single"]
EXAMPLES = settings(deadline=None, max_examples=150)


# -- layouts ------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int, int, dict[str, Any]]:
    replicas, shards = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    matrix = st.tuples(st.integers(0, replicas - 1), st.integers(0, shards - 1), st.integers(1, 200))
    backend = draw(st.sampled_from(["gloo", "nccl"]))
    wanted = draw(st.sampled_from(TRANSPORTS))
    options = {
        "wanted": wanted,
        "backend": backend,
        "resident": draw(st.booleans()),
        "align": draw(st.sampled_from([1, 4, 64])),
    }
    return draw(st.lists(matrix, min_size=1, max_size=12)), replicas, shards, options


def rounded(numel: int, align: int) -> int:
    return -(-numel // align) * align


@EXAMPLES
@given(layouts())
def test_every_matrix_has_a_place_of_its_own(case: tuple[Any, int, int, dict[str, Any]]) -> None:
    matrices, replicas, shards, options = case
    align = options["align"]
    layout = make_layout(matrices, replicas, shards, **options)
    assert len(layout.slots) == len(matrices)
    for (r, s, numel), (start, end) in zip(matrices, layout.slots, strict=True):
        assert end - start == numel, "nothing is lost"
        assert start % align == 0, f"slot {start} is not aligned to {align}"
        first, last = layout.parts(s)[r]
        assert first <= start and end <= last, "a slot lies in the part of its owner"
    for (_, end), (start, _) in pairwise(sorted(layout.slots)):
        assert end <= start, "slots overlap"


@EXAMPLES
@given(layouts())
def test_parts_and_segments_tile_the_buffer(case: tuple[Any, int, int, dict[str, Any]]) -> None:
    matrices, replicas, shards, options = case
    layout = make_layout(matrices, replicas, shards, **options)
    assert layout.segments[0][0] == 0 and layout.segments[-1][1] == layout.size
    for (_, end), (start, _) in pairwise(layout.segments):
        assert end == start
    of_shards = [layout.parts(s) for s in range(shards)]
    for (first, last), parts in zip(layout.segments, of_shards, strict=True):
        assert len(parts) == replicas
        assert parts[0][0] == first and parts[-1][1] <= last
        for (_, end), (start, _) in pairwise(parts):
            assert end == start
    lengths = {end - start for start, end in layout.segments}
    if layout.row == "single":
        assert len(lengths) == 1, "one all-gather needs parts of one size"
    if layout.column == "single":
        assert all(len({end - start for start, end in parts}) == 1 for parts in of_shards)
    content = sum(rounded(numel, options["align"]) for _, _, numel in matrices)
    if "single" not in (layout.row, layout.column):
        assert layout.size == content, "no padding where parts travel one by one"
    elif options["wanted"] == "auto":
        assert layout.size <= 1.15**2 * content, "padding that the rule does not allow"


@EXAMPLES
@given(layouts())
def test_transports_suit_the_back_end(case: tuple[Any, int, int, dict[str, Any]]) -> None:
    matrices, replicas, shards, options = case
    layout = make_layout(matrices, replicas, shards, **options)
    for transport, ranks in ((layout.row, shards), (layout.column, replicas)):
        assert transport != "auto"
        if ranks == 1:
            assert transport == "broadcast", "nothing travels"
    if not options["resident"]:
        assert layout.column == "broadcast", "a column without resident weights gathers into stand-ins"
    if options["wanted"] in ("broadcast", "single") and shards > 1:
        assert layout.row == options["wanted"]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=8), st.sampled_from(["gloo", "nccl"]))
def test_the_rule_takes_one_collective_where_padding_is_small(sizes: list[int], backend: str) -> None:
    chosen = choose_transport("auto", dict(enumerate(sizes)), len(sizes), backend)
    small = sum(sizes) > 0 and max(sizes) * len(sizes) <= 1.15 * sum(sizes)
    assert chosen == ("single" if backend == "nccl" and small else "broadcast")


@given(st.sampled_from(["broadcast", "single"]), st.lists(st.integers(0, 99), min_size=1, max_size=9))
def test_spans_hold_every_part(transport: Transport, sizes: list[int]) -> None:
    """Also if nothing is said of the empty ones."""
    spans = lay_spans(transport, {i: size for i, size in enumerate(sizes) if size}, len(sizes), start=3)
    assert len(spans) == len(sizes) and spans[0][0] == 3 and spans[-1][1] == spans.end
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    assert all(b - a >= size for (a, b), size in zip(spans, sizes, strict=True))
    if transport == "single":
        assert len({b - a for a, b in spans}) == 1
    else:
        assert spans.size == sum(sizes)
        assert sorted(spans.filled) == [i for i, size in enumerate(sizes) if size]


# -- topologies ---------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[str] | None, int]:
    names = draw(st.permutations(["dp_replicate", "dp_shard", "cp", "fsdp"]))
    ndim = draw(st.integers(1, 4))
    extents = [draw(st.integers(1, 3)) for _ in range(ndim)]
    if ndim <= 2 and draw(st.booleans()):
        return extents, None, draw(st.integers(0, 3))
    return extents, list(names[:ndim]), draw(st.integers(0, 3))


def assert_partitions(topology: Topology) -> None:
    assert list(topology.ranks) == sorted(topology.ranks)
    for rank, at in zip(topology.ranks, topology.coordinates, strict=True):
        assert topology.of(rank) == at
        assert topology.rank_at(at.r, at.s, at.t) == rank
    extents = {"r": topology.replicas, "s": topology.shards, "t": topology.tensor}
    every: list[Literal["r", "s", "t", "rs"]] = ["r", "s", "t", "rs"]
    for along in every:
        groups = topology.partition(along)
        size = prod(extents[name] for name in along)
        assert sorted(rank for group in groups for rank in group) == list(topology.ranks), "each rank once"
        for group in groups:
            assert len(group) == size
            coordinates = [topology.of(rank) for rank in group]
            assert coordinates == sorted(coordinates), "a position on a lane is a coordinate"
            for name in {"r", "s", "t"} - set(along):
                assert len({getattr(at, name) for at in coordinates}) == 1
    for t in range(topology.tensor):
        ranks = topology.data_parallel(t)
        assert len(ranks) == topology.replicas * topology.shards
        assert list(ranks) == sorted(ranks) and all(topology.of(rank).t == t for rank in ranks)


@EXAMPLES
@given(meshes())
def test_topologies_of_data_parallel_meshes(case: tuple[list[int], list[str] | None, int]) -> None:
    extents, names, first = case
    ranks = torch.arange(first, first + prod(extents)).view(extents)
    topology = topology_of(mesh_on(first, ranks, names))
    roles = [n in ("dp_replicate", "cp") for n in names] if names else [True, False][-len(extents) :]
    replicas = shards = 1
    for extent, replicates in zip(extents, roles, strict=True):
        replicas *= extent if replicates else 1
        shards *= 1 if replicates else extent
    assert (topology.replicas, topology.shards, topology.tensor) == (replicas, shards, 1)
    assert topology.ranks == tuple(range(first, first + replicas * shards))
    assert_partitions(topology)


@EXAMPLES
@given(st.permutations(["r", "s", "t"]), st.tuples(*[st.integers(1, 3)] * 3))
def test_tensor_parallel_groups_extend_a_topology(order: list[str], extents: tuple[int, int, int]) -> None:
    """Every tensor-parallel rank derives the same topology from its own data-parallel mesh."""
    size = dict(zip(["r", "s", "t"], extents, strict=True))
    grid = torch.arange(size["r"] * size["s"] * size["t"]).view([size[name] for name in order])
    grid = grid.permute([order.index(name) for name in ("r", "s", "t")])
    groups = [grid[r, s].tolist() for r, s in product(range(size["r"]), range(size["s"]))]
    found = []
    for t in range(size["t"]):
        mine = sorted(grid[:, :, t].flatten().tolist())
        where = {int(grid[r, s, t]): Coordinate(r, s) for r, s in product(range(size["r"]), range(size["s"]))}
        alone = Topology(tuple(mine), tuple(where[rank] for rank in mine), size["r"], size["s"])
        found.append(alone.with_tensor_parallel(groups))
    assert all(other == found[0] for other in found)
    assert found[0].tensor == size["t"]
    for r, s, t in product(*map(range, (size["r"], size["s"], size["t"]))):
        assert found[0].rank_at(r, s, t) == int(grid[r, s, t])
    assert_partitions(found[0])


# -- parts of tensor parallelism ----------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(1, 9))
def test_even_parts_are_those_of_chunk_and_of_shard(length: int, size: int) -> None:
    parts = [piece.shape[0] for piece in layout_of((length,), [size], [Shard(0)]).pieces]
    assert len(parts) == size and sum(parts) == length
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(size)] if length else []
    assert [p for p in parts if p] == chunks
    pieces, _ = Shard(0)._split_tensor(torch.arange(length), size, with_padding=False)
    assert parts == [len(piece) for piece in pieces]


# -- on real groups -----------------------------------------------------------------------------------------------


def random_layout(
    source: random.Random, world: int, along_row: bool, wanted: Transport
) -> tuple[BufferLayout, list[Any]]:
    """Matrices of some ranks, perhaps none of others, laid along one lane of ``world`` ranks."""
    matrices = []
    for _ in range(source.randint(1, 7)):
        owner = source.randrange(world)
        matrices.append((0, owner, source.randint(1, 40)) if along_row else (owner, 0, source.randint(1, 40)))
    layout = make_layout(
        matrices,
        1 if along_row else world,
        world if along_row else 1,
        wanted=wanted,
        backend="gloo",
        resident=True,
        align=source.choice([1, 8]),
    )
    return layout, matrices


@pytest.mark.pitfall("P14", "P26")
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_reductions_and_gathers_reproduce_every_matrix(rank: int, world: int) -> None:
    """Reduce random matrices to their owners and gather them again."""
    group = dist.group.WORLD
    assert group is not None
    lane = Line(tuple(range(world)), rank, group)
    wanted: list[Transport] = ["broadcast", "single", "auto"]
    for case, transport, along_row in product(range(8), wanted, [True, False]):
        source = random.Random(case)
        layout, matrices = random_layout(source, world, along_row, transport)
        spans = layout.segments if along_row else layout.parts(0)
        owners = [s if along_row else r for r, s, _ in matrices]
        kind = layout.row if along_row else layout.column
        generator = torch.Generator().manual_seed(case)
        values = [[torch.randn(m[2], generator=generator) for m in matrices] for _ in range(world)]
        average = [torch.stack(of_ranks).mean(0) for of_ranks in zip(*values, strict=True)]
        region, parts = scratch(kind, spans, torch.float32, torch.device("cpu"))
        for part in parts.values():
            part.fill_(float("nan"))  # padding may hold anything
        for owner, value, (start, end) in zip(owners, values[rank], layout.slots, strict=True):
            first = spans[owner][0]
            parts[owner][start - first : end - first] = value
        mine, works = reduce(kind, region, parts, lane)
        for work in works:
            work.wait()
        buffer = torch.full((layout.size,), float("nan"))
        views = {i: buffer[a:b] for i, (a, b) in spans.filled.items()}
        if rank in views:
            views[rank].copy_(mine)
        for work in gather(kind, buffer, views, lane):
            work.wait()
        for value, (start, end) in zip(average, layout.slots, strict=True):
            torch.testing.assert_close(buffer[start:end], value)
