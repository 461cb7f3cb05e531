"""The wave model: a sub-additive staircase between what the arithmetic needs and one matrix at a time."""

from __future__ import annotations

import math
from dataclasses import replace

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
from dmuon.simulation.hardware import HARDWARE
from dmuon.simulation.wave_model import UPDATE_BYTES, _kernels, _Product, _product_s, _update_ns, describe, wave_costs

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


def test_five_gram_steps_with_a_restart_are_eighteen_products_sixteen_of_them_symmetric():
    assert chosen(WIDE).restarts == (2,)
    products, others = kernels(WIDE, chosen(WIDE))
    # NUMERICS: 8α + 28, or 6α + 14 with halves, in m³: two XXᵀ, two QX, fourteen squares.
    assert len(products) == 18
    assert sum(product.rows == product.columns for product in products) == 16
    assert sum(product.addends for product in products) == 14
    assert others == 2  # aI is added to the first Z of either block in place


def test_a_standard_step_is_two_symmetric_products_and_one_that_is_not():
    products, others = kernels(WIDE, chosen(WIDE, method="standard"))
    assert [product.rows == product.columns for product in products] == [True, True, False] * 5
    assert others == 0
    squares, _ = kernels(SQUARE, chosen(SQUARE, method="standard"))
    assert [product.addends for product in squares] == [product.addends for product in products]


def test_where_the_rule_takes_triton_symmetric_results_are_lower_tiles_but_for_the_first_v():
    variant = chosen(WIDE, backend="triton")
    assert (variant.method, variant.restarts, variant.backend) == ("gram", (2,), "triton")
    products, _ = kernels(WIDE, variant)
    # NUMERICS: 6α + 15 in m³ with one whole V: two XXᵀ and thirteen squares by halves, two QX and V whole.
    assert [sum(p.halves for p in products), sum(not p.halves for p in products)] == [15, 3]
    assert sum(p.flops for p in products) == iteration_flops(WIDE, 5, (2,))
    assert sum(p.copied_bytes > 0 for p in products) == 1, "the kernel reads addends; cuBLAS adds to a copy"
    squares = coefficient_sequence("squares", 5)
    variant = rule_on(H200.sms, (64, 64), 1, squares, torch.float16)
    blocks, _ = _kernels((64, 64), variant, squares, torch.float16)
    assert variant.backend == "triton" and sum(p.halves for p in blocks) == 11 and max(p.addends for p in blocks) > 1


@pytest.mark.parametrize("name", sorted(DEVICES))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rule_is_that_of_a_device_that_is_here(monkeypatch, name, dtype):
    class Properties:
        multi_processor_count = DEVICES[name].sms

    monkeypatch.setattr(variant_module, "unsupported", lambda device, dtype: None)
    monkeypatch.setattr(variant_module, "_build_fault", lambda device, dtype: None)
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


def test_tiles_that_are_not_full_count():
    assert _Product(1024, 4096, 1024, addends=0).tiles == 64
    assert _Product(1025, 4096, 1, addends=0).tiles == 9


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_batches_within_one_wave_take_equal_product_time(name):
    device = replace(DEVICES[name], memory_bandwidth=1e15)  # so that arithmetic alone bounds
    product = _Product(512, 8192, 512, addends=1)  # 16 tiles
    in_one_wave = device.sms // 16
    times = [_product_s(device, product, k) for k in range(1, 3 * in_one_wave)]
    assert len(set(times[:in_one_wave])) == 1
    assert times[in_one_wave] == pytest.approx(2 * times[0])
    assert len(set(times)) == len({math.ceil(k * 16 / device.sms) for k in range(1, 3 * in_one_wave)})


def test_memory_bounds_a_product_with_little_arithmetic():
    product = _Product(8192, 16, 8192, addends=1)
    moved = 2 * (2 * 8192 * 16 + 2 * 8192 * 8192)
    assert _product_s(H200, product, 3) == pytest.approx(3 * moved / H200.memory_bandwidth)


@pytest.mark.parametrize("shape", [(512, 2048), (2048, 8192)])
def test_fused_passes_move_less_than_separate_ones(shape):
    """What other implementations do beside products; the products of the first are the same ones."""
    ours, others = (update_ns(H200, shape, 8, backend) for backend in ("triton", "torch"))
    spared = (84 - UPDATE_BYTES) * 8 * math.prod(shape) / H200.memory_bandwidth
    assert UPDATE_BYTES == 32, "kernels/update_triton.py"
    assert others - ours > 0.99e9 * spared


@given(device=devices, shape=shapes, a=st.integers(1, 64), b=st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_costs_are_isotonic_and_sub_additive(device, shape, a, b):
    together = update_ns(device, shape, a + b)
    apart = [update_ns(device, shape, k) for k in (a, b)]
    assert max(apart) <= together <= sum(apart), f"{device.name} {shape} {a} + {b}"


@given(device=devices, shape=shapes, k=st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_a_batch_lies_between_its_arithmetic_and_its_matrices_one_by_one(device, shape, k):
    bound = 1e9 * k * flops(shape) / (device.peak_flops * device.matmul_efficiency)
    assert bound <= update_ns(device, shape, k) <= k * update_ns(device, shape, 1)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_products_and_updates_of_large_matrices_approach_the_efficiency(name):
    device, product, shape = DEVICES[name], _Product(8192, 8192, 8192, addends=0), (16384, 16384)
    attainable = device.peak_flops * device.matmul_efficiency
    assert 0.95 * attainable < product.flops / _product_s(device, product, 1) <= attainable
    assert 0.9 * attainable < flops(shape) / (update_ns(device, shape, 1) * 1e-9) < attainable


def test_launches_bound_small_matrices_so_that_batching_pays():
    one, many = (update_ns(H200, (64, 64), k) for k in (1, 64))
    assert one > 20 * H200.launch_s * 1e9
    assert many < 1.5 * one


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


def test_more_steps_cost_more_and_bf16_takes_the_standard_form():
    five = wave_costs(H200, {WIDE: 1}).cost(WIDE, 1)
    assert wave_costs(H200, {WIDE: 1}, options=NsOptions(steps=3)).cost(WIDE, 1) < five
    bf16 = wave_costs(H200, {WIDE: 1}, options=NsOptions(dtype=torch.bfloat16)).cost(WIDE, 1)
    assert bf16 == update_ns(H200, WIDE, 1, "triton", torch.bfloat16) > five


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


def test_people_read_which_device_was_modelled():
    assert describe(H200) == "estimated: wave model of H200"
