"""What blocks of squares do to singular values, proven by interval arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from intervals import largest_stored, prove

from dmuon.kernels import coefficient_sequence

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from numerics import polynomial

SQUARES: Any = coefficient_sequence("squares", 5)


def test_the_range_of_the_preset_is_proven_on_the_whole_interval() -> None:
    """On [1e-3, 1] inside [0.74, 1.13], as Polar Express or closer; and nothing between 0 and 1 goes further up."""
    low, high = prove(SQUARES, 1e-3)
    sigma = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    taken = polynomial(sigma, SQUARES)
    assert 0.74 <= low <= taken.min() <= low + 1e-3 and high - 1e-3 <= taken.max() <= high <= 1.13
    below, above = prove(SQUARES, 0.0)
    assert -1e-6 <= below <= 0 and above <= 1.13
    assert largest_stored(SQUARES) < 100, "far inside the range of fp16"


def test_the_top_bears_what_rounding_adds_to_the_norm() -> None:
    assert prove(SQUARES, 1.0, 1.002)[1] <= 1.13 + 0.06
