"""Tests in Triton's interpreter, which is chosen when kernels are decorated: files ``test_interpreted_*.py``.

A pytest process for each of them runs its chosen tests with ``TRITON_INTERPRET=1``. This one reports how they ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
LIMIT_SECONDS = 380  # 20 s of work, more on a busy machine


def interpreted(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.path.name.startswith("test_interpreted_")


class Interpreter:
    """A process that runs tests of one file in the interpreter."""

    def __init__(self, items: list[pytest.Item], folder: Path) -> None:
        self._report, self._log = folder / "report.xml", folder / "log"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={self._report}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *(item.nodeid for item in items)],
                cwd=items[0].config.rootpath,
                env={**os.environ, "TRITON_INTERPRET": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @cached_property
    def outcomes(self) -> dict[str | None, tuple[str, str]]:
        """By test, "failure", "error" or "skipped" with what was said, or "passed"."""
        status = self.process.wait(LIMIT_SECONDS)
        assert self._report.exists(), f"exit status {status}: {self._log.read_text()[-2000:]}"
        found = {}
        for case in ElementTree.parse(self._report).iter("testcase"):
            told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            found[case.get("name")] = (
                ("passed", "") if told is None else (told.tag, told.text or told.get("message", ""))
            )
        return found


@pytest.fixture(scope="session")
def interpreters(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Interpreter]]:
    """One for each file. They start together, at the first test that wants one of them."""
    chosen: dict[Path, list[pytest.Item]] = {}
    for item in filter(interpreted, request.session.items):
        chosen.setdefault(item.path, []).append(item)
    started = {path: Interpreter(items, tmp_path_factory.mktemp(path.stem)) for path, items in chosen.items()}
    yield started
    for one in started.values():
        one.process.kill()
        one.process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(interpreted, items):
        if not INTERPRETING and "interpreters" not in item.fixturenames:
            item.fixturenames.append("interpreters")
        item.add_marker(pytest.mark.timeout(400))  # the first test waits for the interpreter


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETING or not interpreted(pyfuncitem):
        return None
    kind, told = pyfuncitem.funcargs["interpreters"][pyfuncitem.path].outcomes[pyfuncitem.name]
    if kind == "skipped":
        pytest.skip(told)
    if kind != "passed":
        pytest.fail(told, pytrace=False)
    return True
