"""fp16 on matrices with near-null directions, where rounding noise is amplified: some of stress.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from stress import MARGIN, SMALL, Batch, stress_set

from dmuon.kernels import PRESETS, Variant, coefficient_sequence, orthogonalize

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from numerics import Form, polynomial

# (m, n, seed, every how many kinds)
PLAN = ((32, 32, 40, 1), (32, 64, 41, 2), (64, 128, 43, 3), (96, 224, 9, 10))


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return stress_set(PLAN)


@pytest.mark.pitfall("P61")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("backend", "method"), [("torch", "auto"), ("split", "gram")])
def test_default_fp16_path_holds_on_the_stress_set(batches, preset, backend, method):
    """σmax at most 0.06 above what exact arithmetic gives; directions above 1e-3 are not lost; no NaN.

    ``split`` in fp16 rounds as the Triton kernel does: symmetric results are halves, mirrored.
    """
    steps = coefficient_sequence(preset, 5)
    limit = max(polynomial(batch.sigma, steps).max().item() for batch in batches) + MARGIN
    for batch in batches:
        x = batch.x.float()
        ours = orthogonalize(x, coefficients=preset, dtype=torch.float16, backend=backend, method=method).double()
        assert ours.isfinite().all()
        for name, matrix, sigma, u in zip(batch.names, ours, batch.sigma, batch.u, strict=True):
            assert torch.linalg.matrix_norm(matrix, 2).item() <= limit, name
            kept = sigma >= SMALL
            expected = polynomial(sigma[kept], steps).min().item()
            assert torch.linalg.svdvals(u[:, kept].mT @ matrix).min().item() >= expected - MARGIN, name


@pytest.mark.pitfall("P61")
@pytest.mark.parametrize(("whole_v", "holds"), [(False, False), (True, True)])
def test_the_first_v_after_a_restart_must_not_be_mirrored(batches, whole_v, holds):
    """Polar Express, restart before step 2, as a GPU computes it: the set sees a mirrored ``V``."""
    form = Form("", torch.float16, Variant("gram", (2,), "triton", 1), whole_v=whole_v)
    steps = coefficient_sequence("polar_express", 5)
    largest = exact = 0.0
    for batch in batches:
        ours = form.run(batch.x.float(), steps)
        largest = max(largest, torch.linalg.matrix_norm(ours, 2).max().item())
        exact = max(exact, polynomial(batch.sigma, steps).max().item())
    assert (largest <= exact + MARGIN) == holds, (largest, exact)
