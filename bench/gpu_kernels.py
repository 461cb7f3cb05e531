"""Newton–Schulz on one GPU: timed against cuBLAS and public routines. ``dmuon-check`` says whether it is right.

    python bench/gpu_kernels.py [--models DIR] [--json bench/results/NAME.json] [--seconds 420]

Needs torch, Triton and NumPy, and no installation: dmuon is taken from the checkout that the script stands in.

Products with a symmetric result are timed alone, per size and depth; whole models as the sum over their matrices, one
batch after another. Times are medians of interleaved CUDA-graph replays between events, with the L2 cache overwritten
before each. Each row is printed, and the JSON file written, before the next one is computed. What fails is a row as
well, and the rest goes on. Exit status 1 where something of dmuon's failed.

``--dry`` runs everything on whatever device there is, on tiny matrices, so that the script is known to work; with
``TRITON_INTERPRET=1`` also the kernels. It prints no figure worth keeping.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.clock import cold_samples, medians
from common.options import parse
from common.results import head, write_json
from torch import Tensor

from dmuon.kernels import (
    Variant,
    backend_fault,
    batch_size,
    choose_variant,
    coefficient_sequence,
    drop_graphs,
    normalize,
    orthogonalize,
    run,
)
from dmuon.kernels.symmetric_tiles import TileConfig, Work, candidates, default_config
from dmuon.kernels.symmetric_triton import symmetric_product
from dmuon.model.config import read_model

SIDES = (4096, 8192, 2048, 1024, 512)  # what carries the targets comes first: time may end
DEPTHS = (1, 4)  # inner dimension over side: squares of the Gram form, and XXᵀ of a wide matrix
CUBLAS = ("cuBLAS", "cuBLAS in place")
MODELS = ("qwen2.5-7b", "llama-3-8b", "pi0", "gpt2-1.5b")
POLAR = coefficient_sequence("polar_express", 5)
(CLASSIC,) = coefficient_sequence("classic", 1)
PEERS = ("torch.optim.Muon", "gram-newton-schulz")
OTHERS = ("cuBLAS standard", "cuBLAS gram", "quack", *PEERS)
SECTIONS = ("products", "shapes", "models", "faults")
_DRY = (TileConfig(16, 16, 4, 2), TileConfig(16, 16, 4, 2, wide=True))


# -- results as they come, and how programs are timed ------------------------------------------------------------------


class DeviceLost(RuntimeError):
    """After an illegal access, say, nothing runs on the device any more in this process."""


class Journal:
    """A document that grows by rows.

    Args:
        path: of the JSON file that is written anew with every row; None: none is.
        head: what it begins with.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path, self._begun = path, time.monotonic()
        self.document: dict[str, Any] = {**head, **{section: [] for section in SECTIONS}}
        print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
        self._write()

    def add(self, section: str, row: dict[str, Any], line: str) -> None:
        self.document[section].append(row)
        if line:
            print(line, flush=True)
        self._write()

    @contextmanager
    def guarded(self, what: str, ours: bool = True) -> Iterator[None]:
        """What fails inside is a row of ``faults``.

        Args:
            ours: whether it would be a fault of dmuon's; want of memory never is.

        Raises:
            DeviceLost: nothing will run any more.
        """
        try:
            yield
        except Exception as error:  # whatever a compiler or a driver may raise
            ours = ours and not isinstance(error, torch.OutOfMemoryError)
            text = f"{type(error).__name__}: {error}"
            self.add("faults", {"what": what, "fault": text, "ours": ours}, f"FAILED {what}: {text[:300]}")
        else:
            return
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise DeviceLost(f"{what}: {error}") from None

    @property
    def wrong(self) -> bool:
        """Whether something of dmuon's failed."""
        return any(row["ours"] for row in self.document["faults"])

    def _write(self) -> None:
        self.document["seconds"] = round(time.monotonic() - self._begun, 1)
        if self._path is not None:
            write_json(self._path, self.document)


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line.

    Attributes:
        models: folder of model configurations.
        seconds: after which nothing new is timed.
        rounds: samples per median; dry ones are two.
        json: a file that is written anew with every row.
    """

    models: str = "examples/models"
    seconds: float = 420.0
    rounds: int = 15
    dry: bool = False
    json: str | None = None

    @property
    def device(self) -> torch.device:
        cuda = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    @property
    def scale(self) -> int:
        """Sides are divided by it."""
        return 128 if self.dry else 1

    @property
    def tiles(self) -> bool:
        return backend_fault("triton", self.device, torch.float16) is None

    def configs(self, m: int, p: int) -> Sequence[TileConfig]:
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (9, 0)
        return _DRY if self.dry else candidates(m, p, torch.float16, capability)

    def medians(
        self, programs: Mapping[str, Callable[[], object]], journal: Journal, what: str, others: Sequence[str] = ()
    ) -> dict[str, float]:
        """Milliseconds of each, in turns: of graph replays on CUDA, CPU time elsewhere. None of what fails.

        Args:
            others: names of programs that are not dmuon's.
        """
        ready = {}
        for name, program in programs.items():
            with journal.guarded(f"{what}: {name}", ours=name not in others):
                ready[name] = self._prepared(program)
        cache_bytes = 1 << (28 if self.device.type == "cuda" else 20)
        rounds = 2 if self.dry else self.rounds
        return medians(cold_samples(ready, self.device, cache_bytes, rounds)) if ready else {}

    def _prepared(self, program: Callable[[], object]) -> Callable[[], object]:
        program()  # compiles
        if self.device.type != "cuda":
            return program
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = program()

        def replay(_kept: object = kept) -> None:
            graph.replay()

        replay()
        torch.cuda.synchronize()  # a fault is this program's
        return replay

    def gaussian(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, device=self.device, generator=generator).to(dtype)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# -- products: with a batch that fills the device, and with one matrix -------------------------------------------------


def time_products(settings: Settings, journal: Journal, deadline: float) -> None:
    if not settings.tiles:
        return
    sides = [max(16, side // settings.scale) for side in SIDES]
    for alone, m, depth in itertools.product((False, True), sides, DEPTHS):
        if time.monotonic() > deadline:
            return
        k = 1 if alone else max(2, 4 * 4096**2 // (settings.scale * m) ** 2)
        what = f"product {k}x{m}x{depth * m}"
        with journal.guarded(what):
            times = settings.medians(_products(settings, k, m, depth), journal, what, CUBLAS)
            row, line = _product_row(k, m, depth * m, times)
            row["by_rule"] = _rule(settings, k, m, depth * m, 1 if depth == 1 else 0)
            journal.add("products", row, line)


def _rule(settings: Settings, k: int, m: int, p: int, addends: int) -> str:
    """The config that is taken without measurement."""
    if settings.device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(settings.device)
    work = Work(k, m, p, torch.float16, addends, properties.multi_processor_count)
    return str(default_config(work, (properties.major, properties.minor)))


def _products(settings: Settings, k: int, m: int, depth: int) -> dict[str, Callable[[], object]]:
    x = (settings.gaussian(k, m, depth * m) / (depth * m) ** 0.5).half()
    out = torch.empty(k, m, m, dtype=torch.float16, device=settings.device)
    programs: dict[str, Callable[[], object]] = {}
    if depth == 1:
        r = x @ x.mT
        programs["cuBLAS"] = partial(torch.baddbmm, r, r, r, beta=0.5, alpha=0.5, out=out)  # copies r first
        programs["cuBLAS in place"] = partial(r.clone().baddbmm_, r, r, beta=0.5, alpha=0.5)  # tends to r², stays small
        ours = partial(symmetric_product, r, r, addends=[r], betas=[0.5], alpha=0.5, out=out, b_symmetric=True)
    else:
        programs["cuBLAS"] = partial(torch.bmm, x, x.mT, out=out)
        ours = partial(symmetric_product, x, x.mT, alpha=0.5, out=out)
    return programs | {str(config): partial(ours, config=config) for config in settings.configs(m, depth * m)}


def _product_row(k: int, m: int, p: int, times: dict[str, float]) -> tuple[dict[str, Any], str]:
    """What was measured, and a line for people; ``speedup`` over the faster way of cuBLAS."""
    row: dict[str, Any] = {"m": m, "p": p, "k": k, "ms": times}
    theirs = min((times[name] for name in CUBLAS if name in times), default=None)
    best = min((name for name in times if name not in CUBLAS), key=lambda name: times[name], default=None)
    if theirs is None or best is None:
        return row, f"product {k}x{m}x{p}: nothing to compare"
    row |= {"best": best, "speedup": theirs / times[best], "tflops": 2 * k * m * m * p / times[best] / 1e9}
    line = f"cuBLAS {theirs:.3f} ms, best {times[best]:.3f} ms, {row['speedup']:.2f} times as fast"
    return row, f"product {k}x{m}x{p}: {line}, {row['tflops']:.0f} TFLOP/s, {best}"


# -- models: shape by shape, in batches as training makes them ---------------------------------------------------------


def time_models(settings: Settings, journal: Journal, deadline: float) -> None:
    rows: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}
    for name in MODELS:
        with journal.guarded(name):
            counts = Counter(
                tuple(sorted((max(8, m.rows // settings.scale), max(8, m.cols // settings.scale))))
                for m in read_model(Path(settings.models, f"{name}.json"))
            )
            batches = {(m, n): batch_size((m, n), count, settings.device) for (m, n), count in sorted(counts.items())}
            for shape, k in batches.items():
                if (shape, k) not in rows and time.monotonic() <= deadline:
                    with journal.guarded(f"{k} of {shape[0]}x{shape[1]}"):
                        rows[shape, k] = _time_shape(settings, journal, shape, k)
            found = {shape: rows.get((shape, k)) for shape, k in batches.items()}
            missing = [f"{m}x{n}" for (m, n), row in found.items() if row is None or "dmuon" not in row["ms"]]
            if missing:
                print(f"{name}: left out, without times of {', '.join(missing)}", flush=True)
                continue
            row = _sum(name, {shape: (counts[shape], row) for shape, row in found.items() if row is not None})
            ratios = ", ".join(f"{program} {ratio:.2f}" for program, ratio in row["over_dmuon"].items())
            journal.add("models", row, f"{name}: dmuon {row['ms']['dmuon']:.2f} ms; times that: {ratios}")


def _sum(name: str, shapes: dict[tuple[int, int], tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Of the programs that were timed for every shape."""
    programs = [p for p in ("dmuon", *OTHERS) if all(p in row["ms"] for _, row in shapes.values())]
    total = {p: sum(row["ms"][p] * count / row["k"] for count, row in shapes.values()) for p in programs}
    return {
        "model": name,
        "ms": total,
        "over_dmuon": {p: milliseconds / total["dmuon"] for p, milliseconds in total.items()},
        "shapes": {f"{m}x{n} by {row['k']}": count for (m, n), (count, row) in shapes.items()},
    }


