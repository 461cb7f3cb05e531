"""Presets, their lengths, and the restart rule."""

from __future__ import annotations

import itertools

import pytest
import torch

from dmuon.kernels import QUINTICS, choose_variant, coefficient_sequence, orthogonalize, safe_restarts

# The paper's table (arXiv 2505.16932), before the safety factor.
PUBLISHED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)


def is_safe(coefficients, restarts, dtype) -> bool:
    try:
        choose_variant((64, 64), 1, coefficients, dtype, torch.device("cpu"), restarts=restarts)
    except ValueError as error:
        assert "is unsafe for these coefficients" in str(error)
        return False
    return True


def test_derived_polar_express_is_the_published_table():
    s = 1.05
    for ours, (a, b, c) in zip(coefficient_sequence("polar_express", 7), PUBLISHED, strict=True):
        assert ours == pytest.approx((a / s, b / s**3, c / s**5), rel=1e-8)


def test_more_steps_are_derived_where_the_method_defines_them():
    assert coefficient_sequence("polar_express", 9)[:5] == coefficient_sequence("polar_express", 5)
    assert coefficient_sequence("classic", 7) == ((3.4445, -4.7750, 2.0315),) * 7
    with pytest.raises(ValueError, match=r"steps=6.*defines 5; pass steps=5"):
        coefficient_sequence("you", 6)


@pytest.mark.parametrize(
    "bad",
    [
        *("keller", (), ((1.0, 2.0),), ((1, 2, 3), 4)),
        *((1.0, number, 0.5) for number in (10**400, float("nan"))),
    ],
)
def test_malformed_coefficients_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=r"coefficients=.*polar_express"):
        coefficient_sequence(bad, 5)


@pytest.mark.parametrize("preset", QUINTICS)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_automatic_restarts_are_safe_and_fewest(preset, steps, dtype):
    coefficients = coefficient_sequence(preset, steps)
    restarts = safe_restarts(coefficients, dtype)
    assert is_safe(coefficients, restarts, dtype)
    if restarts and dtype in (torch.float16, torch.bfloat16):
        fewer = itertools.combinations(range(1, steps), len(restarts) - 1)
        assert not any(is_safe(coefficients, schedule, dtype) for schedule in fewer)


@pytest.mark.pitfall("P41")
@pytest.mark.parametrize(
    ("preset", "restarts", "dtype"),
    [
        ("polar_express", (), torch.float16),
        ("polar_express", (3,), torch.float16),
        ("you", (3,), torch.float16),
        ("polar_express", (2,), torch.bfloat16),
        ("classic", (2,), torch.bfloat16),
    ],
)
def test_unsafe_restarts_are_refused_with_the_remedy(preset, restarts, dtype):
    with pytest.raises(ValueError, match=r"restarts=.* is unsafe .*use restarts='auto'.*method='standard'"):
        orthogonalize(torch.randn(8, 16), coefficients=preset, restarts=restarts, dtype=dtype)


def test_a_default_device_of_the_users_changes_nothing():
    """Under ``torch.device("meta")``, say: coefficients are computed, and matrices divided, where they are."""
    steps = 17  # nobody else's: what was computed is kept
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    expected = [orthogonalize(x, coefficients=preset) for preset in ("you", "squares")]
    with torch.device("meta"):
        sequence = coefficient_sequence("polar_express", steps)
        found = [orthogonalize(x, coefficients=preset) for preset in ("you", "squares")]
    assert len(sequence) == steps
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
