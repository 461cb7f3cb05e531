"""What the symmetric-product kernel takes of a GPU, from its machine code; needs no GPU.

    python bench/kernel_resources.py [--arch 80 90 100] [--out bench/results/kernel-resources]

Compiles every config that ``candidates`` offers for large and aligned matrices, for each architecture and dtype, A
contiguous and B the transpose of a contiguous matrix, with 0, 1 and 4 addends. Prints and writes OUT.json and OUT.md:
registers and spilled bytes per thread, shared memory per block and what the architecture allows, blocks that run on one
multiprocessor at once, the matrix instruction, and how many instructions stand behind the last of these, which is what
nothing hides where one block runs alone. Rows of other Triton versions in OUT.json are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from common.results import write_report

from dmuon.kernels.symmetric_tiles import candidates

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
from aot import SHARED_MEMORY, compile_product, disassemble

SIDE = 4096
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
COLUMNS = (
    "arch", "dtype", "config", "adds", "registers", "spilled", "shared", "limit", "blocks", "instruction", "epilogue",
    "triton",
)  # fmt: skip
ADDENDS = {"fp16": (0, 1, 4), "bf16": (1,), "fp32": (1,)}

# As machine code calls what the PTX calls mma.sync, wgmma and tcgen05.mma.
_MATRIX = ("HMMA", "HGMMA", "UTCHMMA")

Row = dict[str, Any]


def measure(arch: int) -> list[Row]:
    rows = []
    for name, dtype in DTYPES.items():
        for config, adds in product(candidates(SIDE, SIDE, dtype, (arch // 10, arch % 10)), ADDENDS[name]):
            used = compile_product(config, dtype, arch, adds=adds)
            rows.append(
                {
                    "arch": f"sm{arch}",
                    "dtype": name,
                    "config": str(config),
                    "adds": adds,
                    "registers": used.registers,
                    "spilled": used.spill_bytes,
                    "shared": used.shared_bytes,
                    "limit": SHARED_MEMORY[arch],
                    "blocks": used.blocks,
                    "instruction": used.instruction,
                    "epilogue": epilogue(disassemble(used.cubin)),
                    "triton": triton.__version__,
                    "date": date.today().isoformat(),
                }
            )
            print(format_row(rows[-1]), flush=True)
    return rows


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def epilogue(code: str) -> int | None:
    """Instructions behind the last matrix instruction; ``None`` where there is none."""
    names = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", code, re.MULTILINE)
    last = max((index for index, name in enumerate(names) if name in _MATRIX), default=None)
    if last is None:
        return None
    return sum(name not in ("NOP", "BRA") for name in names[last + 1 :])


def format_row(row: Row) -> str:
    return "| " + " | ".join(str(row[column]) for column in COLUMNS) + " |"


def to_markdown(rows: list[Row]) -> str:
    """Of the newest Triton; the rest is in the JSON file."""
    newest = max((row["triton"] for row in rows), key=version, default="")
    rows = [row for row in rows if row["triton"] == newest]
    dates = sorted({row["date"] for row in rows})
    lines = [
        "# Resources of the symmetric-product kernel",
        "",
        f"Compiled by `bench/kernel_resources.py` on {' and '.join(dates)}, without a GPU. Registers and spilled bytes",
        "are per thread, shared memory and its limit in bytes per block. `blocks` run on one multiprocessor at once,",
        "and `epilogue` counts the instructions behind the last matrix instruction, of all branches. A row stands for",
        "the kernel with so many addends, A contiguous and B the transpose of a contiguous matrix, aligned.",
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
    kept = [row for row in kept if row.keys() >= set(COLUMNS)]
    renewed = {(row["triton"], row["arch"]) for row in measured}
    rows = [row for row in kept if (row["triton"], row["arch"]) not in renewed] + measured
    rows.sort(key=lambda row: (version(row["triton"]), int(row["arch"][2:])))
    write_report(arguments.out, {"rows": rows}, to_markdown(rows))


if __name__ == "__main__":
    main()
