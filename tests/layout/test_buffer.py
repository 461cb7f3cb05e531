"""Where matrices lie and how they travel: nothing overlaps, nothing is lost, whatever the sizes and owners."""

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.on_ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.comm.monitor import Line, gather, reduce, scratch
from dmuon.layout.buffer import choose_transport, make_layout

TRANSPORTS: list[Any] = ["auto", "broadcast", "single"]
EXAMPLES = settings(deadline=None, max_examples=100)


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
def test_every_matrix_has_a_place_of_its_own_in_parts_that_tile_the_buffer(case: tuple[Any, int, int, Any]) -> None:
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

    assert layout.segments[0][0] == 0 and layout.segments[-1][1] == layout.size
    for (_, end), (start, _) in pairwise(layout.segments):
        assert end == start
    of_shards = [layout.parts(s) for s in range(shards)]
    for (first, last), parts in zip(layout.segments, of_shards, strict=True):
        assert len(parts) == replicas
        assert parts[0][0] == first and parts[-1][1] <= last
        for (_, end), (start, _) in pairwise(parts):
            assert end == start

    if layout.row == "single":
        assert len({end - start for start, end in layout.segments}) == 1, "one all-gather needs parts of one size"
    if layout.column == "single":
        assert all(len({end - start for start, end in parts}) == 1 for parts in of_shards)
    content = sum(rounded(numel, align) for _, _, numel in matrices)
    if "single" not in (layout.row, layout.column):
        assert layout.size == content, "no padding where parts travel one by one"
    elif options["wanted"] == "auto":
        assert layout.size <= 1.15**2 * content, "padding that the rule does not allow"

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


# -- on real groups -----------------------------------------------------------------------------------------------


def random_layout(source: random.Random, world: int, along_row: bool, wanted: Any) -> tuple[Any, list[Any]]:
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
    wanted: list[Any] = ["broadcast", "single", "auto"]
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
