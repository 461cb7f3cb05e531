"""GPUs and links that estimates are made for, what a Muon update takes there, grids of ranks, and their collectives.

[Note: the wave model]
It is the cost of a batched Muon update on a GPU that nobody timed: tiles, waves, memory traffic and launches.
A product of a batch is cut into tiles of 128 × 128 results. As many tiles as the GPU has multiprocessors run at a time,
a wave, and the last wave takes as long as a full one: a staircase in the batch size. A product takes its waves, or the
time that memory needs for its operands and its result where that is longer, and a launch. The passes around it take
their memory traffic and a launch each. Which products run is noted while the kernels' own code runs without data.

The form and what multiplies are the rule's for that GPU. Where it takes the Triton kernel, of a symmetric result the
lower tiles alone are computed, at a part of cuBLAS's rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmuon.kernels import Arithmetic, choose_variant, coefficient_sequence, iterate
from dmuon.planning.profiler import useful_batch_sizes
from dmuon.solver import CostTable, Shape


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.

    Attributes:
        name: what people call it.
        sms: streaming multiprocessors.
        peak_flops: dense fp16 or bf16 tensor-core rate, FLOP/s.
        matmul_efficiency: part of the peak that large matrix products reach in a short run.
        memory_bandwidth: achievable, bytes/s.
        memory: bytes.
        sustained: part of that rate which is left at the clocks that power allows, product after product.
        launch_s: seconds per kernel launch.
    """

    name: str
    sms: int
    peak_flops: float
    matmul_efficiency: float
    memory_bandwidth: float
    memory: int
    # By which products from 4096 on take as long as others published of H100 and H800 (bench/simulate.py --products),
    # at clocks that they do not name. Judgement: so it is on Blackwell, of which nobody published any.
    sustained: float = 0.6
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


# Latencies are those by which NCCL itself chooses algorithms (src/graph/tuning.cc, hwLat, protocol Simple): 3.4 us per
# NVLink step of a ring, 14 us per network step. It adds 8.4 us for each collective (table baseLat).
_NVLINK_S, _NETWORK_S = 3.4e-6, 14e-6
# NVIDIA in NCCL-tests issue 212: 370 GB/s of 450 GB/s is what NCCL reaches over NVLink 4; in issue 290: 46 to 48 GB/s
# per 400 Gb/s NIC. Judgement: one NIC per GPU.
_NVLINK_4, _NDR = Link(_NVLINK_S, 370e9), Link(_NETWORK_S, 46e9)
# NVIDIA H100 architecture whitepaper: 132 SMs in the SXM5 module; the H200 has the same chip. Their datasheets: 1,979
# TFLOP/s with sparsity; dense is half of it.
_HOPPER_SMS, _HOPPER_PEAK = 132, 989.5e12
# The A100's whitepaper: 108 SMs; its datasheet: 312 TFLOP/s dense, 80 GB, and 2,039 GB/s, of which 90 % by judgement;
# stas00/ml-engineering: 86.9 % on an A100 SXM. What is sustained is by published products of the A100, as above.
# NVIDIA in NCCL issue 412: 24 GB/s per 200 Gb/s NIC; judgement: one NIC per GPU.
_A100, _HDR = Device("A100", 108, 312e12, 0.87, 1.8e12, 80 * 10**9, 0.85), Link(_NETWORK_S, 24e9)

