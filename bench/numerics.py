"""Quality of Newton–Schulz forms in half precision, emulated on CPU, against their cost in products.

The GPU kernel computes symmetric products by lower tiles, mirrors them, and reads a symmetric right factor as its
transpose. In exact arithmetic nothing changes; in fp16 ``R Z`` and its transpose differ, so it matters which products
are mirrored and how they are read. The library's own iteration runs here, with arithmetic that does the same; for
every form and preset this reports, over a deterministic stress set: the largest singular value, the least one among
directions whose singular value was at least 1e-3 of the Frobenius norm, matrices with NaN or inf, and the error
relative to the exact result (the polynomial applied to fp64 singular values).

    python bench/numerics.py [--quick] [--preset NAME] [--out bench/results/numerics]

Costs are in units of m³ multiply-adds: a full square product is 2, its lower half 1, and α is the ratio of the sides.
Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common.results import origin, write_report
from common.stress import FULL_SET, MARGIN, QUICK_SET, SMALL, Batch, stress_set
from torch import Tensor

from dmuon.kernels import (
    PRESETS,
    QUINTICS,
    Iteration,
    Square,
    Squares,
    Variant,
    carrier_dtype,
    coefficient_sequence,
    iterate,
    run,
    safe_restarts,
)
from dmuon.kernels.arithmetic import Arithmetic, SplitArithmetic
from dmuon.kernels.coefficients import SQUARES
from dmuon.kernels.variant import Backend, relative_cost, squares_cost

Steps = tuple[tuple[float, ...], ...]  # of each step, the coefficients of s, s³, s⁵


def polynomial(sigma: Tensor, steps: Steps | Squares) -> Tensor:
    """What exact arithmetic maps singular values to."""
    if isinstance(steps, Squares):
        return of_squares(sigma, steps)
    for step in steps:
        sigma = sigma * _factor(sigma * sigma, step)
    return sigma


def of_squares(sigma: Tensor, squares: Squares) -> Tensor:
    """What the blocks of ``squares`` map singular values to."""
    for block in squares.blocks:
        stored = [sigma * sigma]
        for square in block:
            added = sum(factor * s for factor, s in zip(square.addends, stored, strict=False))
            stored.append(square.square * stored[-1] ** 2 + added + square.identity)
        sigma = sigma * stored[-1]
    return sigma


def _factor(r: Tensor, step: tuple[float, ...]) -> Tensor:
    """``q(r)``, where the step maps ``s`` to ``s q(s²)``."""
    q = torch.zeros_like(r)
    for coefficient in reversed(step):
        q = q * r + coefficient
    return q


# -- forms ---------------------------------------------------------------------------------------------------


class TileArithmetic(SplitArithmetic):
    """The library's halves on the CPU, but as the GPU's kernel reads ``B``: as its transpose, wherever it may."""

    __slots__ = ()

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *, b_symmetric: bool = True, **options: Any
    ) -> Tensor:
        return super().symmetric(a, b.mT if b_symmetric else b, c, **options)

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        """Sums and product are rounded together, once."""
        total = torch.zeros_like(s)
        for addend, factor in zip(stored, square.addends, strict=False):
            total.add_(addend, alpha=factor)
        total.diagonal(dim1=-2, dim2=-1).add_(square.identity)
        return self.symmetric(s, s, total, alpha=square.square, out=total)


@dataclass(frozen=True, slots=True)
class Form:
    """How an iteration is computed: the library's options, or a scheme of higher degree that it does not have.

    ``restarts`` is ``None`` for the standard form. Symmetric products are in full or ``halves``, mirrored, but for the
    first ``V`` after a restart with ``whole_v``; in schemes of higher degree that is the first ``V`` of any block.
    ``cost``: ``p`` and ``q`` of ``p α + q`` half products of m³.
    """

    name: str
    dtype: torch.dtype
    restarts: tuple[int, ...] | None
    cost: tuple[int, int]
    halves: bool = True
    whole_v: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        return (TileArithmetic if self.halves else Arithmetic)(self.dtype, torch.float32)

    def run(self, x: Tensor, steps: Steps | Squares) -> Tensor:
        """``x``, fp32 of Frobenius norm one, after ``steps``; ``x`` is overwritten."""
        arithmetic = self.arithmetic
        x = arithmetic.round_(x)
        if isinstance(steps, Squares):
            return iterate(x, Iteration(steps, "gram", self.restarts or (), self.dtype), arithmetic)
        quintics = tuple((a, b, c) for a, b, c in steps)
        method: Literal["standard", "gram"] = "standard" if self.restarts is None else "gram"
        return iterate(x, Iteration(quintics, method, self.restarts or (), self.dtype, self.whole_v), arithmetic)


def library_forms() -> Iterator[Form]:
    """What the library can run. On GPUs its halves have ``V`` whole: :func:`dmuon.kernels.variant.whole_v`."""

    def form(name: str, dtype: torch.dtype, restarts: tuple[int, ...] | None, halves: bool, whole_v: bool) -> Form:
        backend: Backend = "triton" if halves else "torch"
        counted = dtype if whole_v else torch.float32  # in fp32 nothing is whole
        square, wide = (round(2 * relative_cost((1, n), 5, restarts, backend, counted)) for n in (1, 2))
        return Form(name, dtype, restarts, (wide - square, 2 * square - wide), halves, whole_v)

    yield form("standard fp32, full", torch.float32, None, False, False)
    yield form("standard bf16, full", torch.bfloat16, None, False, False)
    yield form("standard fp16, half", torch.float16, None, True, False)
    for restarts in ((1,), (2,), (3,), (2, 4), (1, 3), ()):
        name = "r" + ",".join(map(str, restarts)) if restarts else "no restart"
        yield form(f"{name}, full", torch.float16, restarts, False, False)
        yield form(f"{name}, half", torch.float16, restarts, True, False)
        if restarts:
            yield form(f"{name}, V whole", torch.float16, restarts, True, True)


class OnCpu(Form):
    """As the library runs bf16 on the CPU that this program runs on, with whole products."""

    def run(self, x: Tensor, steps: Steps | Squares) -> Tensor:
        assert not isinstance(steps, Squares)
        quintics = tuple((a, b, c) for a, b, c in steps)
        return run(
            x.to(carrier_dtype(x.device, self.dtype)), Variant("standard", (), "torch", len(x)), quintics, self.dtype
        )


def cpu_forms() -> Iterator[Form]:
    """bf16, which saves time on CPUs that multiply it."""
    yield OnCpu("standard bf16, on this CPU", torch.bfloat16, None, (20, 10), False)


def squares_forms() -> Iterator[Form]:
    """How the library runs blocks of squares: sums with each addend rounded, or in the product, rounded once."""
    for dtype, halves in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float16, True),
    ):
        backend: Backend = "triton" if halves else "torch"
        square, wide = (round(2 * squares_cost((1, n), SQUARES, backend)) for n in (1, 2))
        name = f"{str(dtype).removeprefix('torch.')}, {'half' if halves else 'full'}"
        yield Form(name, dtype, safe_restarts(SQUARES, dtype), (wide - square, 2 * square - wide), halves)


# -- measurement ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Quality:
    """What a form does to the stress set; ``worst`` names the matrix with the largest singular value."""

    variant: str
    preset: str
    cost: tuple[int, int]
    sigma_max: float = 0.0
    sigma_min: float = math.inf
    nan: int = 0
    rel_worst: float = 0.0
    rel_median: float = 0.0
    worst: str = ""
    half: bool = True
    safe: bool = False


def measure(batches: Sequence[Batch], form: Form, preset: str, steps: Steps | Squares, limit: float) -> Quality:
    result = Quality(form.name, preset, form.cost, half=form.halves)
    errors = []
    for batch in batches:
        output = form.run(batch.x.float(), steps).double()
        finite = output.isfinite().flatten(1).all(1)
        result.nan += int((~finite).sum())
        output = torch.where(finite[:, None, None], output, 0.0)
        exact = (batch.u * polynomial(batch.sigma, steps)[:, None, :]) @ batch.vh
        errors.append(((output - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2)))[finite])
        rotated = batch.u.mT @ output
        gram = rotated @ rotated.mT  # in the basis of the left singular vectors of the input
        largest = torch.linalg.eigvalsh(gram)[:, -1].sqrt()
        if largest.max() > result.sigma_max:
            result.sigma_max, result.worst = largest.max().item(), batch.names[int(largest.argmax())]
        kept = (batch.sigma >= SMALL).double()
        gram = gram * kept[:, :, None] * kept[:, None, :] + torch.diag_embed(4 * (1 - kept))
        least = torch.linalg.eigvalsh(gram[finite])[:, 0].clamp(min=0).sqrt()
        result.sigma_min = min([result.sigma_min, *least.tolist()])
    error = torch.cat(errors)
    result.rel_worst, result.rel_median = error.max().item(), error.median().item()
    result.safe = result.nan == 0 and result.sigma_max <= limit
    return result


# -- report --------------------------------------------------------------------------------------------------

ALPHAS = (1.0, 1.25, 1.5, 2.0, 2.67, 4.0, 5.4)


def cheapest(results: Sequence[Quality], preset: str, alpha: float) -> Quality:
    """The cheapest safe fp16 form with half products; among equals, the one with the least σmax."""
    allowed = [q for q in results if q.preset == preset and q.half and q.safe]
    return min(allowed, key=lambda q: (q.cost[0] * alpha + q.cost[1], q.sigma_max))


def format_cost(units: tuple[int, int]) -> str:
    return f"{units[0]}α+{units[1]}"


def report(results: Sequence[Quality], ideals: dict[str, float], count: int, machine: dict[str, str]) -> str:
    lines = [
        "# Newton–Schulz variants in half precision",
        "",
        f"{count} stress matrices, presets at five steps; fp16 and bf16 emulated (fp32 products, one rounding each).",
        f"{machine['date']}, torch {machine['torch']}, {machine['cpu']}, one thread. `python bench/numerics.py`",
        "",
        "Presets run the library's iteration. Half: every symmetric product is its lower half, mirrored, and reads its",
        "right factor as the transpose, as the GPU's kernel does. V whole: but for the first `V = R Z + aR` after a",
        "restart, a whole product that is read as it is; so the library runs fp16 on GPUs. σmin is over",
        f"directions whose singular value was ≥ {SMALL:g} of the Frobenius norm. Errors are relative to the exact",
        "polynomial of the fp64 singular values. Cost in half products of m³ multiply-adds; α = long side / short.",
        "On this CPU: bf16 multiplied as such where the CPU does.",
        f"Safe: no NaN, and σmax ≤ exact σmax + {MARGIN}.",
        "",
        "## Cheapest safe variant with half products",
        "",
        f"| preset | {' | '.join(f'α = {alpha:g}' for alpha in ALPHAS)} |",
        f"|---|{'---|' * len(ALPHAS)}",
    ]
    for preset in ideals:
        cells = []
        for alpha in ALPHAS:
            q = cheapest(results, preset, alpha)
            cells.append(f"{q.variant}: {q.cost[0] * alpha + q.cost[1]:.1f}")
        lines.append(f"| {preset} | {' | '.join(cells)} |")
    for preset, ideal in ideals.items():
        lines += ["", f"## {preset}: exact σmax {ideal:.4f}, limit {ideal + MARGIN:.4f}", ""]
        lines += [
            "| variant | cost | σmax | σmin | NaN | worst error | median error | safe | worst matrix |",
            "|---|--:|--:|--:|--:|--:|--:|---|---|",
        ]
        if preset == SQUARES.name:
            lines[-2:-2] = [
                "Two restart blocks of squares, degrees 33 and 65. Full: whole products, and each addend of a sum is",
                "rounded. Half: lower halves, mirrored, and each sum is rounded once, as in the GPU's kernel.",
                "",
            ]
        for q in results:
            if q.preset == preset:
                lines.append(
                    f"| {q.variant} | {format_cost(q.cost)} | {q.sigma_max:.3f} | {q.sigma_min:.3f} | {q.nan} "
                    f"| {q.rel_worst:.1e} | {q.rel_median:.1e} | {'yes' if q.safe else 'no'} | {q.worst} |"
                )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small stress set")
    parser.add_argument("--preset", choices=PRESETS, help="this one only (default: all)")
    parser.add_argument("--out", type=Path, help="without suffix")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    batches = stress_set(QUICK_SET if arguments.quick else FULL_SET)
    count = sum(len(batch.names) for batch in batches)
    results, ideals = [], {}
    cases: list[tuple[str, Form, Steps | Squares]] = [
        (preset, form, coefficient_sequence(preset, 5))
        for preset in QUINTICS
        for form in (*library_forms(), *cpu_forms())
    ]
    cases += [(SQUARES.name, form, SQUARES) for form in squares_forms()]
    for preset, form, steps in cases:
        if arguments.preset not in (None, preset):
            continue
        if preset not in ideals:
            ideals[preset] = max(polynomial(batch.sigma, steps).max().item() for batch in batches)
        q = measure(batches, form, preset, steps, ideals[preset] + MARGIN)
        results.append(q)
        print(
            f"{preset:14} {q.variant:30} {format_cost(q.cost):>7}  σ [{q.sigma_min:.3f}, {q.sigma_max:.3f}]  "
            f"NaN {q.nan:3}  error {q.rel_worst:.1e}, median {q.rel_median:.1e}  {'safe' if q.safe else ''}",
            flush=True,
        )
    machine = origin()
    text = report(results, ideals, count, machine)
    print("\n" + "\n".join(text.splitlines()[13:20]))
    if arguments.out is not None:
        document: dict[str, Any] = {
            **machine,
            "matrices": count,
            "exact_sigma_max": ideals,
            "results": [asdict(q) for q in results],
        }
        write_report(arguments.out, document, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
