"""Makes dmuon importable from the checkout that a bench stands in, whether it is installed or not.

``solver/``, ``kernels/`` and ``profiles/`` stand at the top of the repository, and are ``dmuon.solver`` and so on once
they are installed. Import this before anything of dmuon.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "dmuon": ROOT / "dmuon",
    "dmuon.solver": ROOT / "solver",
    "dmuon.kernels": ROOT / "kernels",
    "dmuon.profiles": ROOT / "profiles",
}


class Checkout:
    """Finds these packages in the checkout; what is inside of them is found as usual."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        folder = FOLDERS.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


if "dmuon" not in sys.modules:
    sys.meta_path.insert(0, Checkout)  # type: ignore[arg-type]


def commit() -> str:
    """Of the checkout, with a plus where it was changed since; empty where git does not know."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
