"""Hardware presets: every number has a source, and each can be given instead."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, is_dataclass, replace

import pytest

from dmuon.simulation.hardware import HARDWARE, Hardware, Link, hardware

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
def test_every_number_has_a_source_and_every_source_a_number(name):
    sources = HARDWARE[name].sources
    assert set(sources) == set(numbers(HARDWARE[name]))
    for path, source in sources.items():
        assert len(source) > 20 and "{" not in source, f"{name}: {path}: {source!r}"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plausible_gpus_in_si_units(name):
    machine = HARDWARE[name]
    assert 1e14 < machine.device.peak_flops < 1e16
    assert 0.5 < machine.device.matmul_efficiency < 1
    assert 1e12 < machine.device.memory_bandwidth < 1e13
    assert 1e-6 <= machine.device.launch_s < 1e-4
    assert 4e10 < machine.device.memory < 1e12
    assert machine.inter.bandwidth < machine.intra.bandwidth < machine.device.memory_bandwidth
    assert 1e-6 < machine.intra.latency_s < machine.inter.latency_s < 1e-4


def test_achievable_figures_are_below_the_nominal_ones():
    nominal = {"h200": (450e9, 50e9, 4.8e12), "h100": (450e9, 50e9, 3.35e12), "a800": (200e9, 25e9, 2.039e12)}
    assert set(nominal) == set(HARDWARE)
    for name, (nvlink, network, memory) in nominal.items():
        machine = HARDWARE[name]
        assert 0.7 < machine.intra.bandwidth / nvlink < 1
        assert 0.85 < machine.inter.bandwidth / network < 1
        assert 0.85 < machine.device.memory_bandwidth / memory < 1


def test_the_h200_reaches_what_was_measured_on_one():
    device = HARDWARE["h200"].device
    assert device.peak_flops * device.matmul_efficiency == pytest.approx(790e12, rel=0.01)
    assert device.memory_bandwidth == 4.3e12


@pytest.mark.parametrize("name", PRESETS)
def test_without_overrides_the_preset_comes_back(name):
    assert hardware(name) == HARDWARE[name]


@pytest.mark.parametrize("flat", FLAT_NAMES)
def test_an_override_changes_its_figure_and_its_source_only(flat):
    path = flat if flat == "gpus_per_node" else flat.replace("_", ".", 1)
    value = 0.5 if flat == "device_matmul_efficiency" else 16
    changed = hardware("h200", **{flat: value})
    assert numbers(changed) == {**numbers(HARDWARE["h200"]), path: value}
    assert changed.sources == {**HARDWARE["h200"].sources, path: "given"}
    assert HARDWARE["h200"].sources[path] != "given"


def test_counts_may_be_given_as_whole_floats():
    assert repr(hardware("a800", gpus_per_node=4.0).gpus_per_node) == "4"


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "8", None])
@pytest.mark.parametrize("flat", FLAT_NAMES)
def test_an_impossible_value_is_refused_by_the_name_it_was_given_under(flat, value):
    with pytest.raises(ValueError, match=rf"^{flat}="):
        hardware("h100", **{flat: value})


@pytest.mark.parametrize(("flat", "value"), [("device_sms", 1.5), ("gpus_per_node", 7.9), ("device_memory", 1e9 + 0.5)])
def test_counts_are_whole(flat, value):
    with pytest.raises(ValueError, match=f"{flat}=.*whole"):
        hardware("h100", **{flat: value})


def test_an_efficiency_above_one_is_refused():
    with pytest.raises(ValueError, match=r"device_matmul_efficiency=1\.01 must be at most 1"):
        hardware("h100", device_matmul_efficiency=1.01)


def test_unknown_names_are_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="'b300' is unknown; use one of h200, h100, a800"):
        hardware("b300")
    with pytest.raises(ValueError, match=r"bandwidth is no figure.*intra_bandwidth") as error:
        hardware("h100", bandwidth=1e9)
    assert all(flat in str(error.value) for flat in FLAT_NAMES)


def test_a_number_without_a_source_is_refused():
    machine = HARDWARE["h100"]
    sources = {path: source for path, source in machine.sources.items() if path != "inter.latency_s"}
    with pytest.raises(ValueError, match=r"sources: .*inter\.latency_s"):
        replace(machine, sources=sources)


def test_a_description_built_by_hand_is_checked_too():
    with pytest.raises(ValueError, match="link bandwidth=-1"):
        Link(latency_s=1e-6, bandwidth=-1)
    with pytest.raises(ValueError, match="device_sms=0"):
        replace(HARDWARE["h100"].device, sms=0)
    with pytest.raises(ValueError, match="gpus_per_node=0"):
        replace(HARDWARE["h100"], gpus_per_node=0)


def test_descriptions_travel_between_processes():
    copy = pickle.loads(pickle.dumps(HARDWARE["a800"]))
    assert isinstance(copy, Hardware) and copy == HARDWARE["a800"]
