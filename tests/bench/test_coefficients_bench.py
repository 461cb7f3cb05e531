"""The bench of coefficients: its proof of what blocks of squares do to singular values, and its search."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dmuon.kernels import coefficient_sequence

BENCH = Path(__file__).resolve().parents[2] / "bench"
FP64 = torch.float64
SQUARES: Any = coefficient_sequence("squares", 5)


@pytest.fixture
def coefficients(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    threads = torch.get_num_threads()
    yield importlib.import_module("coefficients")
    torch.set_num_threads(threads)


def values(squares: Any, sigma: torch.Tensor) -> torch.Tensor:
    numerics = importlib.import_module("numerics")
    found: torch.Tensor = numerics.polynomial(sigma, squares)
    return found


def test_the_range_of_the_preset_is_proven_on_the_whole_interval(coefficients: ModuleType) -> None:
    """On [1e-3, 1] inside [0.74, 1.13], as Polar Express or closer; and nothing between 0 and 1 goes further up."""
    low, high = coefficients.prove(SQUARES, 1e-3)
    sigma = torch.logspace(-3, 0, 100_001, dtype=FP64)
    taken = values(SQUARES, sigma)
    assert 0.74 <= low <= taken.min() <= low + 1e-3 and high - 1e-3 <= taken.max() <= high <= 1.13
    below, above = coefficients.prove(SQUARES, 0.0)
    assert -1e-6 <= below <= 0 and above <= 1.13
    assert coefficients.largest_stored(SQUARES) < 100, "far inside the range of fp16"


def test_the_top_bears_what_rounding_adds_to_the_norm(coefficients: ModuleType) -> None:
    assert coefficients.prove(SQUARES, 1.0, 1.002)[1] <= 1.13 + 0.06
