"""Where the elements of a sharded tensor lie: piece by piece what torch's own placements say."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from harness.pieces import numbered, part_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuon.layout.matrices import spread_over_all
from dmuon.layout.shards import layout_from_shapes, layout_of

EXAMPLES = settings(deadline=None, max_examples=40)
Case = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]


@st.composite
def sharded(draw: st.DrawFn, ndim: int = 2, most: int = 9, strided: bool = True) -> Case:
    """A global shape, the extents of a mesh of up to 8 ranks, and placements."""
    shape = draw(st.tuples(*[st.integers(1, most)] * ndim))
    grids = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: prod(sizes) <= 8)
    sizes = tuple(draw(grids))
    dims = st.integers(-ndim, ndim - 1)
    shards = st.builds(Shard, dims)
    choices: list[st.SearchStrategy[Placement]] = [st.just(Replicate()), shards, shards]
    if strided:  # torch takes no negative dimension there
        choices.append(st.builds(_StridedShard, st.integers(0, ndim - 1), split_factor=st.integers(1, 4)))
    return shape, sizes, tuple(draw(st.tuples(*[st.one_of(choices)] * len(sizes))))


def split(tensor: Tensor, placement: Placement, count: int) -> list[Tensor]:
    """What torch gives each of ``count`` ranks."""
    if isinstance(placement, Replicate):
        return [tensor] * count
    assert isinstance(placement, Shard | _StridedShard)
    normal = Shard(placement.dim % tensor.ndim) if isinstance(placement, Shard) else placement
    return normal._split_tensor(tensor, count, with_padding=False)[0]


def locals_of(case: Case) -> list[Tensor]:
    """The local tensors of all positions, split by torch mesh dimension by mesh dimension."""
    shape, sizes, placements = case
    held = [numbered(shape)]
    for size, placement in zip(sizes, placements, strict=True):
        held = [part for tensor in held for part in split(tensor, placement, size)]
    return held


# -- layouts of DTensors --------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P14")
@EXAMPLES
@given(st.one_of(sharded(), sharded(ndim=1, most=20), sharded(ndim=3, most=5)))
@example(((1, 7), (4,), (Shard(0),)))
@example(((5, 3), (4,), (Shard(0),)))
@example(((9, 2), (4, 2), (_StridedShard(0, split_factor=2), Shard(0))))
def test_every_piece_is_the_local_tensor_that_torch_makes(case: Case) -> None:
    layout = layout_of(*case)
    expected = locals_of(case)
    whole = numbered(case[0])
    assert layout.shape == case[0] and len(layout.pieces) == len(expected)
    for position, (piece, local) in enumerate(zip(layout.pieces, expected, strict=True)):
        assert piece.shape == tuple(local.shape) and piece.numel == local.numel(), f"position {position}: {piece}"
        assert torch.equal(part_of(whole, piece), local), f"position {position}: {piece}"
        assert piece.covers(case[0]) == torch.equal(local, whole)
        if not piece.numel:
            assert piece.blocks() == []


@EXAMPLES
@given(sharded())
def test_a_split_dimension_is_one_along_which_pieces_concatenate(case: Case) -> None:
    layout = layout_of(*case)
    expected = locals_of(case)
    whole = numbered(case[0])
    blocks = [len(piece.blocks()) for piece in layout.pieces]
    cut = {dim for local in expected for dim in range(2) if local.shape[dim] != case[0][dim]}
    if layout.split_dim is None:
        assert len(cut) != 1 or max(blocks) > 1
        return
    assert cut == {layout.split_dim} and max(blocks) == 1
    for owner in range(len(expected)):
        parts = spread_over_all(layout).copy_with(owner)
        order = sorted(parts, key=lambda position: parts[position].runs[layout.split_dim])
        together = torch.cat([expected[i] for i in order], layout.split_dim)
        assert torch.equal(together, whole)


# -- layouts of plain shards ----------------------------------------------------------------------------------------


@EXAMPLES
@given(sharded(strided=False))
def test_local_shapes_tell_the_layout(case: Case) -> None:
    shape, sizes, placements = case
    shapes = [tuple(local.shape) for local in locals_of(case)]
    dims = [placement.dim if isinstance(placement, Shard) else None for placement in placements]
    found = layout_from_shapes(shapes, sizes, dims)
    assert found == layout_of(shape, sizes, placements)
    assert found.split_dim == layout_of(shape, sizes, placements).split_dim


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (layout_of, ((4, 4), (2,), (Partial(),)), r"placement P.*redistribute"),
        (layout_of, ((4, 4), (2,), (Shard(2),)), "dimension 2 is cut, but the tensor has 2"),
        (
            layout_from_shapes,
            ([(2, 3), (2, 4)], (2,), (0,)),
            r"\(2, 3\) at position 0 and \(2, 4\) at position 1; dimension 1",
        ),
        (
            layout_from_shapes,
            ([(2, 3), (3, 3)], (2,), (None,)),
            r"\(2, 3\) at position 0 and \(3, 3\) at position 1; dimension 0",
        ),
        (
            layout_from_shapes,
            ([(2, 3), (1, 3), (2, 3), (2, 3)], (2, 2), (None, 0)),
            r"\(1, 3\) at position 1 and \(2, 3\) at position 3",
        ),
    ],
)
def test_what_no_tensor_can_be_cut_into_is_refused(make: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments)
