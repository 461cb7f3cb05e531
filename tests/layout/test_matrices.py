"""Of which matrices a tensor consists, and where they lie in its flat shards."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon import MatrixSpec
from dmuon.layout.matrices import local_regions, numbered
from dmuon.layout.shards import flat_layout


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
        ({"num_heads": "2"}, TypeError, "MatrixSpec.num_heads must be integers, got '2'"),
        ({"repeats": 2}, ValueError, "give the parts too"),
        ({"parts": (3, 2), "num_heads": 2}, ValueError, "a part of 3 rows cannot be cut"),
        ({"parts": (2, 2), "num_heads": (1,)}, ValueError, "a number for each"),
        ({"transposed": True, "flattened": True}, ValueError, "cannot be transposed too"),
    ],
)
def test_a_spec_that_describes_nothing_is_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        MatrixSpec(**options)


# -- flat shards: together they are every matrix, exactly once, wherever they are cut ----------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], MatrixSpec]:
    """A shape and what it is made of."""
    transposed, flattened = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    parts = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    repeats = draw(st.integers(1, 3)) if parts else 1
    heads = tuple(draw(st.sampled_from([h for h in (1, 2, 3) if part * repeats % h == 0])) for part in parts)
    outputs, inputs = sum(parts) * repeats or draw(st.integers(1, 9)), draw(st.integers(1, 7))
    shape: tuple[int, ...] = (inputs, outputs) if transposed else (outputs, inputs)
    if flattened:
        shape = (*shape, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    elif draw(st.booleans()):
        shape = (draw(st.integers(1, 3)), *shape)
    return shape, MatrixSpec(parts, repeats, transposed, flattened, heads or 1)


@settings(deadline=None, max_examples=150)
@given(tensors(), st.integers(0, 50), st.integers(1, 5), st.integers(1, 2), st.integers(0, 40))
def test_flat_shards_are_every_matrix_once(
    made: tuple[tuple[int, ...], MatrixSpec], begin: int, shards: int, copies: int, behind: int
) -> None:
    shape, spec = made
    whole = torch.arange(prod(shape)).view(shape)
    length = -(-(begin + prod(shape) + behind) // shards)
    layout = flat_layout(shape, begin, length, shards, copies)
    pieces = [whole.flatten()[piece.runs[1][0][0] : piece.runs[1][0][1]] if piece.numel else whole.flatten()[:0]
              for piece in layout.pieces]  # fmt: skip
    assert [*accumulate(map(len, pieces[:shards]))][-1] == prod(shape)
    matrices = [region.take(whole) for region in local_regions(shape, spec)]
    seen = []
    for share, (number,) in numbered(layout, spec):
        of_stack, part = divmod(number, len(matrices))
        expected = matrices[part][of_stack]
        assert share.spread.layout.shape == expected.shape and len(share.spread.holders) == shards * copies
        for copy in range(copies):
            found = torch.full((expected.numel(),), -1)
            for position in range(copy * shards, (copy + 1) * shards):
                (_, runs), local = share.spread.pieces[position].runs, share.runs[position]
                held = torch.cat([pieces[position][start:stop] for start, stop in local] or [pieces[position][:0]])
                if runs:
                    [(start, stop)] = runs
                    assert (found[start:stop] == -1).all()
                    found[start:stop] = held
            assert torch.equal(found.view(expected.shape), expected)
        seen.append(number)
    assert sorted(seen) == list(range(len(spec.matrices(shape))))
