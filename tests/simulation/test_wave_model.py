"""The wave model: a sub-additive staircase between what the arithmetic needs and one matrix at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.kernels import choose_variant, coefficient_sequence, iteration_flops, newton_schulz_flops
from dmuon.kernels.iteration import Iteration, make_iteration
from dmuon.planning.device_key import NsOptions
from dmuon.simulation.hardware import HARDWARE
from dmuon.simulation.wave_model import _kernels, _Product, _product_s, _update_ns, describe, wave_costs

DEVICES = {name: machine.device for name, machine in HARDWARE.items()}
H200 = DEVICES["h200"]
SQUARE, WIDE = (1024, 1024), (1024, 4096)  # the kernels choose the standard form, and the Gram form

shapes = st.tuples(st.integers(1, 5000), st.integers(1, 5000)).map(lambda sides: (min(sides), max(sides)))
devices = st.sampled_from(sorted(DEVICES)).map(DEVICES.__getitem__)


def chosen(shape, steps=5, dtype=torch.float16, method="auto") -> Iteration:
    coefficients = coefficient_sequence("polar_express", steps)
    variant = choose_variant(shape, 1, coefficients, dtype, torch.device("cuda"), method=method, backend="torch")
    return make_iteration(variant, coefficients, dtype)


def update_ns(device, shape, k) -> int:
    return _update_ns(device, shape, k, chosen(shape))


def flops(shape) -> int:
    iteration = chosen(shape)
    return iteration_flops(shape, 5, iteration.restarts if iteration.method == "gram" else None)


@pytest.mark.pitfall("P82")
@pytest.mark.parametrize("shape", [SQUARE, WIDE, (3, 1000)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_noted_products_have_the_operations_that_the_kernels_count(shape, steps, method):
    iteration = chosen(shape, steps, method=method)
    products, _ = _kernels(shape, iteration)
    restarts = iteration.restarts if method == "gram" else None
    assert sum(product.flops for product in products) == iteration_flops(shape, steps, restarts)


@pytest.mark.parametrize("shape", [(2048, 2048), WIDE])
def test_blocks_of_squares_are_priced_by_their_products(shape):
    """Two Gram matrices, nine squares and two products with ``X``: fewer than of the steps that they stand for."""
    coefficients = coefficient_sequence("squares", 5)
    variant = choose_variant(shape, 1, coefficients, torch.float16, torch.device("cuda"), backend="torch")
    products, _ = _kernels(shape, make_iteration(variant, coefficients, torch.float16))
    assert len(products) == 13 and sum(product.rows == product.columns for product in products) >= 11
    assert sum(p.flops for p in products) == newton_schulz_flops(
        shape, "squares", 5, torch.float16, torch.device("cuda")
    )
    blocks, steps = (wave_costs(H200, {shape: 1}, options=NsOptions(name)) for name in ("squares", "polar_express"))
    assert blocks.costs[shape][1] < steps.costs[shape][1]


def test_five_gram_steps_with_a_restart_are_eighteen_products_sixteen_of_them_symmetric():
    assert chosen(WIDE).restarts == (2,)
    products, others = _kernels(WIDE, chosen(WIDE))
    # NUMERICS: 8α + 28, or 6α + 14 with halves, in m³: two XXᵀ, two QX, fourteen squares.
    assert len(products) == 18
    assert sum(product.rows == product.columns for product in products) == 16
    assert sum(product.addend for product in products) == 14
    assert others == 2  # aI is added to the first Z of either block in place


def test_a_standard_step_is_two_symmetric_products_and_one_that_is_not():
    products, others = _kernels(WIDE, chosen(WIDE, method="standard"))
    assert [product.rows == product.columns for product in products] == [True, True, False] * 5
    assert others == 0
    squares, _ = _kernels(SQUARE, chosen(SQUARE, method="standard"))
    assert [product.addend for product in squares] == [product.addend for product in products]


def test_tiles_that_are_not_full_count():
    assert _Product(1024, 4096, 1024, addend=False).tiles == 64
    assert _Product(1025, 4096, 1, addend=False).tiles == 9


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_batches_within_one_wave_take_equal_product_time(name):
    device = replace(DEVICES[name], memory_bandwidth=1e15)  # so that arithmetic alone bounds
    product = _Product(512, 8192, 512, addend=True)  # 16 tiles
    in_one_wave = device.sms // 16
    times = [_product_s(device, product, k) for k in range(1, 3 * in_one_wave)]
    assert len(set(times[:in_one_wave])) == 1
    assert times[in_one_wave] == pytest.approx(2 * times[0])
    assert len(set(times)) == len({math.ceil(k * 16 / device.sms) for k in range(1, 3 * in_one_wave)})


def test_memory_bounds_a_product_with_little_arithmetic():
    product = _Product(8192, 16, 8192, addend=True)
    moved = 2 * (2 * 8192 * 16 + 2 * 8192 * 8192)
    assert _product_s(H200, product, 3) == pytest.approx(3 * moved / H200.memory_bandwidth)


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
    device, product, shape = DEVICES[name], _Product(8192, 8192, 8192, addend=False), (16384, 16384)
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
    assert bf16 == _update_ns(H200, WIDE, 1, chosen(WIDE, dtype=torch.bfloat16)) > five


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
