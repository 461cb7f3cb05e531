"""Tests in Triton's interpreter, which is chosen when kernels are decorated: files ``test_interpreted_*.py``.

A pytest process of its own runs those that were chosen with ``TRITON_INTERPRET=1``, beside the other tests, from the
start. This one reports at its end how they ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
LIMIT_SECONDS = 380  # 20 s of work, more on a busy machine


def interpreted(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.path.name.startswith("test_interpreted_")


def _known_as(item: pytest.Function) -> tuple[str, str]:
    return item.path.stem, item.name


class Interpreter:
    """A process that runs tests in the interpreter."""

    def __init__(self, items: list[pytest.Item], folder: Path) -> None:
        self.report, self.log = folder / "report.xml", folder / "log"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={self.report}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *(item.nodeid for item in items)],
                cwd=items[0].config.rootpath,
                env={**os.environ, "TRITON_INTERPRET": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @cached_property
    def outcomes(self) -> dict[tuple[str, str], tuple[str, str]]:
        """By file and test, "failure", "error" or "skipped" with what was said, or "passed"."""
        status = self.process.wait(LIMIT_SECONDS)
        assert self.report.exists(), f"exit status {status}: {self.log.read_text()[-2000:]}"
        found = {}
        for case in ElementTree.parse(self.report).iter("testcase"):
            told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            file = case.get("classname", "").rpartition(".")[2]
            found[file, case.get("name", "")] = (
                ("passed", "") if told is None else (told.tag, told.text or told.get("message", ""))
            )
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.report.parent, ignore_errors=True)


INTERPRETER = pytest.StashKey[Interpreter]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = list(filter(interpreted, items))
    items[:] = [item for item in items if not interpreted(item)] + mine
    for item in mine:
        item.add_marker(pytest.mark.timeout(400))  # the first test waits for the interpreter


def pytest_collection_finish(session: pytest.Session) -> None:
    mine = list(filter(interpreted, session.items))
    if mine and not INTERPRETING and not session.config.option.collectonly:
        folder = Path(tempfile.mkdtemp(prefix="interpreter"))
        session.config.stash[INTERPRETER] = Interpreter(mine, folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if interpreter := session.config.stash.get(INTERPRETER, None):
        interpreter.end()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETING or not interpreted(pyfuncitem):
        return None
    kind, told = pyfuncitem.config.stash[INTERPRETER].outcomes[_known_as(pyfuncitem)]
    if kind == "skipped":
        pytest.skip(told)
    if kind != "passed":
        pytest.fail(told, pytrace=False)
    return True
