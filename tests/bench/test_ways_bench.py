"""The bench of ways to orthogonalize runs end to end, and all ways come to what fp64 does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.limits import PROGRAM_SECONDS

BENCH = Path(__file__).resolve().parents[2] / "bench" / "ways.py"
SIZES = ["--count", "3", "--side", "16", "--rows", "16", "--cols", "64"]
BRIEF = ["--world", "2", "--rounds", "1", "--warmup", "0", "--costs", "flops"]


@pytest.mark.slow
def test_all_ways_are_right_and_owners_send_what_the_article_says(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), *SIZES, *BRIEF, "--json", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    assert ran.returncode == 0, ran.stderr
    for case, rows in json.loads(out.read_text())["cases"].items():
        assert list(rows) == ["owner", "replicated", "full_replication", "sharded", "large sharded", "teams", "auto"]
        for way, row in rows.items():
            assert row["error"] < 1e-4 and f"{way} " in ran.stdout, case
        assert rows["owner"]["seed MB"] == 2 * rows["replicated"]["seed MB"]
        assert rows["sharded"]["seed NS"] == 0.5