HARDWARE: Mapping[str, Hardware] = {
    # Measured on one H200: 790 TFLOP/s in bf16, 8192 on every side, and a copy at 4.3 TB/s, of 4.8 TB/s by its
    # datasheet, which also says 141 GB.
    "h200": Hardware(Device("H200", _HOPPER_SMS, _HOPPER_PEAK, 0.80, 4.3e12, 141 * 10**9), _NVLINK_4, _NDR),
    # stas00/ml-engineering, maximum achievable matmul FLOPS in bf16: 80.3 % on an H100 SXM. Judgement: 90 % of the 3.35
    # TB/s of its datasheet, as on an H200. The datasheet: 80 GB.
    "h100": Hardware(Device("H100", _HOPPER_SMS, _HOPPER_PEAK, 0.80, 3.0e12, 80 * 10**9), _NVLINK_4, _NDR),
    # NVIDIA's HGX B200 datasheet: 4.5 PFLOP/s in bf16 with sparsity, dense is half of it, 180 GB, 7.7 TB/s, of which
    # 90 % by judgement. NCCL counts 40.1 GB/s for each of 18 links of NVLink 5 (src/graph/topo.h, SM100_NVLINK_BW).
    # Judgement: 148 SMs, as programs print; products reach the part of the peak that they reach on an H200; one 400
    # Gb/s NIC per GPU.
    "b200": Hardware(Device("B200", 148, 2.25e15, 0.80, 6.9e12, 180 * 10**9), Link(_NVLINK_S, 720e9), _NDR),
    # GB300 NVL72: 72 GPUs share NVLink, of which a job takes 64. NVIDIA's datasheet: 5 PFLOP/s in bf16 with sparsity,
    # dense is half of it, 288 GB, 8 TB/s, of which 90 % by judgement; an 800 Gb/s adapter per GPU, of which NCCL gets
    # the part that it gets of 400 Gb/s, by judgement. Its article on Blackwell Ultra: 160 SMs.
    "gb300": Hardware(
        Device("GB300", 160, 2.5e15, 0.80, 7.2e12, 288 * 10**9), Link(_NVLINK_S, 720e9), Link(_NETWORK_S, 92e9), 64
    ),
    # As the A800 below, but for NVLink 3, at 300 GB/s each way by the datasheet of the A100 SXM. Judgement: NCCL
    # reaches the part that it reaches of the A800's.
    "a100": Hardware(_A100, Link(_NVLINK_S, 240e9), _HDR),
    # The A800 has the chip of the A100. NVIDIA in NCCL issue 412: 160 GB/s in a node of eight A800, of 200 GB/s.
    "a800": Hardware(replace(_A100, name="A800"), Link(_NVLINK_S, 160e9), _HDR),
}


# -- what an update takes: [Note: the wave model] --------------------------------------------------------------------

_TILE = 128  # judgement: a usual tile of cuBLAS; small matrices get smaller ones, but there launches dominate
_ELEMENT = 2  # bytes of fp16 and bf16

# Of cuBLAS's rate, that of the Triton kernel's tiles: a model of their machine code had 0.65 to 0.87 for the tiles that
# the rule takes on H100 and H200, and was 20 % uncertain itself.
_HALVES_RATE = 0.75


# What an update does beside products, with fp32 gradients as the profiler has. Bytes per element of each pass: momentum
# and norms; what Newton–Schulz takes; the weight. Launches on a number a matrix: sums of the norms' parts, their root.
_PASSES, _NORM_LAUNCHES = (12, 10, 10), 2
UPDATE_BYTES = sum(_PASSES)  # of an element, that pass through memory beside products

_NEWTON_SCHULZ, _DTYPE = coefficient_sequence("polar_express", 5), torch.float16  # the defaults on GPUs


@dataclass(frozen=True, slots=True)
class Product:
    """``(rows, inner) · (inner, columns)`` with so many addends; of a symmetric result perhaps the lower tiles only."""

    rows: int
    inner: int
    columns: int
    addends: int = 0
    halves: bool = False

    @property
    def tiles(self) -> int:
        rows, columns = math.ceil(self.rows / _TILE), math.ceil(self.columns / _TILE)
        return rows * (rows + 1) // 2 if self.halves else rows * columns

    @property
    def moved_bytes(self) -> int:
        """Least traffic: each operand read once, the addends read, the result written."""
        return _ELEMENT * (self.inner * (self.rows + self.columns) + self.rows * self.columns * (1 + self.addends))


