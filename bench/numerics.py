"""Quality of Newton–Schulz forms in half precision, emulated on CPU, against their cost in products.

The GPU kernel computes symmetric products by lower tiles, mirrors them, and reads a symmetric right factor as its
transpose. In exact arithmetic nothing changes; in fp16 ``R Z`` and its transpose differ, so it matters which products
are mirrored and how they are read. The library's own iteration runs here, with arithmetic that does the same; for
every form and preset this reports, over a deterministic stress set: the largest singular value, the least one among
directions whose singular value was at least 1e-3 of the Frobenius norm, matrices with NaN or inf, and the error
relative to the exact result (the polynomial applied to fp64 singular values).

    python bench/numerics.py [--quick] [--preset NAME] [--json bench/results/numerics.json]

Presets run at five steps. Half: every symmetric product is its lower half, mirrored, and reads its right factor as the
transpose, as the GPU's kernel does; full: whole products. V whole: but for the first ``V = R Z + aR`` after a restart,
a whole product that is read as it is; so the library runs fp16 on GPUs. Two restart blocks of squares have the degrees
33 and 65; full, each addend of a sum is rounded, half, each sum is rounded once. Safe: no NaN or inf, and σmax at most
``MARGIN`` above the exact one. Costs are in units of m³ multiply-adds: a full square product is 2, its lower half 1,
and α is the ratio of the sides.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common.harness import Record, run
from common.options import Options, option
from common.results import columns
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
from stress import FULL_SET, MARGIN, QUICK_SET, SMALL, Batch, stress_set

from dmuon.kernels import (
    PRESETS,
    QUINTICS,
    Square,
    Squares,
    Variant,
    coefficient_sequence,
    iterate,
    safe_restarts,
)
from dmuon.kernels.arithmetic import Arithmetic, SplitArithmetic
from dmuon.kernels.coefficients import SQUARES
from dmuon.kernels.variant import relative_cost

Steps = tuple[tuple[float, float, float], ...]  # of each step, the coefficients of s, s³, s⁵


def polynomial(sigma: Tensor, steps: Steps | Squares) -> Tensor:
    """What exact arithmetic maps singular values to."""
    if isinstance(steps, Squares):
        return of_squares(sigma, steps)
    for a, b, c in steps:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
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


# -- forms ---------------------------------------------------------------------------------------------------


class TileArithmetic(SplitArithmetic):
    """The library's halves on the CPU, but as the GPU's kernel reads ``B``: as its transpose, wherever it may."""

    __slots__ = ()

    def symmetric(self, c: Tensor | None, a: Tensor, b: Tensor, *, b_symmetric: bool = True, **options: Any) -> Tensor:
        return super().symmetric(c, a, b.mT if b_symmetric else b, **options)

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        """Sums and product are rounded together, once."""
        total = torch.zeros_like(s)
        for addend, factor in zip(stored, square.addends, strict=False):
            total.add_(addend, alpha=factor)
        total.diagonal(dim1=-2, dim2=-1).add_(square.identity)
        return self.symmetric(total, s, s, alpha=square.square, out=total)


@dataclass(frozen=True, slots=True)
class Form:
    """How an iteration is computed, by the library's options.

    Symmetric products are in full or, unless the back end of ``variant`` is torch, halves, mirrored, but for the first
    ``V`` after a restart with ``whole_v``.
    """

    name: str
    dtype: torch.dtype
    variant: Variant
    whole_v: bool = False

    def cost(self, steps: Steps | Squares) -> str:
        """In half products of m³."""
        counted = self.dtype if self.whole_v else torch.float32  # in fp32 nothing is whole
        square, wide = (round(2 * relative_cost((1, n), steps, self.variant, counted)) for n in (1, 2))
        return f"{wide - square}α+{2 * square - wide}"

    def run(self, x: Tensor, steps: Steps | Squares) -> Tensor:
        """``x``, fp32 of Frobenius norm one, after ``steps``; ``x`` is overwritten."""
        form = Arithmetic if self.variant.backend == "torch" else TileArithmetic
        arithmetic = form(self.dtype, torch.float32, self.whole_v)
        return iterate(arithmetic.round_(x), self.variant, steps, arithmetic)


def library_forms() -> Iterator[Form]:
    """What the library can run. On GPUs its halves have ``V`` whole: :func:`dmuon.kernels.variant.whole_v`."""
    standard, halves = Variant("standard", (), "torch", 1), Variant("standard", (), "triton", 1)
    yield Form("standard fp32, full", torch.float32, standard)
    yield Form("standard bf16, full", torch.bfloat16, standard)
    yield Form("standard fp16, half", torch.float16, halves)
    for restarts in ((1,), (2,), (3,), (2, 4), (1, 3), ()):
        name = "r" + ",".join(map(str, restarts)) if restarts else "no restart"
        halves = Variant("gram", restarts, "triton", 1)
        yield Form(f"{name}, full", torch.float16, Variant("gram", restarts, "torch", 1))
        yield Form(f"{name}, half", torch.float16, halves)
        if restarts:
            yield Form(f"{name}, V whole", torch.float16, halves, whole_v=True)


def squares_forms() -> Iterator[Form]:
    """How the library runs blocks of squares: sums with each addend rounded, or in the product, rounded once."""
    full, half = (Variant("gram", safe_restarts(SQUARES, torch.float16), name, 1) for name in ("torch", "triton"))
    yield Form("float32, full", torch.float32, full)
    for dtype in (torch.bfloat16, torch.float16):
        yield Form(f"{str(dtype).removeprefix('torch.')}, full", dtype, full)
        yield Form(f"{str(dtype).removeprefix('torch.')}, half", dtype, half)


# -- measurement ---------------------------------------------------------------------------------------------


def judge(batches: Sequence[Batch], form: Form, steps: Steps | Squares, limit: float) -> Record:
    """What a form does to the stress set; ``worst`` names the matrix with the largest singular value."""
    found = {"cost": form.cost(steps), "sigma_max": 0.0, "sigma_min": math.inf, "nan": 0, "worst": ""}
    errors = []
    for batch in batches:
        output = form.run(batch.x.float(), steps).double()
        finite = output.isfinite().flatten(1).all(1)
        found["nan"] += int((~finite).sum())
        output = torch.where(finite[:, None, None], output, 0.0)
        exact = (batch.u * polynomial(batch.sigma, steps)[:, None, :]) @ batch.vh
        errors.append(((output - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2)))[finite])
        rotated = batch.u.mT @ output
        gram = rotated @ rotated.mT  # in the basis of the left singular vectors of the input
        largest = torch.linalg.eigvalsh(gram)[:, -1].sqrt()
        if largest.max() > found["sigma_max"]:
            found |= {"sigma_max": largest.max().item(), "worst": batch.names[int(largest.argmax())]}
        kept = (batch.sigma >= SMALL).double()
        gram = gram * kept[:, :, None] * kept[:, None, :] + torch.diag_embed(4 * (1 - kept))
        least = torch.linalg.eigvalsh(gram[finite])[:, 0].clamp(min=0).sqrt()
        found["sigma_min"] = min([found["sigma_min"], *least.tolist()])
    error = torch.cat(errors)
    safe = "yes" if found["nan"] == 0 and found["sigma_max"] <= limit else "no"
    return {**found, "rel_worst": error.max().item(), "rel_median": error.median().item(), "safe": safe}


# -- report --------------------------------------------------------------------------------------------------

COLUMNS = {"cost": "", "sigma_max": ".3f", "sigma_min": ".3f", "nan": "d", "rel_worst": ".1e", "rel_median": ".1e"}
COLUMNS |= {"safe": "", "worst": ""}


@dataclass(frozen=True, slots=True)
class Settings(Options):
    quick: bool = False
    preset: str = option("all", choices=("all", *PRESETS))


def measure(settings: Settings) -> Record:
    torch.set_num_threads(1)
    batches = stress_set(QUICK_SET if settings.quick else FULL_SET)
    cases: list[tuple[str, Form, Steps | Squares]] = [
        (preset, form, coefficient_sequence(preset, 5)) for preset in QUINTICS for form in library_forms()
    ]
    cases += [("squares", form, SQUARES) for form in squares_forms()]
    ideals: dict[str, float] = {}
    results: dict[str, dict[str, Record]] = {}
    for preset, form, steps in cases:
        if settings.preset in ("all", preset):
            if preset not in ideals:
                ideals[preset] = max(polynomial(batch.sigma, steps).max().item() for batch in batches)
            found = judge(batches, form, steps, ideals[preset] + MARGIN)
            results.setdefault(preset, {})[form.name] = found
    count = sum(len(batch.names) for batch in batches)
    return {"matrices": count, "exact_sigma_max": ideals, "results": results}


def table(record: Record) -> str:
    parts = [f"{record['matrices']} stress matrices"]
    for preset, rows in record["results"].items():
        ideal = record["exact_sigma_max"][preset]
        parts += [f"{preset}: exact σmax {ideal:.4f}, limit {ideal + MARGIN:.4f}", columns(rows, COLUMNS, "variant")]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, measure, table))
