"""Where the matrices of a tensor lie that is cut: piece by piece what a hand finds in the local tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from harness.hand_laid import SPLITS
from harness.pieces import numbered as counted
from harness.pieces import part_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuon.layout.matrices import Region, numbered, stack_shape
from dmuon.layout.shards import layout_of
from dmuon.model.matrix_spec import MatrixSpec

EXAMPLES = settings(deadline=None, max_examples=100)
Case = tuple[tuple[int, ...], MatrixSpec, tuple[int, ...], tuple[Placement, ...]]


@st.composite
def specs(draw: st.DrawFn) -> tuple[MatrixSpec, int]:
    """A spec, and how many outputs it describes."""
    kind = draw(st.sampled_from(["stored", "transposed", "flattened"]))
    parts = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    repeats = draw(st.integers(1, 3))
    heads = tuple(draw(st.sampled_from([h for h in range(1, 7) if n * repeats % h == 0])) for n in parts)
    flags = {kind: True} if kind != "stored" else {}
    return MatrixSpec(parts, repeats, num_heads=heads, **flags), sum(parts) * repeats


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A tensor, how it splits, the extents of a mesh of up to 8 ranks, and placements."""
    spec, outputs = draw(specs())
    inputs, stack = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    matrix = (inputs, outputs) if spec.transposed else (outputs, inputs)
    if spec.flattened:
        matrix = (*matrix, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    shape = (stack, *matrix) if stack and not spec.flattened else matrix
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).filter(lambda sizes: prod(sizes) <= 8)))
    dims = st.integers(0, min(len(shape), 2 if spec.flattened else 3) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(_StridedShard, dims, split_factor=st.integers(1, 3)),
    )
    return shape, spec, sizes, tuple(draw(st.tuples(*[placement] * len(sizes))))


def by_hand(whole: Tensor, spec: MatrixSpec) -> list[Tensor]:
    """The matrices of a tensor, in order, output by output."""
    stack = whole.flatten(1)[None] if spec.flattened else whole if whole.ndim == 3 else whole[None]
    axis = 2 if spec.transposed else 1
    pattern = spec.parts or (stack.shape[axis],)
    heads = spec.num_heads if isinstance(spec.num_heads, tuple) else (spec.num_heads,) * len(pattern)
    of_part: list[list[int]] = [[] for _ in pattern]
    outputs = iter(range(stack.shape[axis]))
    for _ in range(spec.repeats):
        for part, length in enumerate(pattern):
            of_part[part] += [next(outputs) for _ in range(length)]
    chosen = [
        indices[h * len(indices) // count : (h + 1) * len(indices) // count]
        for indices, count in zip(of_part, heads, strict=True)
        for h in range(count)
    ]
    return [matrix.index_select(axis - 1, torch.tensor(indices)) for matrix in stack for indices in chosen]


@EXAMPLES
@given(cases())
def test_every_share_is_where_a_hand_finds_it(case: Case) -> None:
    """On each rank, also after it was changed; the pieces of a copy make up the matrix."""
    shape, spec, sizes, placements = case
    whole = counted(shape)
    expected = by_hand(whole, spec)
    layout = layout_of(shape, sizes, placements)
    locals_ = [part_of(whole, piece).clone() for piece in layout.pieces]
    before = [0] * len(locals_)  # matrices of the local stack, behind which the next ones lie
    found: list[int] = []
    last: Any = None
    for share, numbers in numbered(layout, spec):
        if last is not None and last.start != share.start:
            for position in last.holders:
                before[position] += last.stop - last.start
        last = share
        found += numbers
        for position, piece in zip(share.holders, share.layout.pieces, strict=True):
            start = before[position]
            stack = stack_shape(locals_[position].shape, spec)
            region = Region(stack, (start, start + len(numbers)), spec.dim, share.runs[position])
            taken = region.take(locals_[position])
            for one, number in zip(taken, numbers, strict=True):
                assert tuple(expected[number].shape) == share.layout.shape
                assert torch.equal(one, part_of(expected[number], piece))
            region.put(locals_[position], list((taken.neg_()).unbind(0)))
    assert sorted(found) == list(range(len(expected)))
    for local, piece in zip(locals_, layout.pieces, strict=True):
        assert torch.equal(local, -part_of(whole, piece)), "each element is in one share"


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_what_the_optimizer_tests_cut_by_hand_is_what_the_spec_says(split: Any) -> None:
    whole = counted(split.shape)
    cut = {tuple(sorted(matrix.flatten().tolist())) for matrix in split.cut(whole)}
    assert cut == {tuple(sorted(matrix.flatten().tolist())) for matrix in by_hand(whole, split.spec)}


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"parts": (2, 2)}, (5, 3), "describes 4 outputs"),
        ({"parts": (2, 2), "transposed": True}, (4, 3), "has 3"),
        ({"num_heads": 2}, (5, 3), "cannot be cut into 2 heads"),
        ({}, (2, 3, 4, 5), "needs MatrixSpec\\(flattened=True\\)"),
        ({"flattened": True}, (4,), "no dimensions to flatten"),
    ],
)
def test_a_spec_refuses_shapes_that_do_not_fit(options: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixSpec(**options).matrix_shape(shape)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"parts": (2, 0)}, ValueError, "parts must be positive"),
        ({"parts": (2, 1.5)}, TypeError, "parts must be integers"),
        ({"parts": 3}, TypeError, "MatrixSpec.parts must be a tuple of integers, got 3"),
        ({"parts": "ab"}, TypeError, "MatrixSpec.parts must be a tuple of integers, got 'ab'"),
        ({"parts": torch.tensor(3)}, TypeError, "MatrixSpec.parts must be a tuple of integers"),
        ({"num_heads": 2.0}, TypeError, "MatrixSpec.num_heads must be integers, got 2.0"),
        ({"num_heads": None}, TypeError, "MatrixSpec.num_heads must be integers, got None"),
        ({"num_heads": torch.tensor(2)}, TypeError, "MatrixSpec.num_heads must be integers"),
        ({"num_heads": "2"}, TypeError, "MatrixSpec.num_heads must be integers, got '2'"),
        ({"repeats": True, "parts": (1,)}, TypeError, "repeats must be integers"),
        ({"repeats": 2}, ValueError, "give the parts too"),
        ({"parts": (3, 2), "num_heads": 2}, ValueError, "a part of 3 rows cannot be cut"),
        ({"parts": (2, 2), "num_heads": (1,)}, ValueError, "a number for each"),
        ({"transposed": True, "flattened": True}, ValueError, "cannot be transposed too"),
        ({"transposed": 1}, TypeError, "must be True or False"),
    ],
)
def test_a_spec_that_describes_nothing_is_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        MatrixSpec(**options)


@pytest.mark.parametrize("placements", [[Shard(2)], [Replicate(), Shard(3)]])
def test_ranks_without_a_kernels_inner_elements_hold_nothing(placements: list[Placement]) -> None:
    """A kernel of 1x1 that is cut behind its second dimension lies whole on the first rank of each copy."""
    layout = layout_of((4, 3, 1, 1), (2,) * len(placements), placements)
    [(share, _)] = numbered(layout, MatrixSpec(flattened=True))
    firsts = [position for position in share.holders if position % 2 == 0]
    assert [*share.spread.parts] == firsts and share.spread.copies == len(firsts)
    assert all(share.spread.parts[position].shape == (4, 3) for position in firsts)
