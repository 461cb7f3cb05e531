"""Newton-Schulz on CPU, one thread: `dmuon.kernels.orthogonalize` beside plain programs and torch.optim.Muon's.

Compared for each shape (m, n), m <= n, all from the same input, normalization included:

- standard: the textbook loop in fp32, `R = XX'; Z = bR + cRR; X = aX + ZX`;
- gram: the plain Gram form in fp32 with a restart before step 2;
- torch: torch.optim.Muon's own routine, in bf16 with classic coefficients, as a program outside of the comparison;
- ours: `orthogonalize(x)` with defaults.

All but torch's take Polar Express coefficients, 5 steps. A batch of k is a loop for all but ours. Printed are medians
of CPU time over rounds in which the programs take turns, each on cold caches, and the relative Frobenius error from
the standard form in fp64 with the same coefficients. `--squares` instead measures the preset of two blocks of squares
against the Gram form and what the rule takes with Polar Express. `--small` measures single matrices from 16 x 16 on
against plain loops, on warm caches, which is where calls count; and `--halves` bf16 against the
routines of torch.optim.Muon and, where it is installed, of gram-newton-schulz, the error of each from the standard form
in fp64 with its own coefficients beside its time.
`--modes` prints these three as one page.

    python bench/newton_schulz.py --models ../shared/models --json X.json --markdown X.md
    python bench/newton_schulz.py --modes > bench/results/newton-schulz-modes-cpu.md
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common.clock import cold_samples, medians
from common.results import origin, write_json
from planner_gaps import matrices_of
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon.kernels import choose_variant, coefficient_sequence, orthogonalize
from dmuon.kernels.device import cpu_multiplies_bf16

STEPS = 5
RESTART = 2
PROGRAMS = ("standard", "gram", "torch", "ours")

# Unscaled sides of common models that one CPU affords, so that the targets for large matrices have rows.
LARGE = ((1024, 1024), (1024, 2048), (1024, 3584), (1024, 4096), (1024, 5504), (1536, 1536), (1536, 6144), (1536, 8256))
BATCHED_ROWS = 384  # shapes of at most so many rows are also measured as a batch, which is what the optimizer has
BATCH = 8
CACHE_BYTES = 32 << 20

PEER_OPERATIONS = 1 << 29  # a larger product in fp16 takes minutes where the CPU does not multiply it
SMALL = ((16, 16), (16, 64), (16, 256), (32, 32), (32, 128), (64, 64), (64, 256), (128, 128), (128, 512), (256, 256))
SQUARES = (512, 1024)  # rows, of one to five times as many columns
HALVES = ((128, 128), (256, 256), (256, 1024), (512, 512), (512, 1792), (1024, 1024), (1024, 4096))


Coefficients = Sequence[tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Row:
    m: int
    n: int
    k: int
    rounds: int
    ms: dict[str, float]
    error: dict[str, float]

    @property
    def best_plain(self) -> float:
        return min(self.ms["standard"], self.ms["gram"])

    def speedup(self, name: str) -> float:
        return (self.best_plain if name == "best plain" else self.ms[name]) / self.ms["ours"]


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


def looped(program: Callable[[Tensor, Coefficients], Tensor], x: Tensor, coefficients: Coefficients) -> Tensor:
    return torch.stack([program(matrix, coefficients) for matrix in x]) if x.ndim == 3 else program(x, coefficients)


def cold_medians(work: dict[str, Callable[[], object]], rounds: int, seconds: float) -> tuple[dict[str, float], int]:
    """Median milliseconds of each, in as many rounds as ``seconds`` allow, three at least; and how many these were."""
    samples = cold_samples(work, torch.device("cpu"), CACHE_BYTES, rounds, seconds)
    return medians(samples), min(map(len, samples.values()))


def measure(m: int, n: int, k: int, rounds: int, seconds: float) -> Row:
    generator = torch.Generator().manual_seed(m * n + k)
    x = torch.randn((k, m, n) if k > 1 else (m, n), generator=generator)
    polar, classic = coefficient_sequence("polar_express", STEPS), coefficient_sequence("classic", STEPS)
    work: dict[str, Callable[[], Tensor]] = {
        "standard": lambda: looped(standard, x, polar),
        "gram": lambda: looped(gram, x, polar),
        "torch": lambda: looped(torch_muon, x, classic),
        "ours": lambda: orthogonalize(x),
    }
    first = x[0] if k > 1 else x
    exact = {preset: standard(first.double(), preset) for preset in (polar, classic)}
    error = {}
    for name, run in work.items():
        found = run()
        expected = exact[classic if name == "torch" else polar]
        error[name] = float(((found[0] if k > 1 else found).double() - expected).norm() / expected.norm())
    ms, taken = cold_medians(dict(work), rounds, seconds)
    return Row(m, n, k, taken, ms, error)


def shapes_of(models: Path, scale: int, large: bool) -> list[tuple[int, int]]:
    """Shapes of all models with sides divided by ``scale``, small side first, and with ``large`` those in LARGE."""
    found = {(min(m.shape), max(m.shape)) for path in models.glob("*.json") for m in matrices_of(path, scale)}
    return sorted(found.union(LARGE if large else ())) if found else []


HEADER = (
    "| m | n | n/m | k | standard ms (error) | gram ms (error) | torch bf16 ms (error) | ours ms (error) "
    "| standard/ours | gram/ours | best plain/ours | torch/ours |\n"
    "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def line(row: Row) -> str:
    cells = [str(row.m), str(row.n), f"{row.n / row.m:.2f}", str(row.k)]
    cells += [f"{row.ms[name]:.3g} ({row.error[name]:.0e})" for name in PROGRAMS]
    cells += [f"{row.speedup(name):.2f}" for name in ("standard", "gram", "best plain", "torch")]
    return f"| {' | '.join(cells)} |"


def describe(about: dict[str, str]) -> str:
    return f"{about['cpu']} ({about['features']}), one thread, torch {about['torch']}, {about['date']}"


def squares(rounds: int, seconds: float) -> None:
    """Two blocks of squares over Polar Express: medians of ratios of neighbours in time, cold caches, fp32."""
    print("Cold caches, fp32; ms (error). Expected: by half products, 6a+9 over 6a+14.\n")
    print("| m | n | gram ms (error) | squares ms (error) | squares/gram | expected | squares/rule's | rounds |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for m, alpha in itertools.product(SQUARES, (1, 2, 3, 4, 5)):
        x = torch.randn(m, alpha * m, generator=torch.Generator().manual_seed(alpha))
        work: dict[str, Callable[[], Tensor]] = {
            "gram": partial(orthogonalize, x, method="gram"),
            "rule": partial(orthogonalize, x),
            "squares": partial(orthogonalize, x, coefficients="squares"),
        }
        error = {}
        for name, run in work.items():
            preset = "squares" if name == "squares" else "polar_express"
            exact = orthogonalize(x.double(), coefficients=preset, method="standard")
            error[name] = float((run().double() - exact).norm() / exact.norm())
        samples = cold_samples(dict(work), torch.device("cpu"), CACHE_BYTES, rounds, seconds)
        ms = medians(samples)

        def ratio(name: str, samples: dict[str, list[float]] = samples) -> float:
            return statistics.median(a / b for a, b in zip(samples["squares"], samples[name], strict=True))

        cells = [f"{ms[name]:.3g} ({error[name]:.0e})" for name in ("gram", "squares")]
        cells += [f"{ratio('gram'):.2f}", f"{(6 * alpha + 9) / (6 * alpha + 14):.2f}", f"{ratio('rule'):.2f}"]
        print(f"| {m} | {alpha * m} | {' | '.join(cells)} | {len(samples['squares'])} |", flush=True)


def torch_in_fp32(x: Tensor, coefficients: Coefficients) -> Tensor:
    """The operations of torch.optim.Muon's routine, one by one, in the dtype of ``x``."""
    x = x.clone()
    x.div_(x.norm().clamp(min=1e-7))
    for a, b, c in coefficients:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def small(rounds: int, seconds: float) -> None:
    """Single small matrices: the best plain loop's time over ours, medians of ratios of neighbours in time."""
    print("Warm caches; µs, and the best plain loop's time over ours.\n")
    print("| m | n | standard | torch's, in fp32 | gram | ours | ratio | form | rounds |")
    print("|--:|--:|--:|--:|--:|--:|--:|---|--:|")
    polar = coefficient_sequence("polar_express", STEPS)
    torch.empty(CACHE_BYTES // 8)  # freed again, after which the C library keeps what is freed, as in any training
    for m, n in SMALL:
        x = torch.randn(m, n, generator=torch.Generator().manual_seed(m * n))
        work: dict[str, Callable[[], object]] = {
            "standard": partial(standard, x, polar),
            "torch": partial(torch_in_fp32, x, polar),
            "gram": partial(gram, x, polar),
            "ours": partial(orthogonalize, x),
        }
        with torch.no_grad():
            samples = cold_samples(work, torch.device("cpu"), 4096, rounds, seconds)
        us = {name: 1e3 * value for name, value in medians(samples).items()}
        ratio = min(
            statistics.median(a / b for a, b in zip(samples[name], samples["ours"], strict=True))
            for name in ("standard", "torch", "gram")
        )
        form = str(choose_variant((m, n), 1, polar, x.dtype, x.device)).rsplit(" by", 1)[0]
        cells = [f"{us[name]:.0f}" for name in work]
        print(f"| {m} | {n} | {' | '.join(cells)} | {ratio:.2f} | {form} | {len(samples['ours'])} |", flush=True)


def peers(x: Tensor) -> dict[str, tuple[Callable[[], Tensor], Coefficients]]:
    """Routines of others that run here, and their coefficients."""
    classic = coefficient_sequence("classic", STEPS)
    found: dict[str, tuple[Callable[[], Tensor], Coefficients]] = {
        "torch bf16": (partial(torch_muon, x, classic), classic)
    }
    small = min(x.shape) * x.numel() <= PEER_OPERATIONS
    if small and importlib.util.find_spec("gram_newton_schulz") is not None:
        module = importlib.import_module("gram_newton_schulz.gram_newton_schulz")
        routine = module.GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)
        found["gram-newton-schulz fp16"] = (partial(routine, x), routine.ns_coefficients)
    return found


