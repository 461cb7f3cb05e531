"""Where the matrices of a tensor lie that is cut: piece by piece what a hand finds in the local tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmuon import MatrixSpec


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
