"""Estimated cost of a batched Muon update on a GPU that nobody timed: tiles, waves, memory traffic and launches.

A product of a batch is cut into tiles of 128 × 128 results. As many tiles as the GPU has multiprocessors run at a time,
a wave, and the last wave takes as long as a full one: a staircase in the batch size. A product takes its waves, or the
time that memory needs for its operands and its result where that is longer, and a launch. The passes around it take
their memory traffic and a launch each. Which products run is noted while the kernels' own code runs without data.

Every product is counted whole, as cuBLAS computes it. dmuon's Triton kernel computes symmetric results by halves, where
a rule or a measurement chooses it: then an update takes less time than this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmuon.kernels import (
    HALF,
    Arithmetic,
    Iteration,
    choose_variant,
    coefficient_sequence,
    iterate,
    make_iteration,
)
from dmuon.planning.device_key import NsOptions
from dmuon.planning.profiler import useful_batch_sizes
from dmuon.platform.options import is_integer
from dmuon.simulation.hardware import Device
from dmuon.solver import CostTable, Shape

_TILE = 128  # judgement: a usual tile of cuBLAS; small matrices get smaller ones, but there launches dominate
_ELEMENT = 2  # bytes of fp16 and bf16

# Bytes per element of each pass of the update that is no product, with fp32 gradients as the profiler has: gradients to
# a batch, momentum, Nesterov, cast to fp64, norm, scaling to half, cast to fp32, weight decay, weight update.
_PASSES = (8, 12, 12, 12, 8, 6, 6, 8, 12)
_NORM_LAUNCHES = 8  # on one number per matrix: stack, norm, two clamps, reciprocal, comparison, choice, cast

# Sides of the matrix that the products are noted on; each stands for a side of the matrix that is priced.
_SMALL, _LARGE = 2, 3


@dataclass(frozen=True, slots=True)
class _Product:
    """``(rows, inner) · (inner, columns)``, plus an addend or not."""

    rows: int
    inner: int
    columns: int
    addend: bool

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns

    @property
    def tiles(self) -> int:
        return math.ceil(self.rows / _TILE) * math.ceil(self.columns / _TILE)

    @property
    def result_bytes(self) -> int:
        return _ELEMENT * self.rows * self.columns

    @property
    def moved_bytes(self) -> int:
        """Least traffic: each operand read once, the addend read, the result written."""
        operands = _ELEMENT * self.inner * (self.rows + self.columns)
        return operands + self.result_bytes * (2 if self.addend else 1)


@dataclass(frozen=True, slots=True)
class _Recorder(Arithmetic):
    """Notes the products of an iteration, and how many other kernels it launches, instead of computing."""

    products: list[_Product] = field(default_factory=list)
    others: list[None] = field(default_factory=list)

    def product(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        self.products.append(_Product(rows, inner, columns, c is not None))
        return a.new_empty(rows, columns)

    def round_(self, x: Tensor) -> Tensor:
        # The iteration rounds what it changed in place itself; ``product`` rounds its own results.
        self.others.append(None)
        return x


def wave_costs(device: Device, limits: Mapping[Shape, int], *, options: NsOptions | None = None) -> CostTable:
    """Costs of momentum, Newton–Schulz and weight update together, as ``dmuon-profile`` would time them on ``device``.

    All are marked estimated. They are isotonic and sub-additive in the batch size, which takes the values that are
    worth timing: powers of two up to the limit, at most 64.

    Args:
        device: the GPU.
        limits: shape (small side, large side) to the most matrices in a batch.
        options: the Newton–Schulz run; fp16 or bf16. Whether it is in Gram form is the kernels' choice.

    Raises:
        ValueError: a shape is not two positive integers, small side first; a limit is not a positive integer; the
            options are not valid or not in half precision.
    """
    options = options or NsOptions()
    dtype = options.dtype or torch.float16
    if dtype not in HALF:
        raise ValueError(f"options.dtype={dtype} has no wave model; use float16 or bfloat16, or costs='flops'")
    CostTable({shape: {1: 1} for shape in limits})  # refuses a shape by name before it is computed with
    costs: dict[Shape, dict[int, int]] = {}
    for shape, limit in limits.items():
        if not is_integer(limit, 1):
            raise ValueError(f"limits: shape {shape}: {limit!r} must be a positive integer; give the largest batch")
        sequence = coefficient_sequence(options.coefficients, options.steps)
        variant = choose_variant(shape, 1, sequence, dtype, torch.device("cuda"), backend="torch")
        iteration = make_iteration(variant, sequence, dtype)
        sizes = useful_batch_sizes(shape, limit, torch.device("cuda"))
        costs[shape] = {k: _update_ns(device, shape, k, iteration) for k in sizes}
    return CostTable(costs, dict.fromkeys(costs, "estimated"))


def describe(device: Device) -> str:
    """Where the costs of ``wave_costs`` are from, for people."""
    return f"estimated: wave model of {device.name}"


def _update_ns(device: Device, shape: Shape, k: int, iteration: Iteration) -> int:
    """Whole nanoseconds of one update of ``k`` matrices. Rounded up, which keeps sums above the whole."""
    products, others = _kernels(shape, iteration)
    elements = k * shape[0] * shape[1]
    passes = [count * elements / device.memory_bandwidth for count in _PASSES]
    # PyTorch copies an addend into the result, for the product to add to.
    passes += [2 * k * p.result_bytes / device.memory_bandwidth for p in products if p.addend]
    launches = len(products) + len(passes) + _NORM_LAUNCHES + others
    work = sum(_product_s(device, product, k) for product in products)
    return max(1, math.ceil((work + sum(passes) + launches * device.launch_s) * 1e9))


def _product_s(device: Device, product: _Product, k: int) -> float:
    """Seconds of one product of a batch of ``k``, without its launch."""
    waves = math.ceil(k * product.tiles / device.sms)
    tile_s = 2 * _TILE**2 * product.inner * device.sms / (device.peak_flops * device.matmul_efficiency)
    return max(waves * tile_s, k * product.moved_bytes / device.memory_bandwidth)


def _kernels(shape: Shape, iteration: Iteration) -> tuple[list[_Product], int]:
    """The products that ``iteration`` runs on one matrix of ``shape``, in order, and the number of other kernels."""
    recorder = _Recorder(iteration.dtype, iteration.dtype)
    iterate(torch.empty(_SMALL, _LARGE, dtype=iteration.dtype, device="meta"), iteration, recorder)
    side = {_SMALL: shape[0], _LARGE: shape[1]}
    products = [_Product(side[p.rows], side[p.inner], side[p.columns], p.addend) for p in recorder.products]
    return products, len(recorder.others)
