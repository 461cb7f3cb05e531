"""mkdocs hooks: docstrings are read without importing anything, and no public name is left out of the reference.

``solver/``, ``kernels/`` and ``profiles/`` stand at the top of the repository and install as ``dmuon.solver``,
``dmuon.kernels`` and ``dmuon.profiles``. A copy in ``build/docs``, which mkdocstrings searches (mkdocs.yml), looks like
the installed package. Links to the repository come from the one constant in ``setup.py``.
"""

from __future__ import annotations

import ast
import logging
import re
import shutil
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "build" / "docs" / "dmuon"
_OUTSIDE = ("solver", "kernels", "profiles")
_CACHES = shutil.ignore_patterns("__pycache__")
_log = logging.getLogger("mkdocs.hooks.reference")  # a warning of mkdocs' loggers fails a strict build


def on_startup(command: str, dirty: bool) -> None:
    """Lay the sources out as they install, before mkdocstrings looks for them."""
    shutil.rmtree(_PACKAGE, ignore_errors=True)
    shutil.copytree(_ROOT / "dmuon", _PACKAGE, ignore=_CACHES)
    for name in _OUTSIDE:
        shutil.copytree(_ROOT / name, _PACKAGE / name, ignore=_CACHES)


def on_config(config: Any) -> Any:
    """Link to the repository, once its address is known."""
    address = re.search(r'^ADDRESS = "(.*)"$', (_ROOT / "setup.py").read_text(), re.MULTILINE)
    if address is not None and address[1]:
        config["repo_url"] = address[1]
        config["edit_uri"] = "edit/main/docs/"
    return config


def on_post_build(config: Any) -> None:
    """Warn about public names without an entry in the reference."""
    site = Path(config["site_dir"]) / "reference"
    pages = "".join(page.read_text() for page in site.rglob("index.html"))
    for module, folder in (
        ("dmuon", _PACKAGE),
        ("dmuon.solver", _PACKAGE / "solver"),
        ("dmuon.kernels", _PACKAGE / "kernels"),
    ):
        for name in _public_names(folder / "__init__.py"):
            if name not in _OUTSIDE and f'id="{module}.{name}"' not in pages:
                _log.warning("%s.%s is in no page of docs/reference", module, name)


def _public_names(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []
