"""How long a symmetric product should take on GPUs that nobody here has: a model, not a measurement.

    python bench/product_model.py [--out FILE.md] [--resources bench/results/kernel-resources.json]

Reads what `bench/kernel_resources.py` found in the machine code, and predicts each config on A100, H100, H200 and B200,
for squares and for ``X Xᵀ``, with 0, 1 and 4 addends, beside a model of cuBLAS. Terms, of one tile of one program:

- the product: its operations at the matrix rate of one multiprocessor, or its operands at that one's share of what L2
  delivers, whichever takes longer;
- the rest: the first load; each addend's, unless it is the only one and read before; half of the instructions behind
  the last matrix instruction (a tile takes one of two branches) on four schedulers; the wait for the first of two
  stores.

Of ``r`` programs that share a multiprocessor, one's rest is hidden behind the others' products. A multiprocessor gets
``ceil(tiles / multiprocessors)`` tiles. Nothing is faster than operands, addends and results pass through memory once.
cuBLAS: 128 x 256 tiles in clusters of two that share loads, all of them, the rest hidden.

What is known of the error: the model of cuBLAS is fitted to one figure, 8192³ in bf16. L2 decides most, and figures of
it differ by 20 %; latencies are round numbers. flash-muon, whose tiles are 128 x 128, reports 1.56 times cuBLAS at 8192
on an H800; the model says 1.26. Take 20 % either way, and more on B200, of whose L2 nothing is published. Differences
between configs of one device are safer than times.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dmuon.kernels.symmetric_tiles import TileConfig, Work, candidates, default_config

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Device:
    """``peak`` in operations a second, dense fp16; ``l2`` and ``memory`` in bytes a second."""

    name: str
    arch: str
    processors: int
    clock: float
    peak: float
    l2: float
    memory: float


# Peaks and memory: NVIDIA's datasheets. Of the peak 0.83, of memory 0.9 are kept: cuBLAS multiplied 8192³ random bf16
# at 798 TFLOP/s on an H100 and at 788 on an H200, and copies moved 3.0 and 4.3 TB/s. L2: 5120 bytes a clock (7.2 TB/s
# on A100, 9.0 on H100, doi:10.1016/j.ultsonch.2023.106546, table 3), of which 0.9 are kept; B200 twice H100's, as it
# has two dies, which is a guess.
KEPT, KEPT_MEMORY, KEPT_L2 = 0.83, 0.9, 0.9
DEVICES = (
    Device("A100", "sm80", 108, 1.41e9, 312e12, 7.2e12, 2.04e12),
    Device("H100", "sm90", 132, 1.70e9, 989e12, 9.0e12, 3.35e12),
    Device("H200", "sm90", 132, 1.70e9, 989e12, 9.0e12, 4.8e12),
    Device("B200", "sm100", 148, 1.86e9, 2250e12, 18.0e12, 7.7e12),
)

# In cycles: the first load with barriers and descriptors, the load of an addend, the wait for a store's buffer.
FIRST, ADDEND, STORE = 1000, 700, 400
SCHEDULERS = 4
LAUNCH = 4e-6  # of one kernel, seconds

SIDES = ((8192, 1), (4096, 4), (4096, 1), (2048, 16), (2048, 1), (1024, 64), (1024, 1), (512, 64))
ADDENDS = (0, 1, 4)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Product:
    """``k`` times ``(m, p)`` by ``(p, m)``, with so many addends; fp16."""

    k: int
    m: int
    p: int
    addends: int

    def memory_seconds(self, device: Device) -> float:
        squares = self.addends + 1 + (self.m == self.p)
        return 2 * self.k * self.m * (squares * self.m + self.p * (self.m != self.p)) / (KEPT_MEMORY * device.memory)


def main_seconds(rows: int, cols: int, p: int, device: Device, shared: float = 1.0) -> float:
    """The product of one tile alone on a multiprocessor; of its operands ``shared`` is loaded."""
    operations = 2 * rows * cols * p / (KEPT * device.peak / device.processors)
    loads = shared * 2 * (rows + cols) * p / (KEPT_L2 * device.l2 / device.processors)
    return max(operations, loads)


def rest_seconds(config: TileConfig, addends: int, instructions: int, device: Device) -> float:
    """What of one tile is not its product."""
    early = addends == 1 and not config.descriptors
    issued = instructions / 2 * config.warps / SCHEDULERS
    # Of each half, addends are waited for by themselves.
    waited = ADDEND * (addends - early) * config.halves + STORE * config.halves
    return (FIRST + issued + waited) / device.clock


def predict(config: TileConfig, work: Product, used: Row, device: Device) -> tuple[float, float]:
    """Seconds, and seconds if the tiles of the last round were shared evenly, at no cost, among the multiprocessors."""
    main = main_seconds(config.block, config.halves * config.block, work.p, device)
    rest = rest_seconds(config, work.addends, used["epilogue"], device)
    tiles = work.k * config.tiles(work.m)
    most = -(-tiles // device.processors)
    together = min(most, used["blocks"])

    def seconds(rounds: float, programs: int) -> float:
        return rounds * max(programs * main, main + rest)

    full, left = divmod(most, together)
    uneven = seconds(full, together) + (seconds(1, left) if left else 0.0)
    # The last tile's rest is behind nothing.
    uneven += rest if together > 1 else 0.0
    even = max(main + rest, uneven * tiles / (most * device.processors))
    least = work.memory_seconds(device)
    return LAUNCH + max(uneven, least), LAUNCH + max(even, least)


def predict_cublas(work: Product, device: Device) -> float:
    tiles = work.k * -(-work.m // 128) * -(-work.m // 256)
    main = main_seconds(128, 256, work.p, device, shared=0.5 if device.arch != "sm80" else 1.0)
    rounds = -(-tiles // device.processors)
    first = FIRST / device.clock
    return LAUNCH + max(rounds * main + first, work.memory_seconds(device))


def products() -> Iterator[Product]:
    for (m, k), depth, addends in product(SIDES, (1, 4), ADDENDS):
        if depth == 1 or not addends:
            yield Product(k, m, depth * m, addends)


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def predictions(resources: Iterable[Row]) -> Iterator[Row]:
    """Of the newest Triton's machine code: a row for each device, product and config."""
    halves = [row for row in resources if row["dtype"] == "fp16"]
    newest = max((row["triton"] for row in halves), key=version, default="")
    found = {(row["arch"], row["config"], row["adds"]): row for row in halves if row["triton"] == newest}
    for device, work in product(DEVICES, products()):
        capability = divmod(int(device.arch[2:]), 10)
        task = Work(work.k, work.m, work.p, torch.float16, work.addends, device.processors)
        chosen = default_config(task, capability)
        theirs = predict_cublas(work, device)
        for config in candidates(work.m, work.p, torch.float16, capability):
            used = found.get((device.arch, str(config), work.addends))
            if used is None:
                continue
            seconds, even = predict(config, work, used, device)
            yield {
                "device": device.name,
                "k": work.k,
                "m": work.m,
                "p": work.p,
                "addends": work.addends,
                "config": str(config),
                "ms": seconds * 1e3,
                "cublas_ms": theirs * 1e3,
                "speedup": theirs / seconds,
                "evenly": seconds / even,
                "default": config == chosen,
            }


