"""Coefficients of Newton–Schulz in restart blocks of squares: found from scratch, and proven; fp64, needs no GPU.

    python bench/coefficients.py             # proves the range of those in the library
    python bench/coefficients.py --search    # finds such coefficients from random ones: 15 minutes of one core

A block of ``k`` squares makes ``Q`` of degree ``2^k`` in ``R = XXᵀ``; docs/numerics-and-kernels.md has the theory. The
search goes in three stages, each with fixed seeds:

1. Levenberg–Marquardt on the p-norm of ``f(s) - 1``, from many random starts, over ``[low, 1]`` while ``low`` falls
   from 0.3 to 1e-3;
2. the same on the best, while ``p`` grows to 40, which is all but the largest error;
3. Adam on the best of these, on the largest error plus the noise that rounding causes, to first order. There block two
   must bear what is 4 % above all that block one gives, as rounding may take it there.

Rounding decides which of many good ones a start ends at, so another machine finds others. Of what was found,
bench/numerics.py chooses.

The proof encloses ``f`` on every piece of the interval by its value in the middle and interval arithmetic for its
derivative, and halves pieces until the enclosures of the range are as narrow as asked.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.func import jacfwd, vmap

from dmuon.kernels.squares import SQUARES, Square, Squares

LOWER = 1e-3  # the least singular value that is to become about one, as of Polar Express
TOP = 1.1236  # the largest that f takes, as that of Polar Express with five steps
MARGIN = 0.04  # how far above the values of a block the next is held to its range
FP64 = torch.float64


# -- the search ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """A block of ``k`` squares as a row of numbers: of each square its factor, its identity, its addends from R on.

    To a square all earlier matrices are added but its own root, which the identity in that makes unnecessary:
    ``(S + tI)² = S² + 2tS + t²I``.
    """

    k: int

    @property
    def addends(self) -> list[int]:
        return [max(1, j) for j in range(self.k)]

    @property
    def size(self) -> int:
        return sum(2 + count for count in self.addends)

    def matrices(self, numbers: Tensor, r: Tensor) -> list[Tensor]:
        """``R``, each ``S``, and ``Q``, at eigenvalues ``r`` ``(..., g)`` of R, of ``numbers`` ``(..., size)``."""
        stored, at = [r], 0
        for count in self.addends:
            value = numbers[..., at, None] * stored[-1] ** 2 + numbers[..., at + 1, None]
            for i in range(count):
                value = value + numbers[..., at + 2 + i, None] * stored[i]
            stored.append(value)
            at += 2 + count
        return stored

    def sensitivities(self, numbers: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
        """Of ``Q`` to each stored matrix, to first order: ``(starts, a, b)`` of its entry between eigenvectors a, b."""
        one = torch.ones_like(left[0][:, :, None] * right[0][:, None, :])
        found = [torch.zeros_like(one) for _ in range(self.k)] + [one]
        at = self.size
        for j in reversed(range(self.k)):
            count = self.addends[j]
            at -= 2 + count
            through = found[j + 1]
            found[j] = found[j] + through * numbers[:, at, None, None] * (left[j][:, :, None] + right[j][:, None, :])
            for i in range(count):
                found[i] = found[i] + through * numbers[:, at + 2 + i, None, None]
        return found


@dataclass(frozen=True, slots=True)
class Scheme:
    """Blocks one after the other; ``numbers`` of all of them in one row."""

    blocks: tuple[Layout, ...]

    def split(self, numbers: Tensor) -> list[Tensor]:
        return list(numbers.split([block.size for block in self.blocks], dim=-1))

    def values(self, numbers: Tensor, sigma: Tensor) -> list[Tensor]:
        """The singular values after each block."""
        found = []
        for block, own in zip(self.blocks, self.split(numbers), strict=True):
            sigma = sigma * block.matrices(own, sigma * sigma)[-1]
            found.append(sigma)
        return found

    def result(self, numbers: Tensor, sigma: Tensor) -> Tensor:
        return self.values(numbers, sigma)[-1]

    def random(self, starts: int, generator: torch.Generator) -> Tensor:
        rows = []
        for block in self.blocks:
            numbers = 0.5 * torch.randn(starts, block.size, generator=generator, dtype=FP64)
            at = 0
            for count in block.addends:
                numbers[:, at], last = 1.0, at
                at += 2 + count
            numbers[:, last] = torch.where(torch.rand(starts, generator=generator, dtype=FP64) < 0.5, 1.0, -1.0)
            rows.append(numbers)
        return torch.cat(rows, dim=1)


def fit(scheme: Scheme, numbers: Tensor, schedule: Sequence[tuple[float, float, int]], points: int) -> Tensor:
    """Levenberg–Marquardt on ``(mean |f - 1|^p)^(1/p)`` for each ``(low, p, iterations)``; rows are starts."""
    damping = torch.full((len(numbers),), 0.1, dtype=FP64)
    value = vmap(scheme.result, in_dims=(0, None))
    derivative = vmap(jacfwd(scheme.result), in_dims=(0, None))
    for low, p, iterations in schedule:
        sigma = torch.cat(
            [torch.logspace(math.log10(low), 0, points, dtype=FP64), torch.linspace(0.5, 1, 40, dtype=FP64)]
        )

        def norm(numbers: Tensor, sigma: Tensor = sigma, p: float = p) -> Tensor:
            error = (value(numbers, sigma) - 1).abs()
            most = error.amax(1, keepdim=True)
            found = (most * ((error / most) ** p).mean(1, keepdim=True) ** (1 / p))[:, 0]
            return torch.nan_to_num(found, nan=1e30, posinf=1e30)

        cost = norm(numbers)
        for _ in range(iterations):
            error, slope = value(numbers, sigma) - 1, derivative(numbers, sigma)
            weight = (error.abs() / error.abs().amax(1, keepdim=True)).clamp(min=1e-3) ** (p - 2)
            normal = torch.einsum("bgi,bg,bgj->bij", slope, weight, slope)
            right = torch.einsum("bgi,bg,bg->bi", slope, weight, error) / (p - 1)
            diagonal = normal.diagonal(dim1=1, dim2=2)
            diagonal = damping[:, None] * (diagonal + 1e-9 * diagonal.amax(1, keepdim=True)) + 1e-300
            normal = torch.nan_to_num(normal + torch.diag_embed(diagonal))
            step, _ = torch.linalg.solve_ex(normal, torch.nan_to_num(right)[..., None])
            moved = numbers - step[..., 0]
            moved = torch.where(moved.isfinite(), moved, numbers)
            new = norm(moved)
            better = new < cost
            numbers = torch.where(better[:, None], moved, numbers)
            cost = torch.where(better, new, cost)
            damping = torch.where(better, damping * 0.4, damping * 3).clamp(1e-12, 1e8)
    return numbers


def spread(scheme: Scheme, numbers: Tensor) -> Tensor:
    """Least over largest value of ``f`` on ``[LOWER, 1]``, of each row; -1 where ``f`` changes its sign or explodes."""
    value = scheme.result(numbers, torch.logspace(math.log10(LOWER), 0, 8000, dtype=FP64))
    least, most = value.amin(1), value.amax(1)
    return torch.where((least > 0) & (most < 3), least / most, -1.0)


def noise(scheme: Scheme, numbers: Tensor) -> Tensor:
    """What roundings of one unit in all stored matrices change of the result, to first order; ``(starts,)``.

    Pairs of singular values ``a``, ``b`` stand for the entries between their vectors. An error there of a block's ``Q``
    is multiplied by the ``b`` that enters the block, and passes the blocks after it as an error of their input does:
    by the divided differences of ``f`` there. Entries of a matrix are taken to be as large as its eigenvalues are on
    average; and on the diagonal as large as the eigenvalue, as of matrices whose vectors are axes.
    """
    count = 20
    left = torch.logspace(-3.5, 0, count, dtype=FP64).expand(len(numbers), count)
    right = torch.logspace(-3.45, -0.02, count, dtype=FP64).expand(len(numbers), count)
    passed = []
    for block, own in zip(scheme.blocks, scheme.split(numbers), strict=True):
        of_left, of_right = block.matrices(own, left * left), block.matrices(own, right * right)
        after = left * of_left[-1], right * of_right[-1]
        passed.append((block, own, of_left, of_right, left, right, *after))
        left, right = after
    total = torch.zeros(len(numbers), dtype=FP64)
    for at, (block, own, of_left, of_right, _, entering, _, _) in enumerate(passed):
        gain = torch.ones((), dtype=FP64)
        for _, _, _, _, a, b, fa, fb in passed[at + 1 :]:
            gain = gain * 0.5 * (_divided(a, b, fa, fb, -1.0).abs() + _divided(a, b, fa, fb, 1.0).abs())
        for i, sensitivity in enumerate(block.sensitivities(own, of_left, of_right)):
            error = (sensitivity * entering[:, None, :] * gain) ** 2
            size = (torch.cat([of_left[i], of_right[i]], 1) ** 2).mean(1)
            total = total + size * error.mean((1, 2))
            total = total + (error.diagonal(dim1=1, dim2=2) * of_left[i] ** 2).mean(1)
    return (total + 1e-12).sqrt()


def _divided(a: Tensor, b: Tensor, fa: Tensor, fb: Tensor, sign: float) -> Tensor:
    below = a[:, :, None] + sign * b[:, None, :]
    below = torch.where(below.abs() < 1e-9, 1e-9, below)
    return (fa[:, :, None] + sign * fb[:, None, :]) / below


def quieten(scheme: Scheme, numbers: Tensor, weights: Tensor, iterations: int, margin: float, seed: int) -> Tensor:
    """Adam on the largest error plus ``weights`` times the noise; each row for itself."""
    generator = torch.Generator().manual_seed(seed)
    first, rest = Scheme(scheme.blocks[:1]), Scheme(scheme.blocks[1:])
    parts = [part.clone().requires_grad_() for part in scheme.split(numbers)]
    optimizer = torch.optim.Adam(parts, betas=(0.9, 0.99))
    points, rows = 300, len(numbers)
    for index in range(iterations):
        done = index / iterations
        p = 4 + 28 * max(0.0, min(1.0, (done - 0.1) / 0.6))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 if done < 0.5 else 10 ** (-2.2 * (done - 0.5) / 0.5))
        shift = (torch.rand(points, generator=generator, dtype=FP64) - 0.5) * (-math.log(LOWER) / points)
        sigma = torch.logspace(math.log10(LOWER), 0, points, dtype=FP64) * torch.exp(shift)
        sigma = sigma.clamp(LOWER, 1.001).expand(rows, points)
        whole = torch.cat(parts, dim=1)
        value = scheme.result(whole, sigma)
        if margin:
            above = first.result(parts[0], sigma).amax(1, keepdim=True) * torch.linspace(1, 1 + margin, 30, dtype=FP64)
            value = torch.cat([value, rest.result(torch.cat(parts[1:], dim=1), above)], 1)
        error = (value - 1).abs().clamp(1e-9, 1e6)
        most = error.amax(1, keepdim=True).detach()
        loss = most[:, 0] * ((error / most) ** p).mean(1) ** (1 / p) + weights * noise(scheme, whole)
        optimizer.zero_grad()
        torch.where(loss.isfinite(), loss, 0.0).sum().backward()
        for part in parts:
            assert part.grad is not None
            size = torch.nan_to_num(part.grad.norm(dim=1, keepdim=True), nan=1e9)
            part.grad = torch.nan_to_num(part.grad) * torch.clamp(1 / (size + 1e-12), max=1)
        optimizer.step()
    return torch.cat([part.detach() for part in parts], dim=1)


def search(scheme: Scheme, starts: int, seed: int, report: Callable[[str], None]) -> Tensor:
    """Coefficients as rows, the widest least-to-largest first."""
    lows = [10**-exponent for exponent in torch.linspace(0.5, 3, 14).tolist()]
    curriculum = [(low, 4.0, 10) for low in lows] + [(LOWER, 4.0, 20)]
    best = []
    for batch in range(0, starts, 64):
        generator = torch.Generator().manual_seed(100 * seed + batch)
        numbers = fit(scheme, scheme.random(64, generator), curriculum, 120)
        best.append(numbers[spread(scheme, numbers).argsort(descending=True)[:8]])
        report(f"{batch + 64} starts: least over largest {spread(scheme, torch.cat(best)).max():.3f}")
    numbers = torch.cat(best)
    numbers = fit(scheme, numbers, [(LOWER, 4.0, 80), (LOWER, 8.0, 60), (LOWER, 16.0, 60), (LOWER, 40.0, 80)], 260)
    numbers = numbers[spread(scheme, numbers).argsort(descending=True)[:6]]
    report("polished: " + " ".join(f"{s:.3f}" for s in spread(scheme, numbers).tolist()))
    for margin, iterations in ((0.0, 3000), (MARGIN, 8000)):
        weights = torch.tensor([2e-3, 4e-3], dtype=FP64).repeat_interleave(len(numbers))
        numbers = quieten(scheme, numbers.repeat(2, 1), weights, iterations, margin, seed)
        numbers = numbers[spread(scheme, numbers).argsort(descending=True)[:6]]
        found = zip(spread(scheme, numbers).tolist(), noise(scheme, numbers).tolist(), strict=True)
        report("quieter: " + ", ".join(f"{s:.3f} with noise {n:.0f}" for s, n in found))
    return numbers


def to_squares(scheme: Scheme, numbers: Tensor) -> Squares:
    """One row as the library has it: ten digits, scaled so that the largest value is ``TOP``."""
    top = scheme.result(numbers, torch.logspace(math.log10(LOWER), 0, 200_001, dtype=FP64)).max().item()
    blocks = []
    for index, (block, own) in enumerate(zip(scheme.blocks, scheme.split(numbers), strict=True)):
        squares, values = [], own.tolist()
        for j, count in enumerate(block.addends):
            last = index + 1 == len(scheme.blocks) and j + 1 == block.k
            scaled = [float(f"{v * (TOP / top if last else 1.0):.10g}") for v in values[: 2 + count]]
            squares.append(Square(scaled[0], tuple(scaled[2:]), scaled[1]))
            del values[: 2 + count]
        blocks.append(tuple(squares))
    return Squares(SQUARES.name, tuple(blocks))


# -- the proof -----------------------------------------------------------------------------------------------

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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="find new ones")
    parser.add_argument("--squares", default="4,5", help="of each block (default: 4,5)")
    parser.add_argument("--starts", type=int, default=384, help="random starts (default: 384)")
    parser.add_argument("--seed", type=int, default=4)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = [SQUARES]
    if arguments.search:
        scheme = Scheme(tuple(Layout(int(k)) for k in arguments.squares.split(",")))
        numbers = search(scheme, arguments.starts, arguments.seed, lambda line: print(line, flush=True))
        found = [to_squares(scheme, row) for row in numbers]
    for squares in found:
        low, high = prove(squares, LOWER)
        below = prove(squares, 0.0)
        if arguments.search:
            print(squares)
        print(
            f"[{LOWER:g}, 1] becomes [{low:.4f}, {high:.4f}], [0, 1] stays in [{below[0]:.4f}, {below[1]:.4f}]; "
            f"stored matrices up to {largest_stored(squares):.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
