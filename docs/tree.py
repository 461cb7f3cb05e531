"""Writes the list of files of docs/architecture.md from the first sentences of their docstrings.

    python docs/tree.py

``tests/test_docs.py`` fails while the page and the docstrings differ.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- the tree, by docs/tree.py -->", "<!-- end of the tree -->"
PACKAGES = (
    "dmuon/platform", "dmuon/model", "dmuon/layout", "dmuon/comm", "dmuon/planning", "dmuon/step", "dmuon/dedicated",
    "dmuon/exchanged", "dmuon/optimizer", "dmuon/report", "dmuon/integrations", "dmuon/tools/check",
    "dmuon/tools/simulation", "dmuon/tools/cli", "solver", "kernels",
)  # fmt: skip


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, in Markdown."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.sub(r":(?:class|func|meth):|``", lambda m: "`" if m[0] == "``" else "", docstring.split("\n\n")[0])


def tree() -> str:
    lines = []
    for package in PACKAGES:
        lines += [f"**`{package}/`** {sentence(ROOT / package / '__init__.py')}", ""]
        lines += [f"- `{p.name}`: {sentence(p)}" for p in sorted((ROOT / package).glob("*.py")) if p.stem != "__init__"]
        lines.append("")
    return "\n".join(line.replace("\n", " ") for line in lines)


def with_tree(page: str) -> str:
    """``page`` with the list of today's files."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tree()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_tree(PAGE.read_text()))
