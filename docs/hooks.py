"""mkdocs hook: one folder that looks like the installed package, so that docstrings are read without importing it.

``solver/``, ``kernels/`` and ``profiles/`` stand at the top of the repository and install as ``dmuon.solver``,
``dmuon.kernels`` and ``dmuon.profiles``; mkdocstrings searches ``build/docs`` (mkdocs.yml).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_CACHES = shutil.ignore_patterns("__pycache__")
_OUTSIDE = ("solver", "kernels", "profiles")


def on_config(config: Any) -> Any:
    package = _ROOT / "build" / "docs" / "dmuon"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(_ROOT / "dmuon", package, ignore=_CACHES)
    for name in _OUTSIDE:
        shutil.copytree(_ROOT / name, package / name, ignore=_CACHES)
    return config
