"""Figures of the GPUs and links that estimates are made for; a comment beside each says where it is from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from dmuon.platform.options import is_number


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.

    Attributes:
        name: what people call it.
        sms: streaming multiprocessors.
        peak_flops: dense fp16 or bf16 tensor-core rate, FLOP/s.
        matmul_efficiency: part of the peak that large matrix products reach.
        memory_bandwidth: achievable, bytes/s.
        launch_s: seconds per kernel launch.
        memory: bytes.
    """

    name: str
    sms: int
    peak_flops: float
    matmul_efficiency: float
    memory_bandwidth: float
    memory: int
    # Judgement: PyTorch queues a kernel in a few microseconds; the GPU starts one in less.
    launch_s: float = 4e-6


@dataclass(frozen=True, slots=True)
class Link:
    """What a GPU sends over.

    Attributes:
        latency_s: seconds per collective hop or message, the ``α`` of ``α + bytes / bandwidth``.
        bandwidth: bytes/s per GPU, one direction, achievable.
    """

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster of equal nodes, with the links within and between them."""

    device: Device
    intra: Link
    inter: Link
    gpus_per_node: int = 8  # NVIDIA HGX boards of these generations carry eight GPUs


def hardware(name: str, /, **overrides: float) -> Hardware:
    """The preset ``name``, with single figures replaced.

    Args:
        name: a key of ``HARDWARE``.
        overrides: figures by flat name, such as ``device_peak_flops``, ``intra_bandwidth``, ``inter_latency_s``
            or ``gpus_per_node``, in the units of the field.

    Raises:
        ValueError: the preset or a figure's name is unknown, or a value is not finite and positive (a count:
            not a positive whole number; the efficiency: above 1).
    """
    if name not in HARDWARE:
        raise ValueError(f"hardware {name!r} is unknown; use one of {', '.join(HARDWARE)}")
    found = HARDWARE[name]
    for flat, value in overrides.items():
        _check(flat, value)
        part, _, field = flat.partition("_")
        if flat in ("device_sms", "device_memory"):
            value = int(value)
        if flat == "gpus_per_node":
            found = replace(found, gpus_per_node=int(value))
        else:
            found = replace(found, **{part: replace(getattr(found, part), **{field: value})})
    return found


def _check(flat: str, value: object) -> None:
    parts = {"device": Device, "intra": Link, "inter": Link}
    known = [f"{part}_{field.name}" for part, kind in parts.items() for field in fields(kind) if field.name != "name"]
    if flat not in (*known, "gpus_per_node"):
        raise ValueError(f"{flat} is no figure of the hardware; use one of {', '.join((*known, 'gpus_per_node'))}")
    if not is_number(value) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{flat}={value!r} must be finite and positive; give it in bytes, FLOP and seconds")
    if flat in ("device_sms", "device_memory", "gpus_per_node") and not float(value).is_integer():
        raise ValueError(f"{flat}={value!r} must be a positive whole number; give one")
    if flat.endswith("efficiency") and value > 1:
        raise ValueError(f"{flat}={value!r} must be at most 1; give the part of the peak that is reached")


# Latencies are those by which NCCL itself chooses algorithms (src/graph/tuning.cc, hwLat, protocol Simple): 3.4 us per
# NVLink step of a ring, 14 us per network step. It adds 8.4 us for each collective (table baseLat).
_NVLINK_S, _NETWORK_S = 3.4e-6, 14e-6
# NVIDIA in NCCL-tests issue 212: 370 GB/s of 450 GB/s is what NCCL reaches over NVLink 4; in issue 290: 46 to 48 GB/s
# per 400 Gb/s NIC. Judgement: one NIC per GPU.
_NVLINK_4, _NDR = Link(_NVLINK_S, 370e9), Link(_NETWORK_S, 46e9)
# NVIDIA H100 architecture whitepaper: 132 SMs in the SXM5 module; the H200 has the same chip. Their datasheets: 1,979
# TFLOP/s with sparsity; dense is half of it.
_HOPPER_SMS, _HOPPER_PEAK = 132, 989.5e12

HARDWARE: Mapping[str, Hardware] = {
    # Measured on one H200: 790 TFLOP/s in bf16, 8192 on every side, and a copy at 4.3 TB/s, of 4.8 TB/s by its
    # datasheet, which also says 141 GB.
    "h200": Hardware(Device("H200", _HOPPER_SMS, _HOPPER_PEAK, 0.80, 4.3e12, 141 * 10**9), _NVLINK_4, _NDR),
    # stas00/ml-engineering, maximum achievable matmul FLOPS in bf16: 80.3 % on an H100 SXM. Judgement: 90 % of the 3.35
    # TB/s of its datasheet, as on an H200. The datasheet: 80 GB.
    "h100": Hardware(Device("H100", _HOPPER_SMS, _HOPPER_PEAK, 0.80, 3.0e12, 80 * 10**9), _NVLINK_4, _NDR),
    # The A800 has the chip of the A100. Its whitepaper: 108 SMs; its datasheet: 312 TFLOP/s dense, 80 GB, and 2,039
    # GB/s, of which 90 % by judgement; stas00/ml-engineering: 86.9 % on an A100 SXM. NVIDIA in NCCL issue 412: 160 GB/s
    # in a node of eight A800, of 200 GB/s, and 24 GB/s per 200 Gb/s NIC; judgement: one NIC per GPU.
    "a800": Hardware(
        Device("A800", 108, 312e12, 0.87, 1.8e12, 80 * 10**9), Link(_NVLINK_S, 160e9), Link(_NETWORK_S, 24e9)
    ),
}
