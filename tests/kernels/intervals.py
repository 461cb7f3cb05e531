"""Proves the range of the coefficients of Newton–Schulz in restart blocks of squares, in fp64.

A block of ``k`` squares makes ``Q`` of degree ``2^k`` in ``R = XXᵀ``; docs/kernels.md has the theory. They were
found by Levenberg–Marquardt on the p-norm of ``f(s) - 1`` from many random starts, and Adam on the largest error
plus the noise that rounding causes.

The proof encloses ``f`` on every piece of the interval by its value in the middle and interval arithmetic for its
derivative, and halves pieces until the enclosures of the range are as narrow as asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon.kernels import Square, Squares

FP64 = torch.float64
# Relative widening of every interval operation, far above the roundings of the few fp64 operations that it is made of.
_SLACK = 1e-14


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a number for each of many pieces at once."""

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, low: Tensor, high: Tensor) -> Interval:
        width = _SLACK * torch.maximum(low.abs(), high.abs())
        return cls(low - width, high + width)

    def __add__(self, other: Interval | float) -> Interval:
        if isinstance(other, Interval):
            return Interval.around(self.low + other.low, self.high + other.high)
        return Interval.around(self.low + other, self.high + other)

    def __mul__(self, other: Interval | float) -> Interval:
        ends = (other.low, other.high) if isinstance(other, Interval) else (torch.full_like(self.low, other),) * 2
        products = torch.stack([a * b for a in (self.low, self.high) for b in ends])
        return Interval.around(products.amin(0), products.amax(0))

    def squared(self) -> Interval:
        largest = torch.maximum(self.low.abs(), self.high.abs()) ** 2
        least = torch.where(
            (self.low <= 0) & (self.high >= 0), 0.0, torch.minimum(self.low.abs(), self.high.abs()) ** 2
        )
        return Interval.around(least, largest)

    def within(self, other: Interval) -> Interval:
        """Both hold."""
        return Interval(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))


def enclose(squares: Squares, sigma: Interval) -> Interval:
    """Bounds of ``f`` on each piece."""
    one = torch.ones_like(sigma.low)
    middle = (sigma.low + sigma.high) / 2
    value, slope = sigma, Interval(one, one)
    exact, unit = Interval(middle, middle), Interval(one, one)
    for block in squares.blocks:
        value, slope = _block(block, value, slope)
        exact, _ = _block(block, exact, unit)
        centred = exact + slope * Interval(sigma.low - middle, sigma.high - middle)
        value = value.within(centred)
    return value


def _block(block: Sequence[Square], x: Interval, slope: Interval) -> tuple[Interval, Interval]:
    """``x Q(x²)`` and its derivative, of ``x`` and its derivative."""
    stored = [x.squared()]
    slopes = [x * slope * 2.0]
    for square in block:
        value = stored[-1].squared() * square.square + square.identity
        derivative = stored[-1] * slopes[-1] * (2 * square.square)
        for factor, s, ds in zip(square.addends, stored, slopes, strict=False):
            value, derivative = value + s * factor, derivative + ds * factor
        stored.append(value)
        slopes.append(derivative)
    return x * stored[-1], slope * stored[-1] + x * slopes[-1]


def prove(squares: Squares, low: float, high: float = 1.0, accuracy: float = 1e-4) -> tuple[float, float]:
    """Bounds that ``f`` keeps on all of ``[low, high]``, at most ``accuracy`` from values that it takes.

    Raises:
        ValueError: 40 halvings do not suffice.
    """
    edges = torch.linspace(low, high, 4097, dtype=FP64)
    pieces = Interval(edges[:-1], edges[1:])
    least, most = math.inf, -math.inf  # of what is settled
    taken_least, taken_most = math.inf, -math.inf  # values of f
    for _ in range(40):
        bounds = enclose(squares, pieces)
        middle = (pieces.low + pieces.high) / 2
        at_middle = enclose(squares, Interval(middle, middle))
        taken_least = min(taken_least, at_middle.high.min().item())
        taken_most = max(taken_most, at_middle.low.max().item())
        settled = (bounds.low >= taken_least - accuracy) & (bounds.high <= taken_most + accuracy)
        least = min([least, *bounds.low[settled].tolist()])
        most = max([most, *bounds.high[settled].tolist()])
        if settled.all():
            return least, most
        a, b, m = pieces.low[~settled], pieces.high[~settled], middle[~settled]
        pieces = Interval(torch.cat([a, m]), torch.cat([m, b]))
    raise ValueError(f"{len(pieces.low)} pieces are not settled; ask for less accuracy than {accuracy}")


def largest_stored(squares: Squares) -> float:
    """The largest eigenvalue that any stored matrix has, of singular values in [0, 1]."""
    sigma, most = torch.linspace(0, 1, 100_001, dtype=FP64), 0.0
    for block in squares.blocks:
        stored = [sigma * sigma]
        for square in block:
            added = sum(factor * s for factor, s in zip(square.addends, stored, strict=False))
            stored.append(square.square * stored[-1] ** 2 + added + square.identity)
        most = max([most, *(s.abs().max().item() for s in stored)])
        sigma = sigma * stored[-1]
    return most
