"""The bench of ways to orthogonalize runs end to end, and all ways come to what fp64 does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.commands import run_bench

SIZES = ["--count", "3", "--side", "16", "--rows", "16", "--cols", "64"]
BRIEF = ["--world", "2", "--rounds", "1", "--warmup", "0", "--costs", "flops"]


@pytest.mark.slow
def test_all_ways_are_right_and_owners_send_what_the_article_says(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    said = run_bench("ways.py", *SIZES, *BRIEF, "--json", out)
    for case, rows in json.loads(out.read_text())["cases"].items():
        assert list(rows) == ["owner", "replicated", "full_replication", "sharded", "large sharded", "teams", "auto"]
        for way, row in rows.items():
            assert row["error"] < 1e-4 and f"{way} " in said, case
        assert rows["owner"]["seed MB"] == 2 * rows["replicated"]["seed MB"]
        assert rows["sharded"]["seed NS"] == 0.5
