"""Newton–Schulz and the Muon update as they run on a GPU, all kernels together, in Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)  # the first test waits for the interpreter


@pytest.fixture(scope="module")
def results(interpreted) -> Any:
    return json.loads(interpreted(__name__))


@pytest.mark.pitfall("P39", "P45", "P47")
def test_whole_runs_equal_fp64_and_launch_the_kernel_for_every_symmetric_product(results):
    assert len(results["runs"]) >= 26
    for name, run in results["runs"].items():
        assert run["error"] <= run["limit"], name
        assert run["launches"] == run["products"], name
        assert run["unmodified"] and run["again"], name


def test_in_fp16_singular_values_of_nearly_singular_matrices_stay_in_range(results):
    assert len(results["stress"]) == 4
    for name, run in results["stress"].items():
        assert run["sigma_max"] <= 1.1236 + 0.06, (name, run)


@pytest.mark.pitfall("P38", "P47")
def test_the_update_takes_three_fused_passes_and_keeps_nan_in_its_matrix(results):
    for name, update in results["updates"].items():
        assert update["error"] <= update["limit"], name
        assert update["passes"] == ["momentum_norms", "normalized_update", "apply_update"], name
        assert update["nan_stays"], name
