"""The table of docs/how-to/memory.md is what bench/memory.py counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness.commands import ROOT, run_bench
from harness.limits import PROGRAM_SECONDS

ROW = re.compile(r"^\| ([A-Z\w][^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.pitfall("P59")
def test_the_page_says_what_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    run_bench("memory.py", "--json", out, seconds=2 * PROGRAM_SECONDS)
    counted = json.loads(out.read_text())["rows"]
    section = (ROOT / "docs" / "how-to" / "memory.md").read_text().split("## How much")[0]
    said = {name: [float(n) for n in numbers] for name, *numbers in ROW.findall(section)}
    assert said.keys() == counted.keys()
    for name, numbers in said.items():  # what is under way at once varies a little
        assert numbers == pytest.approx(list(counted[name].values()), abs=0.5), name
