"""The bench of coefficients: its proof of what blocks of squares do to singular values, and its search."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dmuon.kernels.squares import SQUARES, Square, Squares

BENCH = Path(__file__).resolve().parents[2] / "bench"
FP64 = torch.float64


@pytest.fixture
def coefficients(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    threads = torch.get_num_threads()
    yield importlib.import_module("coefficients")
    torch.set_num_threads(threads)


def values(squares: Squares, sigma: torch.Tensor) -> torch.Tensor:
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


def test_the_proof_sees_a_peak_that_a_grid_does_not(coefficients: ModuleType) -> None:
    """Against the extrema by calculus."""
    quintic = Squares("", ((Square(2.0, (-4.0,), 3.0),),), 5)  # s (2 r² - 4 r + 3), r = s²
    low, high = coefficients.prove(quintic, 0.1, 1.0, accuracy=1e-6)
    roots = [math.sqrt(r) for r in ((12 + math.sqrt(144 - 120)) / 20, (12 - math.sqrt(144 - 120)) / 20)]
    exact = [s * (2 * s**4 - 4 * s**2 + 3) for s in (0.1, 1.0, *roots)]
    assert low == pytest.approx(min(exact), abs=3e-6) and high == pytest.approx(max(exact), abs=3e-6)
    assert low <= min(exact) and high >= max(exact)


def test_enclosures_hold_what_they_enclose(coefficients: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.rand(200, generator=generator, dtype=FP64)
    high = low + 1e-3 * torch.rand(200, generator=generator, dtype=FP64)
    bounds = coefficients.enclose(SQUARES, coefficients.Interval(low, high))
    for share in torch.linspace(0, 1, 21, dtype=FP64):
        inside = values(SQUARES, low + share * (high - low))
        assert (bounds.low <= inside).all() and (inside <= bounds.high).all()
    assert (bounds.high - bounds.low).median() < 0.1


def test_the_noise_of_one_rounding_is_what_a_perturbed_matrix_shows(coefficients: ModuleType) -> None:
    """Sensitivities are derivatives: of a block of 2 x 2 matrices, each stored matrix moved a little."""
    layout = coefficients.Layout(3)
    numbers = torch.linspace(-0.8, 0.9, layout.size, dtype=FP64)[None]
    r = torch.tensor([[0.2, 0.7]], dtype=FP64)
    expected = layout.sensitivities(numbers, layout.matrices(numbers, r), layout.matrices(numbers, r))

    def q(moved: int, step: float) -> torch.Tensor:
        stored, at = [torch.diag(r[0])], 0
        bump = step * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=FP64)
        for j, count in enumerate([*layout.addends, 0]):
            stored[-1] = stored[-1] + (bump if j == moved else 0)
            if j == layout.k:
                return stored[-1]
            value = numbers[0, at] * stored[-1] @ stored[-1] + numbers[0, at + 1] * torch.eye(2, dtype=FP64)
            stored.append(value + sum(numbers[0, at + 2 + i] * stored[i] for i in range(count)))
            at += 2 + count
        raise AssertionError

    for moved in range(layout.k + 1):
        slope = (q(moved, 1e-6) - q(moved, -1e-6))[0, 1] / 2e-6
        assert float(slope) == pytest.approx(float(expected[moved][0, 0, 1]), rel=1e-6)


@pytest.mark.slow
def test_the_search_finds_a_range_from_random_coefficients(coefficients: ModuleType) -> None:
    """Two squares make any polynomial of degree four in R, so two blocks of two reach what Remez finds for 9 and 9."""
    scheme = coefficients.Scheme((coefficients.Layout(2), coefficients.Layout(2)))
    lows = [10**-exponent for exponent in (0.5, 0.7, 0.9, 1.1, 1.3, 1.5)]
    start = scheme.random(24, torch.Generator().manual_seed(0))
    numbers = coefficients.fit(scheme, start, [(low, 4.0, 20) for low in lows] + [(lows[-1], 24.0, 60)], 120)
    sigma = torch.logspace(-1.5, 0, 4000, dtype=FP64)
    error = (scheme.result(numbers, sigma) - 1).abs().amax(1).min().item()
    assert error < 0.1
    quiet = coefficients.quieten(scheme, numbers[:4], torch.full((4,), 1e-2, dtype=FP64), 200, 0.04, 0)
    assert (coefficients.noise(scheme, quiet) < coefficients.noise(scheme, numbers[:4])).all()
    again = coefficients.to_squares(scheme, numbers[0])
    assert [len(block) for block in again.blocks] == [2, 2]
