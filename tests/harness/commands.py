"""The commands that an installation has, started in this process, and programs of bench/ in others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from harness.limits import PROGRAM_SECONDS

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
Command = Callable[[Sequence[str]], int]


def command(name: str) -> Command:
    """What an installer makes a script of, as ``pyproject.toml`` says: it takes arguments and returns a status."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf8")
    found = re.search(rf'^{name} = "(dmuon\.[\w.]+:\w+)"$', text, re.MULTILINE)
    assert found, f"pyproject.toml has no script {name}"
    entry: Command = resolve_name(found[1])
    return entry


def run_bench(script: str, *arguments: object, seconds: float = PROGRAM_SECONDS) -> str:
    """What a program of bench/ prints, which must end well."""
    command = [sys.executable, str(BENCH / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    return done.stdout


def bench_worker(rank: int, _world: int, worker: Callable[..., Any], *args: Any) -> Any:
    """On a rank of the pool: what a program of bench/ lets each rank do, whose settings have the world."""
    return worker(rank, *args)
