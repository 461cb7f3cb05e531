"""The wave model: a sub-additive staircase between what the arithmetic needs and one matrix at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.kernels import choose_variant, coefficient_sequence
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


@given(device=devices, shape=shapes)
@settings(max_examples=60, deadline=None)
def test_a_batch_lies_between_its_arithmetic_and_its_matrices_one_by_one(device, shape):
    batches = wave_costs(device, {shape: 64}).costs[shape]
    assert list(batches.values()) == sorted(batches.values())
    for k, ns in batches.items():
        least = 0.5 / 0.75 * 1e9 * k * flops(shape) / (device.peak_flops * device.matmul_efficiency)
        assert least <= ns <= k * batches[1]