def _time_shape(settings: Settings, journal: Journal, shape: tuple[int, int], k: int) -> dict[str, Any]:
    what = f"{k} of {shape[0]}x{shape[1]}"
    rule = choose_variant(shape, k, POLAR, torch.float16, settings.device)
    x = settings.gaussian(k, *shape)
    exact = orthogonalize(x[:1].double(), method="standard")
    programs = _programs(settings, x, rule)
    errors = {}
    for name in programs.keys() - PEERS:  # these use other coefficients: theirs are no errors against ours
        with journal.guarded(f"{what}: {name}, error"):
            errors[name] = relative(programs[name]()[:1], exact)
    times = settings.medians(programs, journal, what, OTHERS)
    row = {"shape": shape, "k": k, "ms": times, "errors": errors, "variant": str(rule)}
    journal.add("shapes", row, f"{what}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()))
    drop_graphs()
    return row


def _programs(settings: Settings, x: Tensor, rule: Variant) -> dict[str, Callable[[], Tensor]]:
    shape, k = (x.shape[1], x.shape[2]), len(x)

    def ours(variant: Variant) -> Callable[[], Tensor]:
        return lambda: run(normalize(x, torch.float16, 0.0)[0], variant, POLAR, torch.float16)

    def by(backend: Any, method: Any) -> Callable[[], Tensor]:
        return ours(choose_variant(shape, k, POLAR, torch.float16, settings.device, method=method, backend=backend))

    quack = backend_fault("quack", settings.device, torch.float16) is None
    return {
        "dmuon": ours(rule),
        "cuBLAS standard": by("torch", "standard"),
        "cuBLAS gram": by("torch", "gram"),
        **({"quack": by("quack", "gram")} if quack else {}),
        **_peers(x),
    }


def _peers(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Public routines, as far as they are installed."""
    found: dict[str, Callable[[], Tensor]] = {}
    try:
        theirs = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz
        found["torch.optim.Muon"] = lambda: torch.stack([theirs(m, CLASSIC, 5, 1e-7) for m in x])
    except (ImportError, AttributeError):
        pass
    try:
        routine = importlib.import_module("gram_newton_schulz").GramNewtonSchulz()
        found["gram-newton-schulz"] = lambda: routine(x)
    except (ImportError, AttributeError):
        pass
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def about_device(settings: Settings) -> dict[str, Any]:
    """What the results were measured on, beside what every record says."""
    cuda, driver = settings.device.type == "cuda", Path("/proc/driver/nvidia/version")  # which some containers lack
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
        "cuda": torch.version.cuda or "",
        "triton": importlib.import_module("triton").__version__ if settings.tiles else "not used",
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser, settings = parse(Settings, __doc__, argv)
    if settings.device.type != "cuda" and not settings.dry:
        parser.error("no CUDA device; --dry runs the script without one")
    if not Path(settings.models).is_dir():
        parser.error(f"--models {settings.models} is no folder; it holds NAME.json, as Hugging Face's config.json")
    torch.set_num_threads(1)
    begun = time.monotonic()
    said = {**head("gpu_kernels.py", argv), **about_device(settings), "dry": settings.dry}
    journal = Journal(Path(settings.json) if settings.json else None, said)
    lost = False
    try:
        time_products(settings, journal, begun + 0.5 * settings.seconds)
        time_models(settings, journal, begun + settings.seconds)
    except DeviceLost as error:
        lost = True
        print(f"the device is lost, nothing more can run: {error}", flush=True)
    return 1 if lost or journal.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
