"""The closing line of the suite: what the parts count together, whatever their processes say behind pytest."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

spec = importlib.util.spec_from_file_location("suite", Path(__file__).with_name("run.py"))
assert spec is not None and spec.loader is not None
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)


def test_a_part_counts_by_the_last_line_of_pytest() -> None:
    early = "===== 9 passed in 1.00s =====\n"
    closed = "======== 1 failed, 316 passed, 11 skipped, 4895 deselected in 396.98s (0:06:36) ========\n"
    found = suite.count(early + closed + 'nanobind: leaked 3 passed\n - leaked function "get"\n')
    assert found == Counter(failed=1, passed=316, skipped=11, deselected=4895)
    assert suite.count("Killed\n") == Counter()
    assert "1 failed, 316 passed, 11 skipped in 2.00s" in suite.closing(found, 2.0)
