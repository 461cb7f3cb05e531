"""The dtype that matrices are kept in, on CPUs that multiply bf16 and on those that do not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from stress import MARGIN, Batch, stress_set
from torch import Tensor
from zoo import gaussian, relative

from dmuon.kernels import (
    QUINTICS,
    apply_update_,
    carrier_dtype,
    choose_variant,
    coefficient_sequence,
    normalize,
    normalized_momentum,
    orthogonalize,
    run,
)
from dmuon.kernels.arithmetic import make_arithmetic
from dmuon.kernels.newton_schulz import planned_call

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from numerics import polynomial

storage = importlib.import_module("dmuon.kernels.device")

CPU = torch.device("cpu")
BF16 = torch.bfloat16
POLAR = coefficient_sequence("polar_express", 5)
ROUNDOFF = {BF16: 2.0**-8, torch.float16: 2.0**-11}  # a value rounded once errs by no more of itself


@pytest.fixture(params=[True, False], ids=["multiplied", "rounded"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """A CPU that multiplies bf16, or not: torch computes either way, on any CPU, and only time differs."""
    monkeypatch.setattr(storage, "cpu_multiplies_bf16", lambda: request.param)
    for remembered in (make_arithmetic, planned_call, carrier_dtype):
        remembered.cache_clear()
    yield request.param
    for remembered in (make_arithmetic, planned_call, carrier_dtype):
        remembered.cache_clear()


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return stress_set(((32, 32, 40, 2), (32, 64, 41, 3), (64, 128, 43, 6)))


def standard(x: Tensor) -> Tensor:
    return orthogonalize(x.double(), method="standard")


@pytest.mark.parametrize("backend", ["torch", "split"])
def test_matrices_are_kept_in_bf16_where_the_cpu_multiplies_it(native, backend):
    x, _ = normalize(gaussian(2, 48, 96), BF16, 0.0)
    variant = choose_variant((48, 96), 2, POLAR, BF16, CPU, backend=backend)
    update = run(x.clone(), variant, POLAR, BF16)
    assert x.dtype == update.dtype == carrier_dtype(CPU, BF16) == (BF16 if native else torch.float32)
    assert torch.equal(update, update.to(BF16).to(update.dtype)), "no value that bf16 has not"


@pytest.mark.parametrize("beta", [0.0, -1.7])
@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_a_product_rounds_once(native, dtype, beta):
    """Also what is added, and what is split: no further from the exact result than one rounding takes it."""
    a = gaussian(300, 300)
    a = (a + a.mT).to(dtype).double()
    c = (a - 3 * a.mT).to(dtype).double()
    exact = 0.3 * (a @ a) + beta * c
    for backend in ("torch", "split"):
        arithmetic = make_arithmetic(backend, CPU, dtype)
        left, added = a.to(arithmetic.carrier), c.to(arithmetic.carrier)
        found = arithmetic.symmetric(added, left, left, alpha=0.3, beta=beta)
        assert torch.equal(found, found.to(dtype).to(found.dtype)), "no value that the dtype has not"
        # fp32 sums of 300 products err too, against the largest of them.
        error = (found.double() - exact).abs()
        assert bool((error <= ROUNDOFF[dtype] * exact.abs() + 1e-5 * exact.abs().max()).all())


@pytest.mark.parametrize("preset", QUINTICS)
def test_bf16_stays_in_range_on_the_stress_set(native, batches, preset):
    steps = coefficient_sequence(preset, 5)
    limit = max(polynomial(batch.sigma, steps).max().item() for batch in batches) + MARGIN
    for batch in batches:
        ours = orthogonalize(batch.x.float(), coefficients=preset, dtype=BF16).double()
        assert ours.isfinite().all()
        assert torch.linalg.matrix_norm(ours, 2).max().item() <= limit


def test_a_whole_update_in_bf16_equals_one_in_fp64(native):
    """Momentum, division, Newton–Schulz and weights, which stay fp32."""
    weights, grads, momentum = list(gaussian(3, 32, 48)), list(gaussian(3, 32, 48, seed=1)), torch.zeros(3, 32, 48)
    before = torch.stack(weights)
    x, _ = normalized_momentum(grads, momentum, beta=0.9, nesterov=True, storage=BF16)
    assert x.dtype == carrier_dtype(CPU, BF16)
    update = run(x, choose_variant((32, 48), 3, POLAR, BF16, CPU), POLAR, BF16)
    apply_update_(weights, update, lr=0.5, weight_decay=0.0, scale=1.0)
    assert all(weight.dtype == torch.float32 for weight in weights)
    assert relative((before - torch.stack(weights)) / 0.5, standard(torch.stack(grads))) <= 0.05


# -- which CPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        ({"avx512_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": False}, False),
        (None, False),
    ],
)
def test_which_cpus_multiply_bf16(monkeypatch, found, answer):
    """Not those that only convert it; a torch that cannot tell counts as such a one."""
    if found is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(found), raising=False)
    storage.cpu_multiplies_bf16.cache_clear()
    try:
        assert storage.cpu_multiplies_bf16() is answer
    finally:
        storage.cpu_multiplies_bf16.cache_clear()
