"""Figures of the GPUs and links that estimates are made for; every number says where it is from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dmuon.platform.options import is_integer, is_number

_COUNTS = ("sms", "memory", "gpus_per_node")


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

    Raises:
        ValueError: a figure is not finite and positive, a count not whole, or the efficiency above 1.
    """

    name: str
    sms: int
    peak_flops: float
    matmul_efficiency: float
    memory_bandwidth: float
    launch_s: float
    memory: int

    def __post_init__(self) -> None:
        for name in _numbers(Device):
            _check(f"device_{name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class Link:
    """What a GPU sends over.

    Attributes:
        latency_s: seconds per collective hop or message, the ``α`` of ``α + bytes / bandwidth``.
        bandwidth: bytes/s per GPU, one direction, achievable.

    Raises:
        ValueError: a figure is not finite and positive.
    """

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name in _numbers(Link):
            _check(f"link {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster of equal nodes.

    Attributes:
        device: every GPU.
        intra: link between GPUs of one node.
        inter: link between GPUs of two nodes.
        gpus_per_node: GPUs in a node.
        sources: field path such as ``"device.sms"`` to where the figure is from; every number has one.

    Raises:
        ValueError: ``gpus_per_node`` is not a positive whole number, or a number has no source.
    """

    device: Device
    intra: Link
    inter: Link
    gpus_per_node: int
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        _check("gpus_per_node", self.gpus_per_node)
        missing = [path for path in _PATHS.values() if not self.sources.get(path)]
        if missing:
            raise ValueError(f"sources: nothing says where {', '.join(missing)} is from; add an entry for each")
        object.__setattr__(self, "sources", dict(self.sources))


def hardware(name: str, /, **overrides: float) -> Hardware:
    """The preset ``name``, with single figures replaced; the source of a replaced figure becomes ``"given"``.

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
    figures = dict(_FIGURES[name])
    for flat, value in overrides.items():
        if flat not in _PATHS:
            raise ValueError(f"{flat} is no figure of the hardware; use one of {', '.join(_PATHS)}")
        whole = flat.endswith(_COUNTS) and isinstance(value, float) and value.is_integer()
        figures[flat] = (int(value) if whole else value, "given")
        _check(flat, figures[flat][0])
    return _build(name, figures)


def _build(name: str, figures: Mapping[str, tuple[Any, str]]) -> Hardware:
    """The hardware of these figures, which are there by flat name, each with its source."""
    parts: dict[str, dict[str, Any]] = {"device": {}, "intra": {}, "inter": {}, "": {}}
    for flat, (value, _) in figures.items():
        part, _, field = _PATHS[flat].rpartition(".")
        parts[part][field] = value
    return Hardware(
        device=Device(name=name.upper(), **parts["device"]),
        intra=Link(**parts["intra"]),
        inter=Link(**parts["inter"]),
        sources={_PATHS[flat]: source for flat, (_, source) in figures.items()},
        **parts[""],
    )


def _check(label: str, value: object) -> None:
    count = label.endswith(_COUNTS)
    if not is_number(value) or (count and not is_integer(value)):
        raise ValueError(f"{label}={value!r} must be a {'positive whole number' if count else 'number'}; give one")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{label}={value!r} must be finite and positive; give it in bytes, FLOP and seconds")
    if label.endswith("efficiency") and value > 1:
        raise ValueError(f"{label}={value!r} must be at most 1; give the part of the peak that is reached")


def _numbers(kind: type[Device] | type[Link]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name != "name")


# The flat name of each number, which overrides use, and its field path.
_PATHS: Mapping[str, str] = {
    **{f"device_{name}": f"device.{name}" for name in _numbers(Device)},
    **{f"{link}_{name}": f"{link}.{name}" for link in ("intra", "inter") for name in _numbers(Link)},
    "gpus_per_node": "gpus_per_node",
}

_GH100 = "NVIDIA H100 architecture whitepaper: 132 SMs in the SXM5 module"
_HOPPER_PEAK = "NVIDIA {} datasheet: 1,979 TFLOP/s with sparsity; dense is half of it"
_MAMF = "stas00/ml-engineering, maximum achievable matmul FLOPS, bf16: {}"
_NVLINK_4 = "NVIDIA in NCCL-tests issue 212: 370 GB/s of 450 GB/s is what NCCL reaches over NVLink 4"
_NDR = "NVIDIA in NCCL-tests issue 290: 46 to 48 GB/s per 400 Gb/s NIC; judgement: one NIC per GPU"

# By flat name: a figure, and where it is from. Latencies are those by which NCCL itself chooses algorithms; it adds
# 8.4 us for each collective (table baseLat).
_COMMON: Mapping[str, tuple[float, str]] = {
    "device_launch_s": (4e-6, "judgement: PyTorch queues a kernel in a few microseconds; the GPU starts one in less"),
    "intra_latency_s": (3.4e-6, "NCCL src/graph/tuning.cc, hwLat: 3.4 us per NVLink step of a ring, protocol Simple"),
    "inter_latency_s": (14e-6, "NCCL src/graph/tuning.cc, hwLat: 14 us per network step of a ring, protocol Simple"),
    "gpus_per_node": (8, "NVIDIA HGX boards of this generation carry eight GPUs"),
}
_FIGURES: Mapping[str, Mapping[str, tuple[float, str]]] = {
    "h200": {
        **_COMMON,
        "device_sms": (132, f"{_GH100}; the H200 has the same chip"),
        "device_peak_flops": (989.5e12, _HOPPER_PEAK.format("H200")),
        "device_matmul_efficiency": (0.80, "measured on one H200: 790 TFLOP/s in bf16, 8192 on every side"),
        "device_memory_bandwidth": (4.3e12, "measured on one H200: copy at 4.3 TB/s; its datasheet says 4.8 TB/s"),
        "device_memory": (141 * 10**9, "NVIDIA H200 datasheet: 141 GB"),
        "intra_bandwidth": (370e9, _NVLINK_4),
        "inter_bandwidth": (46e9, _NDR),
    },
    "h100": {
        **_COMMON,
        "device_sms": (132, _GH100),
        "device_peak_flops": (989.5e12, _HOPPER_PEAK.format("H100")),
        "device_matmul_efficiency": (0.80, _MAMF.format("80.3 % on an H100 SXM")),
        "device_memory_bandwidth": (
            3.0e12,
            "judgement: 90 % of the 3.35 TB/s of the NVIDIA H100 datasheet, as on an H200",
        ),
        "device_memory": (80 * 10**9, "NVIDIA H100 datasheet: 80 GB"),
        "intra_bandwidth": (370e9, _NVLINK_4),
        "inter_bandwidth": (46e9, _NDR),
    },
    "a800": {
        **_COMMON,
        "device_sms": (108, "NVIDIA A100 architecture whitepaper: 108 SMs; the A800 has the same chip"),
        "device_peak_flops": (312e12, "NVIDIA A100 datasheet: 312 TFLOP/s dense; the A800 has the same chip"),
        "device_matmul_efficiency": (0.87, f"{_MAMF.format('86.9 % on an A100 SXM')}; the A800 has the same chip"),
        "device_memory_bandwidth": (1.8e12, "judgement: 90 % of the 2,039 GB/s of the NVIDIA A100 80GB datasheet"),
        "device_memory": (80 * 10**9, "NVIDIA A100 80GB datasheet: 80 GB"),
        "intra_bandwidth": (160e9, "NVIDIA in NCCL issue 412: 160 GB/s in a node of eight A800, of 200 GB/s"),
        "inter_bandwidth": (24e9, "NVIDIA in NCCL issue 412: 24 GB/s per 200 Gb/s NIC; judgement: one NIC per GPU"),
    },
}

HARDWARE: Mapping[str, Hardware] = {name: _build(name, figures) for name, figures in _FIGURES.items()}
