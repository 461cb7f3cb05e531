"""Hardware presets: plausible GPUs, of which each figure can be given instead."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass

import pytest

from dmuon.tools.simulation.hardware import HARDWARE, hardware

PRESETS = sorted(HARDWARE)
FLAT_NAMES = (
    "device_sms",
    "device_peak_flops",
    "device_matmul_efficiency",
    "device_memory_bandwidth",
    "device_launch_s",
    "device_memory",
    "intra_latency_s",
    "intra_bandwidth",
    "inter_latency_s",
    "inter_bandwidth",
    "gpus_per_node",
)


def numbers(part: object, prefix: str = "") -> dict[str, float]:
    """Field path to value of every number in a hardware description."""
    found: dict[str, float] = {}
    for item in fields(part):
        value = getattr(part, item.name)
        if is_dataclass(value):
            found |= numbers(value, f"{item.name}.")
        elif isinstance(value, (int, float)):
            found[prefix + item.name] = value
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plausible_gpus_in_si_units(name):
    machine = hardware(name)
    assert machine == HARDWARE[name], "without overrides"
    assert 1e14 < machine.device.peak_flops < 1e16
    assert 0.5 < machine.device.matmul_efficiency < 1
    assert 1e12 < machine.device.memory_bandwidth < 1e13
    assert 1e-6 <= machine.device.launch_s < 1e-4
    assert 4e10 < machine.device.memory < 1e12
    assert machine.inter.bandwidth < machine.intra.bandwidth < machine.device.memory_bandwidth
    assert 1e-6 < machine.intra.latency_s < machine.inter.latency_s < 1e-4


@pytest.mark.pitfall("P82")
def test_the_h200_reaches_what_was_measured_on_one():
    device = HARDWARE["h200"].device
    assert device.peak_flops * device.matmul_efficiency == pytest.approx(790e12, rel=0.01)
    assert device.memory_bandwidth == 4.3e12


@pytest.mark.parametrize("flat", FLAT_NAMES)
def test_an_override_changes_its_figure_only(flat):
    path = flat if flat == "gpus_per_node" else flat.replace("_", ".", 1)
    value = 0.5 if flat == "device_matmul_efficiency" else 16
    changed = hardware("h200", **{flat: value})
    assert numbers(changed) == {**numbers(HARDWARE["h200"]), path: value}


@pytest.mark.parametrize("value", [0, math.nan, "8"])
@pytest.mark.parametrize("flat", FLAT_NAMES)
def test_an_impossible_value_is_refused_by_the_name_it_was_given_under(flat, value):
    with pytest.raises(ValueError, match=rf"^{flat}="):
        hardware("h100", **{flat: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hardware("h100", device_sms=1.5), "device_sms=.*whole"),
        (lambda: hardware("h100", gpus_per_node=7.9), "gpus_per_node=.*whole"),
        (lambda: hardware("h100", device_memory=1e9 + 0.5), "device_memory=.*whole"),
        (lambda: hardware("h100", device_matmul_efficiency=1.01), r"device_matmul_efficiency=1\.01 must be at most 1"),
        (lambda: hardware("b300"), "'b300' is unknown; use one of h200, h100, a800"),
        *(
            (lambda: hardware("h100", bandwidth=1e9), rf"bandwidth is no figure.*{flat}")  # and all valid names
            for flat in FLAT_NAMES
        ),
    ],
)
def test_what_no_machine_has_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