def to_markdown(rows: list[Row]) -> str:
    lines = [
        "# Modelled times of symmetric products",
        "",
        "A model, by `bench/product_model.py`, which says what is in it; no GPU was used. Figures are 20 % uncertain,",
        "on B200 more. In fp16; `ms` and `cuBLAS` are milliseconds. `evenly` is what would be gained if the tiles of",
        "the last round were split among all multiprocessors, `by rule` how much longer than the fastest config of",
        "each product the one takes that `kernels/symmetric_tiles.py` chooses, and then come the others.",
        "",
        "| device | k x m x p | addends | fastest | ms | cuBLAS | times as fast | evenly | by rule | others |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    keys = ("device", "k", "m", "p", "addends")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for (device, k, m, p, addends), group in groups.items():
        best, *others = sorted(group, key=lambda row: float(row["ms"]))
        rule = next(row["ms"] / best["ms"] for row in group if row["default"])
        rest = ", ".join(f"{row['config']} {row['ms'] / best['ms']:.2f}" for row in others)
        lines.append(
            f"| {device} | {k}x{m}x{p} | {addends} | {best['config']} | {best['ms']:.3f} | {best['cublas_ms']:.3f} "
            f"| {best['speedup']:.2f} | {best['evenly']:.2f} | {rule:.2f} | {rest} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "product-model.md")
    parser.add_argument("--resources", type=Path, default=RESULTS / "kernel-resources.json")
    arguments = parser.parse_args()
    rows = list(predictions(json.loads(arguments.resources.read_text())["rows"]))
    markdown = to_markdown(rows)
    print(markdown)
    arguments.out.write_text(markdown)


if __name__ == "__main__":
    main()
