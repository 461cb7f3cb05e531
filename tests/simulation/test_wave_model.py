"""The wave model: a sub-additive staircase between what the arithmetic needs and one matrix at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.kernels import choose_variant, coefficient_sequence
from dmuon.kernels import variant as variant_module
from dmuon.kernels.variant import relative_cost
from dmuon.tools.hardware import HARDWARE, wave_costs

DEVICES = {name: machine.device for name, machine in HARDWARE.items()}
H200 = DEVICES["h200"]
SQUARE, WIDE = (1024, 1024), (1024, 4096)  # the kernels choose the standard form, and the Gram form

shapes = st.tuples(st.integers(1, 5000), st.integers(1, 5000)).map(lambda sides: (min(sides), max(sides)))
devices = st.sampled_from(sorted(DEVICES)).map(DEVICES.__getitem__)


def flops(shape) -> int:
    """Of one matrix, whole products: as cuBLAS alone would run it."""
    sequence = coefficient_sequence("polar_express", 5)
    variant = choose_variant(shape, 1, sequence, torch.float16, torch.device("cuda"), backend="torch")
    return 2 * int(relative_cost(shape, sequence, variant, torch.float16))


@pytest.mark.pitfall("P82")
@pytest.mark.parametrize("shape", [SQUARE, WIDE, (128, 2048)])
def test_one_tile_after_the_other_takes_as_long_as_the_operations_that_the_kernels_count(shape):
    """On a device of one processor whose memory and launches take no time; tiles of halves run at 0.75 of the rate."""
    one = replace(H200, sms=1, launch_s=1e-30, memory_bandwidth=1e30)
    table = wave_costs(one, {shape: 1})
    seconds = flops(shape) / (one.peak_flops * one.matmul_efficiency * one.sustained)
    assert 0.5 / 0.75 <= table.costs[shape][1] / (1e9 * seconds) <= 1 / 0.75


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
                for coefficients in (coefficient_sequence("polar_express", 5), *squares):
                    case = shape, k, coefficients, dtype, torch.device("cuda")
                    assert choose_variant(*case, multiprocessors=DEVICES[name].sms) == choose_variant(*case), (shape, k)
    finally:
        choose_variant.cache_clear()


@given(device=devices, shape=shapes)
@settings(max_examples=60, deadline=None)
def test_a_batch_lies_between_its_arithmetic_and_its_matrices_one_by_one(device, shape):
    batches = wave_costs(device, {shape: 64}).costs[shape]
    assert list(batches.values()) == sorted(batches.values())
    for k, ns in batches.items():
        least = 0.5 / 0.75 * 1e9 * k * flops(shape) / (device.peak_flops * device.matmul_efficiency)
        assert least <= ns <= k * batches[1]


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
