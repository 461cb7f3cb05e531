"""Estimated cost of a batched Muon update on a GPU that nobody timed: tiles, waves, memory traffic and launches.

A product of a batch is cut into tiles of 128 × 128 results. As many tiles as the GPU has multiprocessors run at a time,
a wave, and the last wave takes as long as a full one: a staircase in the batch size. A product takes its waves, or the
time that memory needs for its operands and its result where that is longer, and a launch. The passes around it take
their memory traffic and a launch each. Which products run is noted while the kernels' own code runs without data.

The form and what multiplies are the rule's for that GPU. Where it takes the Triton kernel, of a symmetric result the
lower tiles alone are computed, at a part of cuBLAS's rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels import (
    HALF,
    Arithmetic,
    Polynomial,
    Square,
    coefficient_sequence,
    iterate,
    make_iteration,
    rule_on,
)
from dmuon.planning.device_key import NsOptions
from dmuon.planning.profiler import useful_batch_sizes
from dmuon.platform.options import is_integer
from dmuon.solver import CostTable, Shape
from dmuon.tools.simulation.hardware import Device

_TILE = 128  # judgement: a usual tile of cuBLAS; small matrices get smaller ones, but there launches dominate
_ELEMENT = 2  # bytes of fp16 and bf16

# Of cuBLAS's rate, that of the Triton kernel's tiles: a model of their machine code had 0.65 to 0.87 for the tiles that
# the rule takes on H100 and H200, and was 20 % uncertain itself.
_HALVES_RATE = 0.75


# What an update does beside products, with fp32 gradients as the profiler has. Bytes per element of each pass: momentum
# and norms; what Newton–Schulz takes; the weight. Launches on a number a matrix: sums of the norms' parts, their root.
_PASSES, _NORM_LAUNCHES = (12, 10, 10), 2
UPDATE_BYTES = sum(_PASSES)  # of an element, that pass through memory beside products

# Sides of the matrix that the products are noted on; each stands for a side of the matrix that is priced.
_SMALL, _LARGE = 2, 3


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
    """Notes the products of an iteration, and how many other kernels it launches, instead of computing."""

    halves: bool = False
    products: list[Product] = field(default_factory=list)
    others: list[None] = field(default_factory=list)

    def product(self, a: Tensor, b: Tensor, c: Tensor | None = None, **_: Any) -> Tensor:
        return self._noted(a, b, addends=c is not None)

    def symmetric(self, a: Tensor, b: Tensor, c: Tensor | None = None, **_: Any) -> Tensor:
        return self._noted(a, b, addends=c is not None, halves=self.halves)

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        if not self.halves:
            return Arithmetic.square(self, s, square, stored, out=out)
        return self._noted(s, s, addends=len(square.addends), halves=True)

    def gram(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._noted(x, x.mT, halves=self.halves)

    def _noted(self, a: Tensor, b: Tensor, addends: int = 0, halves: bool = False) -> Tensor:
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        self.products.append(Product(rows, inner, columns, addends, halves))
        return a.new_empty(rows, columns)

    def round_(self, x: Tensor) -> Tensor:
        # The iteration rounds what it changed in place itself; ``product`` rounds its own results.
        self.others.append(None)
        return x


def wave_costs(device: Device, limits: Mapping[Shape, int], *, options: NsOptions | None = None) -> CostTable:
    """Costs of momentum, Newton–Schulz and weight update together, as ``dmuon-profile`` would time them on ``device``.

    All are marked estimated. They are isotonic in the batch size, which takes the values that are worth timing: powers
    of two up to the limit, at most 64.

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
    sequence = coefficient_sequence(options.coefficients, options.steps)
    costs: dict[Shape, dict[int, int]] = {}
    for shape, limit in limits.items():
        if not is_integer(limit, 1):
            raise ValueError(f"limits: shape {shape}: {limit!r} must be a positive integer; give the largest batch")
        most = 0
        costs[shape] = {}
        for k in useful_batch_sizes(shape, limit, torch.device("cuda")):
            most = max(most, _update_ns(device, shape, k, sequence, dtype))
            costs[shape][k] = most  # a larger batch may be the first in halves, and shorter
    return CostTable(costs, dict.fromkeys(costs, "estimated"))


def describe(device: Device) -> str:
    """Where the costs of ``wave_costs`` are from, for people."""
    return f"estimated: wave model of {device.name}"


def _update_ns(device: Device, shape: Shape, k: int, sequence: Polynomial, dtype: torch.dtype) -> int:
    """Whole nanoseconds of one update of ``k`` matrices. Rounded up, which keeps sums above the whole."""
    variant = rule_on(device.sms, shape, k, sequence, dtype)
    recorder = _Recorder(dtype, dtype, halves=variant.backend == "triton")
    iterate(torch.empty(_SMALL, _LARGE, dtype=dtype, device="meta"), make_iteration(variant, sequence, dtype), recorder)
    side = {_SMALL: shape[0], _LARGE: shape[1]}
    products = [replace(p, rows=side[p.rows], inner=side[p.inner], columns=side[p.columns]) for p in recorder.products]
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
