"""Figures in the pages are those of the records: shows where they differ, or writes them into the pages.

    python bench/figures.py            # which pages are stale, and which records do not say where they come from
    python bench/figures.py --write

bench/results/figures.md has the sentences and rows of tables that hold figures, each below the name of its page, with
``{record[key][key]:.2f}`` in place of a figure: ``record`` is the name of a JSON file in bench/results. ``:.2f/1000``
is in thousands.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
SAYS = ("command", "commit", "date")  # what a record says of itself


class Records(dict[str, Any]):
    """The records by name, read when one is asked for."""

    def __missing__(self, name: str) -> Any:
        self[name] = json.loads((RESULTS / f"{name}.json").read_text())
        return self[name]


def templates() -> Iterator[tuple[Path, str]]:
    """Pages, and lines with places for figures."""
    page = ROOT
    for line in (RESULTS / "figures.md").read_text().splitlines():
        if line.startswith("@ "):
            page = ROOT / line[2:]
        elif line.strip() and not line.startswith("#"):
            yield page, line.strip()


def parts(template: str, records: Records) -> Iterator[tuple[str, str | None]]:
    """Text as it stands, and the figure behind it."""
    for text, field, how, _ in string.Formatter().parse(template):
        figure = None
        if field is not None:
            value, _ = string.Formatter().get_field(field, (), records)
            form, _, unit = (how or "").partition("/")
            figure = format(value / float(unit) if unit else value, form)
        yield text, figure and re.sub(r"e([+-])0", r"e\1", figure).replace("-", "−", figure.startswith("-"))


def update(page: str, template: str, records: Records) -> str | None:
    """The page with today's figures in the place that is shaped like the template; None where there is none."""
    found = list(parts(template, records))
    shape = "".join(
        r"\s+".join(map(re.escape, re.split(r"\s+", text))) + ("" if figure is None else r"([^|\s]*?)")
        for text, figure in found
    )
    match = re.search(shape + r"(?=\s|$)", page)
    if match is None:
        return None
    figures = [figure for _, figure in found if figure is not None]
    for number in range(len(figures), 0, -1):
        start, end = match.span(number)
        page = page[:start] + figures[number - 1] + page[end:]
    return page


def stale(write: bool = False) -> list[str]:
    """What is wrong, a line each."""
    records, wrong = Records(), []
    for path, template in templates():
        page = path.read_text()
        changed = update(page, template, records)
        if changed is None:
            wrong.append(f"{path.relative_to(ROOT)} has nothing like: {template}")
        elif changed != page and write:
            path.write_text(changed)
        elif changed != page:
            said = "".join(text + (figure or "") for text, figure in parts(template, records))
            wrong.append(f"{path.relative_to(ROOT)} is stale, its record says: {said}")
    for name, record in records.items():
        wrong += [f"bench/results/{name}.json does not say its {key}" for key in SAYS if not record.get(key)]
    return wrong


if __name__ == "__main__":
    found = stale("--write" in sys.argv[1:])
    print("\n".join(found) or "all figures are those of the records")
    sys.exit(bool(found))
