"""The commands that an installation has, started in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name

Command = Callable[[Sequence[str]], int]


def command(name: str) -> Command:
    """What an installer makes a script of, as ``pyproject.toml`` says: it takes arguments and returns a status."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf8")
    found = re.search(rf'^{name} = "(dmuon\.[\w.]+:\w+)"$', text, re.MULTILINE)
    assert found, f"pyproject.toml has no script {name}"
    entry: Command = resolve_name(found[1])
    return entry