def halves(rounds: int, seconds: float) -> None:
    """bf16 over fp32 and over routines of others: medians of ratios of neighbours in time, cold caches."""
    does = "multiplies" if cpu_multiplies_bf16() else "does not multiply"
    print(f"Cold caches; ms (error, from the standard form in fp64). This CPU {does} bf16.\n")
    polar = coefficient_sequence("polar_express", STEPS)
    heads: list[str] = []
    ratios = ("bf16/fp32", "bf16/torch")
    for m, n in HALVES:
        x = torch.randn(m, n, generator=torch.Generator().manual_seed(m * n))
        work = {
            "fp32": (partial(orthogonalize, x), polar),
            "bf16": (partial(orthogonalize, x, dtype=torch.bfloat16), polar),
            **peers(x),
        }
        if not heads:
            heads = ["m", "n", *work, *ratios, "rounds"]
            print(f"| {' | '.join(heads)} |\n|{'--:|' * len(heads)}", flush=True)
        error = {}
        for name, (run, coefficients) in work.items():
            exact = standard(x.double(), coefficients)
            error[name] = float((run().double() - exact).norm() / exact.norm())
        programs: dict[str, Callable[[], object]] = {name: run for name, (run, _) in work.items()}
        late = programs.pop("gram-newton-schulz fp16", None)  # which would take all the time
        samples = cold_samples(programs, torch.device("cpu"), CACHE_BYTES, rounds, seconds)
        if late is not None:
            start = time.thread_time()
            late()
            samples["gram-newton-schulz fp16"] = [1e3 * (time.thread_time() - start)]
        ms = medians(samples)
        cells = [f"{ms[name]:.3g} ({error[name]:.0e})" if name in ms else "" for name in heads[2 : -len(ratios) - 1]]
        for other in ("fp32", "torch bf16"):
            ratio = statistics.median(a / b for a, b in zip(samples["bf16"], samples[other], strict=True))
            cells.append(f"{ratio:.2f}")
        print(f"| {m} | {n} | {' | '.join(cells)} | {len(samples['fp32'])} |", flush=True)


