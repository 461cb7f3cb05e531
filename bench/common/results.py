"""What a bench writes: one JSON record, which says what it was measured on, by which command, and when."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.checkout import commit  # before anything of dmuon, which it finds
from dmuon import __version__
from dmuon.platform.files import write_bytes

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what products on the CPU go by


def write_json(path: Path | str, document: Any) -> None:
    """Write, in a folder that is made where there is none; readers and a crash find the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, f"{json.dumps(document, indent=1, ensure_ascii=False)}\n".encode())


def origin() -> dict[str, Any]:
    """The machine, the versions of what runs on it, the commit and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = found.get("flags", "").split()
    return {
        "machine": {
            "cpu": found.get("model name", platform.processor() or platform.machine()),
            "features": " ".join(feature for feature in _FEATURES if feature in flags),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "dmuon": __version__},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def head(program: str, argv: Sequence[str]) -> dict[str, Any]:
    """What every record begins with: the command, without where the record goes, and where it comes from."""
    words = [word for word in argv if not word.startswith("--json=")]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return {"command": shlex.join(["python", f"bench/{program}", *words]), **origin()}


def told(record: Mapping[str, Any]) -> str:
    """What a record was measured on, in one line."""
    machine, versions = record["machine"], record["versions"]
    return (
        f"`{record['command']}`, {record['date']}, commit {record['commit']}: "
        f"{machine['cpu']} ({machine['features']}), "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def columns(rows: Mapping[str, Mapping[str, Any]], formats: Mapping[str, str], corner: str = "") -> str:
    """A line for each row and a column for each format, aligned; ``-`` where a row has no such value."""
    table = [[corner, *formats]]
    for name, row in rows.items():
        cells = (format(row[column], how) if column in row else "-" for column, how in formats.items())
        table.append([name, *cells])
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(rest, widths[1:], strict=True))]).rstrip()
        for first, *rest in table
    )
