"""Which ranks hold a parameter and which elements each has: every rank's view, worked out in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.on_ranks import on_ranks
from harness.pieces import mesh_on, numbered, part_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuon.layout.parameters import place, place_dtensor, place_replicated, place_shards
from dmuon.layout.topology import RankGrid

SHAPES = [(1, 1), (1, 7), (5, 3), (6, 1), (8, 4)]

Nested = Sequence[Any]
ROLES = ["tp", "ep", "fsdp", "dp", "cp"]  # what cuts a parameter first comes first
Placed = Mapping[int, tuple[Any, Tensor]]  # by rank, where a parameter lies, and the local tensor


def dtensor_on(rank: int, whole: Tensor, ranks: Nested, placements: Sequence[Placement]) -> DTensor:
    """What ``rank`` has of ``whole``, cut by torch."""
    return distribute_tensor(whole, mesh_on(rank, ranks), placements, src_data_rank=None)


def assert_placed(whole: Tensor, placed: Placed) -> None:
    """All ranks see one layout; its pieces are what the ranks have, and those of each copy make up the whole."""
    layouts = {id(layout): layout for layout, _ in placed.values()}.values()
    first = next(iter(layouts))
    assert first is not None and all(layout == first for layout in layouts), "ranks differ on where the parameter lies"
    assert first.layout.shape == tuple(whole.shape)
    assert first.ranks == tuple(sorted(placed))
    for rank, piece in zip(first.ranks, first.layout.pieces, strict=True):
        assert torch.equal(part_of(whole, piece), placed[rank][1]), f"{first} gives rank {rank} not {placed[rank][1]}"
    for position in range(len(first.ranks)):
        together = torch.full(whole.shape, -1.0)
        for i in first.layout.sources(position):
            for block, of_whole in first.layout.pieces[i].blocks():
                assert (together[of_whole] == -1).all(), "pieces overlap"
                together[of_whole] = placed[first.ranks[i]][1][block]
        assert torch.equal(together, whole)


def place_on_all(
    grid: RankGrid, params: Mapping[int, Sequence[Tensor]], shard_dims: Any, names: Callable[[int], list[str]]
) -> dict[int, list[Any]]:
    """Where each rank of ``grid`` finds its parameters, once all have told the shapes of what is cut."""
    found = {rank: place(params[rank], names(rank), grid, rank, shard_dims) for rank in grid.ranks}
    shapes = [[(names(rank)[i], tuple(params[rank][i].shape)) for i in found[rank][1]] for rank in grid.ranks]
    for rank, (placed, cut) in found.items():
        for i, layout in place_shards(cut, shapes, grid, rank).items():
            placed[i] = layout
    return {rank: placed for rank, (placed, _) in found.items()}


def place_one(grid: RankGrid, params: Mapping[int, Tensor], shard_dims: Any = None) -> Placed:
    placed = place_on_all(grid, {r: [p] for r, p in params.items()}, shard_dims, lambda _: ["w"])
    return {rank: (layout, params[rank]) for rank, (layout,) in placed.items()}


# -- DTensors -------------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P14")
@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 3), (4,), (2, 2), (1, 4), (4, 1)])
def test_a_dtensor_lies_where_torch_put_it(sizes: tuple[int, ...]) -> None:
    """Every placement of every shape."""
    ranks = torch.arange(prod(sizes)).view(sizes).tolist()
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    for shape, placements in product(SHAPES, product(choices, repeat=len(sizes))):
        whole = numbered(shape)
        params = {rank: dtensor_on(rank, whole, ranks, placements) for rank in range(prod(sizes))}
        assert_placed(whole, {r: (place_dtensor(p, "w", r), p.to_local()) for r, p in params.items()})


@st.composite
def dtensor_cases(draw: st.DrawFn) -> tuple[Nested, tuple[int, ...], list[Placement]]:
    """Ranks of a mesh in any order, a shape with empty shards, and placements, strided ones as FSDP makes them."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(0, 2 * prod(sizes), 2)))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cuts = st.none() | st.integers(0, len(shape) - 1)
    dims = [draw(cuts) for _ in sizes]
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    if len(sizes) == 2 and dims[0] is not None and dims[0] == dims[1] and draw(st.booleans()):
        placements[0] = _StridedShard(dims[0], split_factor=sizes[1])
    return torch.tensor(ranks).view(sizes).tolist(), shape, placements


