"""The wave model: a sub-additive staircase between what the arithmetic needs and one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.kernels import (
    Variant,
    choose_variant,
    coefficient_sequence,
    iteration_flops,
    newton_schulz_flops,
    rule_on,
)
from dmuon.kernels import variant as variant_module
from dmuon.planning.device_key import NsOptions
from dmuon.tools.simulation.hardware import HARDWARE
from dmuon.tools.simulation.wave_model import _kernels, _update_ns, wave_costs

DEVICES = {name: machine.device for name, machine in HARDWARE.items()}
H200 = DEVICES["h200"]
SQUARE, WIDE = (1024, 1024), (1024, 4096)  # the kernels choose the standard form, and the Gram form

shapes = st.tuples(st.integers(1, 5000), st.integers(1, 5000)).map(lambda sides: (min(sides), max(sides)))
devices = st.sampled_from(sorted(DEVICES)).map(DEVICES.__getitem__)


def polar(steps=5):
    return coefficient_sequence("polar_express", steps)


def chosen(shape, steps=5, dtype=torch.float16, method="auto", backend="torch") -> Variant:
    """What cuBLAS alone would run; with ``backend="triton"`` what an H200 would, of a batch of 8."""
    if backend == "triton":
        return rule_on(H200.sms, shape, 8, polar(steps), dtype)
    return choose_variant(shape, 1, polar(steps), dtype, torch.device("cuda"), method=method, backend="torch")


def kernels(shape, variant, steps=5):
    return _kernels(shape, variant, polar(steps), torch.float16)


def update_ns(device, shape, k, backend="torch", dtype=torch.float16) -> int:
    return _update_ns(device, shape, k, polar(), dtype, backend)


def flops(shape, k=None, device=H200) -> int:
    """Of one matrix, whole products: as cuBLAS alone would run it, or of a batch of ``k`` on ``device``."""
    variant = chosen(shape) if k is None else rule_on(device.sms, shape, k, polar(), torch.float16)
    return iteration_flops(shape, 5, variant.restarts if variant.method == "gram" else None)


@pytest.mark.pitfall("P82")
@pytest.mark.parametrize("shape", [SQUARE, WIDE, (3, 1000)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_noted_products_have_the_operations_that_the_kernels_count(shape, steps, method):
    variant = chosen(shape, steps, method=method)
    products, _ = kernels(shape, variant, steps)
    restarts = variant.restarts if method == "gram" else None
    assert sum(product.flops for product in products) == iteration_flops(shape, steps, restarts)


@pytest.mark.parametrize("shape", [(2048, 2048), WIDE])
def test_blocks_of_squares_are_priced_by_their_products(shape):
    """Two Gram matrices, nine squares and two products with ``X``: fewer than of the steps that they stand for."""
    coefficients = coefficient_sequence("squares", 5)
    variant = choose_variant(shape, 1, coefficients, torch.float16, torch.device("cuda"), backend="torch")
    products, _ = _kernels(shape, variant, coefficients, torch.float16)
    assert len(products) == 13 and sum(product.rows == product.columns for product in products) >= 11
    assert sum(p.flops for p in products) == newton_schulz_flops(
        shape, "squares", 5, torch.float16, torch.device("cuda")
    )
    blocks, steps = (wave_costs(H200, {shape: 1}, options=NsOptions(name)) for name in ("squares", "polar_express"))
    assert blocks.costs[shape][1] < steps.costs[shape][1]


@pytest.mark.parametrize("name", sorted(DEVICES))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rule_is_that_of_a_device_that_is_here(monkeypatch, name, dtype):
    class Properties:
        multi_processor_count = DEVICES[name].sms

    monkeypatch.setattr(variant_module, "products_on", lambda device, dtype: ("triton", ""))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    choose_variant.cache_clear()
    try:
        for shape in [(64, 64), (768, 3072), SQUARE, WIDE, (2048, 2048), (4096, 14336)]:
            for k in (1, 4, 16):
                squares = [coefficient_sequence("squares", 5)] * (dtype == torch.float16)  # bf16 is refused
                for coefficients in (polar(), *squares):
                    here = choose_variant(shape, k, coefficients, dtype, torch.device("cuda"))
                    assert rule_on(DEVICES[name].sms, shape, k, coefficients, dtype) == here, (shape, k)
    finally:
        choose_variant.cache_clear()


@given(device=devices, shape=shapes, a=st.integers(1, 64), b=st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_costs_are_isotonic_and_sub_additive(device, shape, a, b):
    together = update_ns(device, shape, a + b)
    apart = [update_ns(device, shape, k) for k in (a, b)]
    assert max(apart) <= together <= sum(apart), f"{device.name} {shape} {a} + {b}"


@given(device=devices, shape=shapes, k=st.integers(1, 64))
@settings(max_examples=40, deadline=None)
def test_a_batch_lies_between_its_arithmetic_and_its_matrices_one_by_one(device, shape, k):
    bound = 1e9 * k * flops(shape) / (device.peak_flops * device.matmul_efficiency)
    assert bound <= update_ns(device, shape, k) <= k * update_ns(device, shape, 1)


def test_a_table_has_the_batch_sizes_that_would_be_timed_and_says_that_it_is_estimated():
    limits = {(64, 64): 1000, (256, 1024): 6, (512, 512): 1, (16384, 16384): 64}
    table = wave_costs(H200, limits)
    assert {shape: tuple(batches) for shape, batches in table.costs.items()} == {
        (64, 64): (1, 2, 4, 8, 16, 32, 64),
        (256, 1024): (1, 2, 4),
        (512, 512): (1,),
        (16384, 16384): (1,),
    }
    assert table.estimated == tuple(sorted(limits))
    for batches in table.costs.values():
        assert list(batches.values()) == sorted(batches.values())
    assert wave_costs(H200, {}).costs == {}


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        *(({(64, 64): limit}, NsOptions(), r"limits: shape \(64, 64\)") for limit in (0, -1, 1.5, True, None)),
        *(({shape: 1}, NsOptions(), "shape") for shape in ((64, 32), (0, 64), (64,), (1.0, 2.0))),
        ({(64, 64): 1}, NsOptions(dtype=torch.float32), r"options\.dtype=torch\.float32"),
    ],
)
def test_what_cannot_be_modelled_is_refused_by_name(limits, options, message):
    with pytest.raises(ValueError, match=message):
        wave_costs(H200, limits, options=options)
