"""Newton-Schulz on CPU, one thread: `dmuon.kernels.orthogonalize` beside plain programs and routines of others.

All programs of a shape take the same input, normalization included, and take turns. Printed are medians of CPU time in
ms with the relative Frobenius error from the standard form in fp64 with the program's own coefficients, and ratios:
medians of ratios of neighbours in time. Programs:

- ours: `orthogonalize(x)` with defaults, fp32; a batch of k is a loop for all others;
- standard, gram: the textbook loop in fp32, and the plain Gram form with a restart before step 2;
- torch: torch.optim.Muon's own routine, in bf16 with classic coefficients;
- bf16: `orthogonalize(x, dtype=torch.bfloat16)`;
- our gram, squares: `orthogonalize` in the Gram form, and with the preset of two blocks of squares.

Modes: `large`, from 256 rows on; `small`, single matrices from 16 x 16 on, on warm caches, which is where calls count;
`bf16`; `squares`. All but `small` find the caches cold. A shape ends after `--seconds`, with three rounds at least.
On a CPU that does not multiply bf16 what runs in it takes many times as long.

    python bench/newton_schulz.py
    python bench/newton_schulz.py --mode small --rounds 400 --seconds 4
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common.clock import cold_samples, medians
from common.harness import Record, run
from common.options import Options, option
from common.results import columns
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon.kernels import coefficient_sequence, orthogonalize
from dmuon.kernels.device import cpu_multiplies_bf16

STEPS = 5
RESTART = 2
BATCH = 8  # of shapes with at most 256 rows, which is what the optimizer has
LARGE = ((256, 256), (256, 2048), (512, 512), (512, 1792), (1024, 1024), (1024, 4096), (1536, 8256))
CACHE_BYTES = 32 << 20
SMALL = ((16, 16), (16, 64), (16, 256), (32, 32), (32, 128), (64, 64), (64, 256), (128, 128), (128, 512), (256, 256))
SQUARES = tuple((m, alpha * m) for m in (512, 1024) for alpha in (1, 2, 3, 4, 5))
HALVES = ((128, 128), (256, 256), (256, 1024), (512, 512), (512, 1792), (1024, 1024), (1024, 4096), (1536, 8256))
MODES = {"large": LARGE, "small": SMALL, "bf16": HALVES, "squares": SQUARES}

Coefficients = Sequence[tuple[float, float, float]]
POLAR: Any = coefficient_sequence("polar_express", STEPS)
CLASSIC: Any = coefficient_sequence("classic", STEPS)
Work = dict[str, tuple[Callable[[], Tensor], Any]]  # and the coefficients, or their preset


@dataclass(frozen=True, slots=True)
class Settings(Options):
    mode: str = option("large", choices=MODES)
    rounds: int = 15
    seconds: float = 3.0


def standard(x: Tensor, coefficients: Coefficients) -> Tensor:
    x = x / x.norm()
    for a, b, c in coefficients:
        r = x @ x.mT
        z = torch.addmm(r, r, r, beta=b, alpha=c)
        x = torch.addmm(x, z, x, beta=a)
    return x


def gram(x: Tensor, coefficients: Coefficients) -> Tensor:
    x = x / x.norm()
    for start, stop in itertools.pairwise((0, RESTART, len(coefficients))):
        r = x @ x.mT
        q = torch.eye(len(r))
        for index, (a, b, c) in enumerate(coefficients[start:stop]):
            z = torch.addmm(r, r, r, beta=b, alpha=c)
            q = a * q + z if index == 0 else torch.addmm(q, q, z, beta=a)
            if index + 1 < stop - start:
                v = torch.addmm(r, r, z, beta=a)
                r = torch.addmm(v, z, v, beta=a)
        x = q @ x
    return x


def torch_muon(x: Tensor, coefficients: Coefficients) -> Tensor:
    return _zeropower_via_newtonschulz(x, coefficients[0], STEPS, 1e-7)


def plain(program: Callable[[Tensor, Coefficients], Tensor], x: Tensor, coefficients: Any) -> tuple[Any, Any]:
    def looped() -> Tensor:
        return torch.stack([program(one, coefficients) for one in x]) if x.ndim == 3 else program(x, coefficients)

    return looped, coefficients


def programs_of(mode: str, x: Tensor) -> Work:
    """By name, what is timed, the program that others are compared with last."""
    ours: Work = {"ours": (partial(orthogonalize, x), POLAR)}
    if mode == "large":
        loops = {"standard": plain(standard, x, POLAR), "gram": plain(gram, x, POLAR)}
        return {**loops, "torch": plain(torch_muon, x, CLASSIC), **ours}
    if mode == "small":
        return {"standard": plain(standard, x, POLAR), "gram": plain(gram, x, POLAR), **ours}
    if mode == "squares":
        gram_form = {"our gram": (partial(orthogonalize, x, method="gram"), POLAR)}
        return {**gram_form, **ours, "squares": (partial(orthogonalize, x, coefficients="squares"), "squares")}
    bf16 = {"bf16": (partial(orthogonalize, x, dtype=torch.bfloat16), POLAR)}
    return {**ours, "torch": plain(torch_muon, x, CLASSIC), **bf16}


def exact(x: Tensor, coefficients: Any) -> Tensor:
    if coefficients == "squares":
        return orthogonalize(x.double(), coefficients="squares", method="standard")
    return standard(x.double(), coefficients)


def measure_shape(mode: str, m: int, n: int, k: int, rounds: int, seconds: float) -> Record:
    x = torch.randn((k, m, n) if k > 1 else (m, n), generator=torch.Generator().manual_seed(m * n + k))
    work = programs_of(mode, x)
    error = {}
    for name, (program, coefficients) in work.items():
        found, expected = program(), exact(x[0] if k > 1 else x, coefficients)
        error[name] = float(((found[0] if k > 1 else found).double() - expected).norm() / expected.norm())
    cache = 4096 if mode == "small" else CACHE_BYTES
    programs: dict[str, Callable[[], object]] = {name: program for name, (program, _) in work.items()}
    samples = cold_samples(programs, torch.device("cpu"), cache, rounds, seconds)
    last = list(work)[-1]
    ratio = {
        f"{name}/{last}": statistics.median(a / b for a, b in zip(samples[name], samples[last], strict=True))
        for name in work
        if name != last
    }
    return {"rounds": len(samples[last]), "ms": medians(samples), "error": error, "ratio": ratio}


def measure(settings: Settings) -> Record:
    torch.set_num_threads(1)
    torch.empty(CACHE_BYTES // 8)  # freed again, after which the C library keeps what is freed, as in any training
    with torch.no_grad():
        rows = {}
        for m, n in MODES[settings.mode]:
            k = BATCH if settings.mode == "large" and m <= 256 else 1
            name = f"{m}x{n}" + (f" ({k})" if k > 1 else "")
            rows[name] = measure_shape(settings.mode, m, n, k, settings.rounds, settings.seconds)
    return {"multiplies_bf16": cpu_multiplies_bf16(), "rows": rows}


def table(record: Record) -> str:
    shown: dict[str, dict[str, Any]] = {}
    for shape, row in record["rows"].items():
        cells = {name: f"{row['ms'][name]:.3g} ({row['error'][name]:.0e})" for name in row["ms"]}
        shown[shape] = {**cells, **{name: f"{value:.2f}" for name, value in row["ratio"].items()}}
    widest = max(shown.values(), key=len)
    return "m x n (matrices); ms (error), and ratios\n" + columns(shown, dict.fromkeys(widest, ""))


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, measure, table))
