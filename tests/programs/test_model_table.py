"""The table of models and frameworks runs its tests, names tests that exist, and is not green by itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from harness.limits import PROGRAM_SECONDS

from programs import model_table
from programs.model_table import REMEDY, ROWS, TRAINS, Row, chosen, result

PROGRAM = Path(model_table.__file__)


def table(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, cwd=PROGRAM.parents[2], capture_output=True, text=True, timeout=PROGRAM_SECONDS)


def test_a_row_is_green_only_if_all_its_tests_ran_and_passed() -> None:
    row = Row("a model", TRAINS, ("a.py::test_x", "a.py::test_y[1]"))
    passed = {"a.py::test_x[0]": "passed", "a.py::test_x[1]": "passed", "a.py::test_y[1]": "passed"}
    assert result(row, passed) == TRAINS
    assert result(Row("another", REMEDY, row.tests), passed) == REMEDY
    assert result(row, passed | {"a.py::test_x[1]": "failed"}) == "FAILED: 1 of 3"
    assert result(row, passed | {"a.py::test_y[1]": "skipped"}) == "SKIPPED: 1 of 3"
    assert result(row, {"a.py::test_x[0]": "passed", "a.py::test_y[10]": "passed"}) == "MISSING: 1 of 2"


def test_every_row_names_functions_that_exist() -> None:
    for test in {test.partition("[")[0] for row in ROWS for test in row.tests}:
        file, _, function = test.partition("::")
        assert f"\ndef {function}(" in (PROGRAM.parents[1] / file).read_text(), test


@pytest.mark.slow
def test_a_part_of_the_table_is_green() -> None:
    words = ["nanoGPT"] + ["EnCodec"] * (importlib.util.find_spec("transformers") is not None)
    done = table(*words)
    rows = len(chosen(words))
    assert done.returncode == 0 and f"{rows} of {rows} rows are green" in done.stdout, done.stdout[-3000:]
    assert f"result: {TRAINS}" in done.stdout and f"result: {REMEDY}" in done.stdout


def test_words_that_name_no_row_are_not_green() -> None:
    done = table("no such model")
    assert done.returncode == 1 and "0 of 0 rows are green" in done.stdout