MODES = (
    ("bf16", "--halves", halves, 9, 60.0),
    ("Single small matrices", "--small", small, 400, 4.0),
    ("Blocks of squares", "--squares", squares, 7, 15.0),
)


def modes() -> None:
    """All of them as one page of Markdown, each with its own rounds and seconds."""
    print("# Newton–Schulz on CPU: bf16, small matrices, blocks of squares\n")
    print(f"{describe(origin())}. `python bench/newton_schulz.py --modes` prints this page.")
    print("Ratios are medians of ratios of neighbours in time.")
    for title, option, mode, rounds, seconds in MODES:
        print(f"\n## {title}\n\n`{option} --rounds {rounds} --seconds {seconds:g}`\n", flush=True)
        mode(rounds, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("../shared/models"), help="folder of config.json files")
    parser.add_argument("--scale", type=int, default=8, help="divide all sides by this (default: 8)")
    parser.add_argument("--no-large", action="store_true", help="without the shapes of 1024 and 1536 rows")
    parser.add_argument("--rounds", type=int, default=15, help="at most so many samples (default: 15)")
    parser.add_argument("--seconds", type=float, default=3.0, help="stop a shape after this, and 3 rounds (default: 3)")
    parser.add_argument("--squares", action="store_true", help="measure blocks of squares only")
    parser.add_argument("--small", action="store_true", help="measure single small matrices only")
    parser.add_argument("--halves", action="store_true", help="measure bf16 only")
    parser.add_argument("--modes", action="store_true", help="print the page of the last three, as in bench/results")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.scale < 1:
        parser.error("--rounds and --scale must be at least 1")
    torch.set_num_threads(1)
    if arguments.modes:
        modes()
        return 0
    for mode, chosen in ((squares, arguments.squares), (small, arguments.small), (halves, arguments.halves)):
        if chosen:
            print(f"{describe(origin())}\n")
            mode(arguments.rounds, arguments.seconds)
            return 0
    shapes = shapes_of(arguments.models, arguments.scale, not arguments.no_large)
    if not shapes:
        parser.error(f"--models {arguments.models}: no *.json with matrices there")
    print(HEADER, flush=True)
    rows = []
    for m, n in shapes:
        for k in (1, BATCH) if m <= BATCHED_ROWS else (1,):
            rows.append(measure(m, n, k, arguments.rounds, arguments.seconds))
            print(line(rows[-1]), flush=True)
    about = origin()
    if arguments.markdown is not None:
        title = f"# Newton-Schulz on CPU\n\n{describe(about)}.\n\n"
        notes = (
            f"Medians of CPU time, {min(r.rounds for r in rows)} to {max(r.rounds for r in rows)} rounds in turns, "
            "cold caches; error: relative, from the standard form in fp64.\n"
            "Polar Express, 5 steps, fp32; torch: torch.optim.Muon's bf16 routine, classic coefficients.\n\n"
        )
        text = title + notes + "\n".join([HEADER, *map(line, rows)])
        arguments.markdown.write_text(text + "\n")
    if arguments.json is not None:
        write_json(arguments.json, {**about, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