@dataclass(frozen=True, slots=True)
class _Recorder(Arithmetic):
    """Notes the products of an iteration, and how many other kernels it launches, instead of computing.

    Symmetric results are halves where the Triton kernel computes them, with ``whole_v``.
    """

    products: list[Product] = field(default_factory=list)
    others: list[None] = field(default_factory=list)

    def multiply(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._noted(a, b)

    def add(self, c: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._noted(a, b, addends=1)

    def symmetric(self, c: Tensor | None, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._noted(a, b, addends=c is not None, halves=self.whole_v)

    def _noted(self, a: Tensor, b: Tensor, addends: int = 0, halves: bool = False) -> Tensor:
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        self.products.append(Product(rows, inner, columns, addends, halves))
        return a.new_empty(rows, columns)

    def round_(self, x: Tensor) -> Tensor:
        # The iteration rounds what it changed in place itself; ``product`` rounds its own results.
        self.others.append(None)
        return x


def wave_costs(device: Device, limits: Mapping[Shape, int]) -> CostTable:
    """Costs of momentum, Newton–Schulz and weight update together, as ``dmuon-profile`` would time them on ``device``.

    All are marked estimated. They are isotonic in the batch size, which takes the values that are worth timing: powers
    of two up to the limit, at most 64.

    Args:
        device: the GPU.
        limits: shape (small side, large side) to the most matrices in a batch.
    """
    costs: dict[Shape, dict[int, int]] = {}
    for shape, limit in limits.items():
        most = 0
        costs[shape] = {}
        for k in useful_batch_sizes(shape, limit, torch.device("cuda")):
            most = max(most, _update_ns(device, shape, k))
            costs[shape][k] = most  # a larger batch may be the first in halves, and shorter
    return CostTable(costs, dict.fromkeys(costs, "estimated"))


def _update_ns(device: Device, shape: Shape, k: int) -> int:
    """Whole nanoseconds of one update of ``k`` matrices. Rounded up, which keeps sums above the whole."""
    variant = choose_variant(shape, k, _NEWTON_SCHULZ, _DTYPE, torch.device("cuda"), multiprocessors=device.sms)
    recorder = _Recorder(_DTYPE, _DTYPE, whole_v=variant.backend == "triton")
    iterate(torch.empty(shape, dtype=_DTYPE, device="meta"), variant, _NEWTON_SCHULZ, recorder)
    products = recorder.products
    # PyTorch copies an addend into the result, for cuBLAS to add to.
    copied = sum(2 * p.addends * _ELEMENT * p.rows * p.columns for p in products if not p.halves)
    passes = k * (shape[0] * shape[1] * UPDATE_BYTES + copied) / device.memory_bandwidth
    copies = sum(bool(p.addends and not p.halves) for p in products)
    launches = len(products) + copies + len(_PASSES) + _NORM_LAUNCHES + len(recorder.others)
    work = sum(product_s(device, product, k) for product in products)
    return max(1, math.ceil((work + passes + launches * device.launch_s) * 1e9))


def product_s(device: Device, product: Product, k: int) -> float:
    """Seconds of one product of a batch of ``k``, without its launch."""
    waves = math.ceil(k * product.tiles / device.sms)
    rate = device.peak_flops * device.matmul_efficiency * device.sustained * (_HALVES_RATE if product.halves else 1)
    tile_s = 2 * _TILE**2 * product.inner * device.sms / rate
    return max(waves * tile_s, k * product.moved_bytes / device.memory_bandwidth)


# -- grids of ranks and their collectives ---------------------------------------------------------------------------

Collective = Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Group = Literal["shard", "replicate", "replica"]

_MESSAGE_S = 1.25e-6  # of one peer in an all-to-all: NCCL-tests issue 78 has 0.32 ms for the smallest over 256 ranks


@dataclass(frozen=True, slots=True)
class Ring:
    """The members of one process group: how many, and over how many nodes."""

    size: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Topology:
    """A grid of ranks, ``replicate × shard × tp``; tensor parallelism lies innermost.

    Attributes:
        world: number of ranks.
        gpus_per_node: ranks of one node.
        replicate: HSDP replicas; ``replicate = world / tp`` is DDP.
        tp: tensor-parallel ranks.

    Raises:
        ValueError: a count that does not divide what it must.
    """

    world: int
    gpus_per_node: int = 8
    replicate: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.replicate * self.tp):
            raise ValueError(
                f"replicate={self.replicate} × tp={self.tp} does not divide world={self.world}; change one of the three"
            )
        if self.world > self.gpus_per_node and self.world % self.gpus_per_node:
            raise ValueError(f"gpus_per_node={self.gpus_per_node} does not divide world={self.world}; give whole nodes")
        if self.gpus_per_node % self.tp and self.tp % self.gpus_per_node:
            raise ValueError(
                f"tp={self.tp} and gpus_per_node={self.gpus_per_node}: one must divide the other; change tp"
            )

    @property
    def shard(self) -> int:
        """Ranks over which FSDP2 shards, and over which owners broadcast."""
        return self.world // (self.replicate * self.tp)

    @property
    def nodes(self) -> int:
        return -(-self.world // self.gpus_per_node)

    def rings(self) -> dict[Group, Ring]:
        """The groups of each kind, by the one over most nodes.

        ``"shard"``: ranks that share a replica and a tensor-parallel index; ``"replicate"``: those that hold the same
        shard; ``"replica"``: those of one replica.
        """
        ranks = np.arange(self.world).reshape(self.replicate, self.shard, self.tp)
        groups: dict[Group, NDArray[np.int64]] = {
            "shard": ranks.transpose(0, 2, 1).reshape(-1, self.shard),
            "replicate": ranks.transpose(1, 2, 0).reshape(-1, self.replicate),
            "replica": ranks.reshape(self.replicate, -1),
        }
        return {
            name: Ring(members.shape[1], max(len(set(row)) for row in (members // self.gpus_per_node).tolist()))
            for name, members in groups.items()
        }


def travel(hardware: Hardware, kind: Collective, ring: Ring, nbytes: float, calls: int = 1) -> tuple[float, float]:
    """Latency of ``calls`` collectives of one kind in one launch, and how long a link carries ``nbytes`` of them all.

    While the latency passes, links carry what others send.

    ``α · hops + bytes / bandwidth`` per link class, collectives as pipelined rings. A ring visits each node once:
    ``nodes - 1`` hops are between nodes, the others inside. It leaves a node over as many network adapters as it has
    members there. Broadcast and reduce move every byte over each link once, all-gather and reduce-scatter
    ``(n - 1) / n`` of them, all-reduce twice that. The hops of an all-reduce are those of a ring or of a tree (a chain
    inside each node, a binary tree over nodes), whichever is shorter.

    Broadcasts from several owners leave in one launch, and go around at the same time: one lap, and a hop more for the
    start of each further one. Reductions do the same. All-gathers that are called one after the other each go around.
    A rank of an all-to-all starts one message after the other, ``_MESSAGE_S`` each.

    Args:
        nbytes: of whole tensors: what every rank holds after an all-gather or before a reduce-scatter. Of an
            all-to-all it is the most that a rank has for all members of the group.
    """
    if ring.size == 1 or calls == 0 or nbytes == 0:
        return 0.0, 0.0
    intra, inter = hardware.intra, hardware.inter
    around = (ring.nodes - 1) * inter.latency_s + (ring.size - ring.nodes) * intra.latency_s
    bandwidth = intra.bandwidth
    if ring.nodes > 1:
        bandwidth = min(bandwidth, ring.size / ring.nodes * inter.bandwidth)
    busy, part = nbytes / bandwidth, (ring.size - 1) / ring.size
    match kind:
        case "broadcast" | "reduce":
            return around + (calls - 1) * intra.latency_s, busy
        case "all_gather" | "reduce_scatter":
            return calls * around, part * busy
        case "all_reduce":
            levels = math.ceil(math.log2(ring.nodes))
            chain = -(-ring.size // ring.nodes) - 1
            tree = levels * inter.latency_s + chain * intra.latency_s
            return 2 * calls * min(around, tree), 2 * part * busy
        case "all_to_all":
            link = intra if ring.nodes == 1 else inter
            near = ring.size // ring.nodes if ring.nodes > 1 else 1  # members that this link does not lead to
            away = nbytes * (ring.size - near) / ring.size
            return link.latency_s + (ring.size - 1) * calls * _MESSAGE_S, away / link.bandwidth
