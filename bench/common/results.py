"""What a bench writes: JSON and Markdown, with what it was measured on."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what products on the CPU go by


def write_json(path: Path | str, document: Any) -> None:
    """Write, in a folder that is made where there is none; readers and a crash find the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    part.replace(path)


def write_report(out: Path, document: Any, markdown: str) -> None:
    """The document as ``out.json`` and the same for people as ``out.md``."""
    write_json(out.with_suffix(".json"), document)
    out.with_suffix(".md").write_text(markdown)


def origin() -> dict[str, str]:
    """The CPU and which of the features that matter it has, torch, and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "features": " ".join(feature for feature in _FEATURES if feature in flags),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def without_home(text: str) -> str:
    """``text`` without the name of the user, which paths of caches hold."""
    return text.replace(str(Path.home()), "~")
