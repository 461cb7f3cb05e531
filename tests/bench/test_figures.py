"""Figures in the pages are those of the records in bench/results, which say where they come from."""

from __future__ import annotations

import re
from types import ModuleType

from harness.commands import ROOT

MODULE = "figures"


def test_no_figure_is_stale(bench: ModuleType) -> None:
    wrong = bench.stale()
    assert not wrong, "\n".join([*wrong, "python bench/figures.py --write writes figures of records into pages"])


def test_a_figure_that_differs_is_found_and_written_in_its_place(bench: ModuleType) -> None:
    records = bench.Records(run={"ms": {"ours": 1234.5, "error": 2e-6}, "p": -0.25})
    template = "| ours | {run[ms][ours]:.2f/1000} | {run[ms][error]:.0e} | {run[p]:+.2f} |"
    page = "before\n| ours | 9 | 1 |\n| ours | 1.11 | 3e-5 | +1.00 |\nbehind"
    assert bench.update(page, template, records) == "before\n| ours | 9 | 1 |\n| ours | 1.23 | 2e-6 | −0.25 |\nbehind"
    assert bench.update("| theirs | 1 | 2 | 3 |", template, records) is None
    assert bench.update("| ours |\n1.11 | 3e-5 | 0 |", template, records) == "| ours |\n1.23 | 2e-6 | −0.25 |"


def test_make_bench_takes_every_record_that_pages_show(bench: ModuleType) -> None:
    taken = set(re.findall(r"RECORD,.*,([\w-]+)\)", (ROOT / "Makefile").read_text()))
    used = {name for _, template in bench.templates() for name in re.findall(r"\{([\w-]+)\[", template)}
    long = {"train-10m-cpu", "newton-schulz-cpu"}  # the second where a CPU does not multiply bf16
    assert used - taken <= long