@pytest.mark.pitfall("P14")
@given(dtensor_cases())
@settings(max_examples=30, deadline=None)
def test_a_dtensor_lies_where_torch_put_it_on_any_mesh(
    case: tuple[Nested, tuple[int, ...], list[Placement]],
) -> None:
    ranks, shape, placements = case
    whole = numbered(shape)
    params = {r: dtensor_on(r, whole, ranks, placements) for r in torch.tensor(ranks).flatten().tolist()}
    assert_placed(whole, {r: (place_dtensor(p, "w", r), p.to_local()) for r, p in params.items()})


class Pair(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)


@on_ranks(4)
def test_fsdp_over_tensor_parallelism_lies_where_its_shards_are(rank: int, world: int) -> None:
    """Even and uneven: some of its shards are strided, some empty."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "tp"))
    strided = 0
    for width, hidden in [(8, 8), (5, 7), (3, 2), (1, 6)]:
        torch.manual_seed(1)
        model = Pair(width, hidden)
        wholes = {name: param.detach().clone() for name, param in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fsdp"])
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            strided += any(isinstance(placement, _StridedShard) for placement in param.placements)
            placed: list[Any] = [None] * world
            dist.all_gather_object(placed, (place_dtensor(param, name, rank), param.to_local().detach()))
            assert_placed(wholes[name], dict(enumerate(placed)))
    assert strided == 8


@pytest.mark.pitfall("P24")
def test_a_new_mesh_of_the_same_shape_places_anew() -> None:
    """Meshes of one shape with the ranks in another order each time."""
    whole = numbered((5, 2))
    numels = []
    for order in ([[0, 1], [2, 3]], [[3, 1], [2, 0]], [[0, 2], [1, 3]]):
        params = {rank: dtensor_on(rank, whole, order, [Shard(0), Replicate()]) for rank in range(4)}
        layouts = {rank: place_dtensor(param, "w", rank) for rank, param in params.items()}
        assert_placed(whole, {rank: (layouts[rank], param.to_local()) for rank, param in params.items()})
        numels.append(tuple(piece.numel for piece in layouts[0].layout.pieces))
    assert numels == [(6, 6, 4, 4), (4, 6, 4, 6), (6, 4, 6, 4)]


@pytest.mark.parametrize("rank", range(2))
def test_dtensors_without_elements_on_a_rank_are_refused_by_name(rank: int) -> None:
    mesh = mesh_on(rank, [0, 1])
    for param, message in [
        (DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]), "redistribute it to Shard or Replicate"),
        (
            DTensor.from_local(torch.ones(1 + 2 * rank, 2), mesh, [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1)),
            rf"rank {rank} has shape \({1 + 2 * rank}, 2\), torch's chunks have \(2, 2\)",
        ),
        (
            DTensor.from_local(torch.ones(2, 2), mesh_on(rank, [1 - rank]), [Replicate()], run_check=False),
            f"without this rank, {rank}",
        ),
    ]:
        with pytest.raises(ValueError, match=rf"parameter 'layer\.w' is a DTensor.*{message}"):
            place_dtensor(param, "layer.w", rank)


def test_replicas_are_whole_and_named_once() -> None:
    placed = place_replicated(torch.ones(3, 2), [4, 1])
    assert placed.ranks == (1, 4) and placed.layout.replicas == (1, 0)
    assert all(piece.covers((3, 2)) for piece in placed.layout.pieces)
    with pytest.raises(ValueError, match=r"ranks \[2\] are named twice"):
        place_replicated(torch.ones(3, 2), [2, 1, 2])


# -- parameters on a grid -------------------------------------------------------------------------------------------


TP_FSDP = RankGrid(("tp", "fsdp"), (2, 2), (0, 2, 1, 3))


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    """Of any roles but stages, whose global ranks are in any order."""
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=3, unique=True))
    sizes = [draw(st.integers(2, 3)) for _ in roles]
    ranks = draw(st.permutations(range(1, 3 * prod(sizes), 3)))
    return RankGrid(tuple(sorted(roles, key=ROLES.index)), tuple(sizes), tuple(ranks))


def coordinates(grid: RankGrid) -> dict[int, tuple[int, ...]]:
    return dict(zip(grid.ranks, product(*map(range, grid.sizes)), strict=True))


def random_lengths(source: random.Random, length: int, count: int) -> list[int]:
    """``length`` in parts of any size, some of them empty."""
    bounds = [0, *sorted(source.randint(0, length) for _ in range(count - 1)), length]
    return [stop - start for start, stop in pairwise(bounds)]


def hand_cut(
    whole: Tensor, grid: RankGrid, dims: Mapping[int, int | None], source: random.Random
) -> dict[tuple[int, ...], Tensor]:
    """The shard of each coordinate: the dimensions of the grid cut one after the other, each part in its own way."""
    lengths: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    shards = {}
    for at in product(*map(range, grid.sizes)):
        shard = whole
        for i, dim in dims.items():
            if dim is not None:
                outer = tuple(at[j] for j, other in dims.items() if j < i and other == dim)
                of_part = lengths.setdefault((i, dim, outer), random_lengths(source, shard.shape[dim], grid.sizes[i]))
                shard = shard.split(of_part, dim)[at[i]]
        shards[at] = shard
    return shards


@pytest.mark.pitfall("P14")
@given(grids(), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
@settings(max_examples=30, deadline=None)
def test_plain_shards_of_any_lengths_are_placed_on_any_grid(
    grid: RankGrid, shape: list[int], data: st.DataObject
) -> None:
    """Uneven and empty shards, several cuts of one dimension, copies, and experts that differ between ranks."""
    source = random.Random(data.draw(st.integers(0, 2**32)))
    choices = {
        role: data.draw(
            st.none()
            | st.integers(0, len(shape) - 1)
            | (st.just("unsaid") if role in ("dp", "cp", "ep") else st.none())
        )
        for role in grid.roles
    }
    shard_dims = {role: dim for role, dim in choices.items() if dim != "unsaid"}
    dims = {i: shard_dims.get(role) for i, role in enumerate(grid.roles) if role != "ep" or role in shard_dims}
    apart = [i for i in range(len(grid.sizes)) if i not in dims]
    at = coordinates(grid)
    wholes, shards = {}, {}
    for first in {grid.line(rank, dims) for rank in grid.ranks}:  # one tensor each
        expert = sum(at[first[0]][i] for i in apart)
        whole = numbered([*shape[:-1], shape[-1] + expert])
        of_line = hand_cut(whole, grid, dims, source)
        wholes[first] = whole
        shards |= {rank: of_line[at[rank]] for rank in first}
    placed = place_one(grid, shards, shard_dims)
    copies = prod(grid.sizes[i] for i, dim in dims.items() if dim is None)
    for line, whole in wholes.items():
        if len(line) == 1:
            assert placed[line[0]][0] is None
            continue
        assert_placed(whole, {rank: placed[rank] for rank in line})
        layout = placed[line[0]][0]
        assert layout is not None and len(set(layout.layout.replicas)) == copies


WHOLE = numbered((4, 4))
FSDP = {rank: RankGrid(("fsdp",), (2,), (rank % 2, rank % 2 + 2)) for rank in range(4)}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("param", "grid", "dims", "message"),
    [
        (WHOLE, None, None, r"'w' is a plain tensor, and fsdp_pg=… shards it.*\{'fsdp': 0\}"),
        (WHOLE, TP_FSDP, {"fsdp": 0}, "tp_pg=… shards it along a dimension that nothing says"),
        (
            WHOLE,
            TP_FSDP,
            {"fsdp": 2, "tp": None},
            r"'w'.*shard_dims=\{'fsdp': 2\} cuts along a dimension that it lacks",
        ),
        (WHOLE, TP_FSDP, {"zero": 0}, "shard_dims names 'zero'"),
        (WHOLE, TP_FSDP, {"pp": 0}, "shard_dims names 'pp'"),
        (
            [[0, 1], [2, 3]],
            None,
            None,
            r"'w'.*over ranks \[0, 1, 2, 3\], but the given process groups join ranks \[{even}, {odd}\].*tp_pg=…",
        ),
        ([[0, 3], [1, 2]], TP_FSDP, None, "parameter 'w'.*run across the process groups"),
    ],
)
def test_what_has_no_place_is_refused_by_name(
    rank: int, param: Any, grid: RankGrid | None, dims: Any, message: str
) -> None:
    if isinstance(param, list):
        line = param if grid is None else next(line for line in param if rank in line)
        placements = [Shard(0), Shard(1)][: torch.tensor(line).ndim]
        param = dtensor_on(rank, WHOLE, line, placements)
    expected = message.replace("{even}", str(rank % 2)).replace("{odd}", str(rank % 2 + 2))
    with pytest.raises(ValueError, match=expected):
        place([param], ["w"], grid or FSDP[rank], rank, dims)
