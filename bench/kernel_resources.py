"""What the symmetric-product kernel takes of a GPU, from its machine code; needs no GPU.

    python bench/kernel_resources.py [--arch 80 90 100] [--out bench/results/kernel-resources]

Compiles every config that ``candidates`` offers for large and aligned matrices, for each architecture and dtype, A
contiguous and B the transpose of a contiguous matrix. Prints and writes OUT.json and OUT.md: registers and spilled
bytes per thread, shared memory per block and what the architecture allows, and the matrix instruction. Rows of other
Triton versions in OUT.json are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from common.results import write_report

from dmuon.kernels.symmetric_tiles import candidates

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
from aot import SHARED_MEMORY, compile_product

SIDE = 4096
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
COLUMNS = ("arch", "dtype", "config", "variant", "registers", "spilled", "shared", "limit", "instruction", "triton")

Row = dict[str, Any]


def measure(arch: int) -> list[Row]:
    rows = []
    for name, dtype in DTYPES.items():
        for config in candidates(SIDE, SIDE, dtype, (arch // 10, arch % 10)):
            used = compile_product(config, dtype, arch)
            rows.append(
                {
                    "arch": f"sm{arch}",
                    "dtype": name,
                    "config": str(config),
                    "variant": "descriptors" if config.descriptors else "pointers",
                    "registers": used.registers,
                    "spilled": used.spill_bytes,
                    "shared": used.shared_bytes,
                    "limit": SHARED_MEMORY[arch],
                    "instruction": used.instruction,
                    "triton": triton.__version__,
                    "date": date.today().isoformat(),
                }
            )
            print(format_row(rows[-1]), flush=True)
    return rows


def format_row(row: Row) -> str:
    return "| " + " | ".join(str(row[column]) for column in COLUMNS) + " |"


def to_markdown(rows: list[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    lines = [
        "# Resources of the symmetric-product kernel",
        "",
        f"Compiled by `bench/kernel_resources.py` on {' and '.join(dates)}, without a GPU. Registers and spilled bytes",
        "are per thread, shared memory and its limit in bytes per block. A row stands for the kernel that adds C, with",
        "A contiguous and B the transpose of a contiguous matrix, aligned.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *map(format_row, rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_MEMORY, default=list(SHARED_MEMORY))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernel-resources")
    arguments = parser.parse_args()

    measured = [row for arch in arguments.arch for row in measure(arch)]
    path = arguments.out.with_suffix(".json")
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    renewed = {(row["triton"], row["arch"]) for row in measured}
    rows = [row for row in kept if (row["triton"], row["arch"]) not in renewed] + measured
    rows.sort(key=lambda row: (row["triton"], int(row["arch"][2:])))
    write_report(arguments.out, {"rows": rows}, to_markdown(rows))


if __name__ == "__main__":
    main()
