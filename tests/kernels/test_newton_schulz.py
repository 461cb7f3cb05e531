"""Newton–Schulz: both forms, every dtype, hard matrices."""

from __future__ import annotations

import importlib

import pytest
import torch
import zoo
from harness import oracle
from zoo import gaussian, relative

from dmuon.kernels import (
    QUINTICS,
    Arithmetic,
    Variant,
    coefficient_sequence,
    iterate,
    normalize,
    orthogonalize,
)

newton_schulz = importlib.import_module("dmuon.kernels.newton_schulz")

ZOO = zoo.matrices(48, 128)
HALF = (torch.float16, torch.bfloat16)


def exact(x: torch.Tensor, preset: str = "polar_express") -> torch.Tensor:
    """The fp64 standard form."""
    return orthogonalize(x.double(), coefficients=preset, method="standard")


def ideal_maximum(preset: str) -> float:
    """The largest value that exact arithmetic maps a singular value in [0, 1] to."""
    sigma = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    for a, b, c in coefficient_sequence(preset, 5):
        sigma = sigma * (a + sigma**2 * (b + sigma**2 * c))
    return sigma.max().item()


# -- both forms compute the same polynomial ------------------------------------------------------------------


@pytest.mark.parametrize("preset", QUINTICS)
@pytest.mark.parametrize("restarts", [(), (2,), (1, 2, 3, 4)])
def test_gram_form_equals_standard_form_in_fp64(preset, restarts):
    for name, x in ZOO.items():
        gram = orthogonalize(x.double(), coefficients=preset, method="gram", restarts=restarts)
        assert relative(gram, exact(x, preset)) <= 1e-9, name


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_parity_with_torch_muon_in_fp32(method):
    for name, x in ZOO.items():
        ours = orthogonalize(x, coefficients="classic", method=method, eps=1e-7)
        assert relative(ours, oracle.newton_schulz(x, [(3.4445, -4.7750, 2.0315)] * 5, 1e-7)) <= 5e-4, name


# -- accuracy ------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P41")
def test_fp16_gram_form_without_a_restart_visibly_fails():
    """Past the refusal: the harness that passes the default must see the failure that the rule prevents."""
    coefficients = coefficient_sequence("polar_express", 5)
    arithmetic = Arithmetic(torch.float16, torch.float32)
    unsafe = Variant("gram", (), "torch", 1)
    limit = ideal_maximum("polar_express") + 0.06
    bad = set()
    for name, x in ZOO.items():
        normalized, _ = normalize(x[None], torch.float16, 0.0)
        result = iterate(normalized[0], unsafe, coefficients, arithmetic)
        if not result.isfinite().all() or torch.linalg.matrix_norm(result, 2) > limit:
            bad.add(name)
    assert {"rank_one", "rank_four", "half_null", "condition_1e6"} <= bad


# -- scale, zero, NaN ----------------------------------------------------------------------------------------


@pytest.mark.pitfall("P35", "P40")
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-100, -40, -27, 27, 100])
def test_a_power_of_two_changes_nothing(exponent, dtype):
    for name, x in ZOO.items():
        x = torch.where(x.abs() > 2**-20, x, 0.0)  # so that no scaled entry is subnormal
        assert torch.equal(orthogonalize(x * 2.0**exponent, dtype=dtype), orthogonalize(x, dtype=dtype)), name


@pytest.mark.pitfall("P35")
@pytest.mark.parametrize("scale", [1e-44, 1e-42, 1e-38, 3e37])
@pytest.mark.parametrize("streams", [False, True])
def test_extremes_of_fp32_count_for_what_they_are(monkeypatch, scale, streams):
    """Subnormal matrices have few digits, but these are whole numbers of the smallest one: fp64 can hold them."""
    if streams:  # as where nothing waits for a device
        monkeypatch.setattr(newton_schulz, "streams_of", lambda device: torch.cpu)
    x = (ZOO["gaussian"] * scale).clamp(-3e38, 3e38)
    assert relative(orthogonalize(x), exact(x)) <= 5e-5
    assert relative(orthogonalize(x, dtype=torch.float16), exact(x)) <= 1e-2


@pytest.mark.pitfall("P38")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(3, 16, 24), (3, 16, 64), (3, 256, 256)])
def test_nan_and_inf_stay_in_their_own_matrix(poison, shape):
    clean = torch.randn(shape)
    poisoned = clean.clone()
    poisoned[1, 3, 5] = poison
    ours = orthogonalize(poisoned)
    assert ours[1].isnan().any()
    assert torch.equal(ours[[0, 2]], orthogonalize(clean)[[0, 2]])


@pytest.mark.pitfall("P10", "P35")
def test_eps_is_a_lower_clamp_of_the_norm():
    x = torch.randn(8, 16)
    x /= x.norm()
    assert torch.equal(orthogonalize(x * 1e-3, eps=1e-4), orthogonalize(x * 1e-3))
    clamped = orthogonalize(x * 1e-3, eps=1.0, dtype=torch.float64)
    slope = 1.0
    for a, _, _ in coefficient_sequence("polar_express", 5):
        slope *= a
    assert relative(orthogonalize(x * 1e-9, eps=1.0, dtype=torch.float64), x.double() * 1e-9 * slope) < 1e-6
    assert clamped.norm() < orthogonalize(x).norm()


# -- layout --------------------------------------------------------------------------------------------------


def test_strided_input_is_read_right_and_not_modified():
    base = torch.randn(4, 40, 60)
    views = {
        "slice": base[:, 3:35:2, 5:50:3],
        "transpose": base.mT,
        "batch_last": base.permute(1, 2, 0).permute(2, 0, 1)[::2],
        "expanded": base[0].expand(3, 40, 60),
    }
    before = base.clone()
    for name, view in views.items():
        assert relative(orthogonalize(view), orthogonalize(view.clone())) <= 1e-5, name
    assert torch.equal(base, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_has_the_dtype_of_the_input_and_no_graph(dtype):
    x = gaussian(6, 10).to(dtype).requires_grad_()
    ours = orthogonalize(x)
    assert ours.dtype == dtype and not ours.requires_grad
    limit = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert relative(ours, exact(x.detach())) <= limit


# -- calls of small matrices, which take as long as their products -------------------------------------------


def test_what_is_remembered_of_a_call_is_not_taken_for_another():
    x = torch.randn(8, 16)
    assert relative(orthogonalize(x, steps=1), orthogonalize(x, steps=2)) > 0.1
    for flag in ({"steps": True}, {"steps": 1.0}):
        with pytest.raises(TypeError, match="steps must be an int"):
            orthogonalize(x, **flag)
    assert torch.equal(
        orthogonalize(x, coefficients=[[2, -1.5, 0.5]] * 5), orthogonalize(x, coefficients=(2, -1.5, 0.5))
    )
    assert orthogonalize(x.double()).dtype == torch.float64
    assert not torch.equal(orthogonalize(x), orthogonalize(x[None], method="gram")[0])


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: orthogonalize(torch.ones(2, 2, dtype=torch.complex64)), TypeError, "got torch.complex64"),
        (lambda: orthogonalize(torch.ones(4)), ValueError, "two or more dimensions"),
        (lambda: orthogonalize(torch.ones(2, 2), method="fast"), ValueError, "method='fast' is unknown; use"),
        (lambda: orthogonalize(torch.ones(2, 2), eps=float("nan")), ValueError, "eps=nan"),
        (
            lambda: orthogonalize(torch.ones(2, 2), method="standard", restarts=(2,)),
            ValueError,
            "needs the Gram form",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
