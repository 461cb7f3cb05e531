"""Scripts in Triton's interpreter, which is chosen when kernels are decorated: each is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# By the module that reads what they print. They start together, at the first test that wants one of them.
SCRIPTS = {
    "test_newton_schulz_triton": "interpreted_newton_schulz.py",
    "test_symmetric_triton": "interpreted_symmetric.py",
    "test_update_triton": "interpreted_update.py",
}
LIMIT_SECONDS = 380  # 20 s of work, more on a busy machine


@pytest.fixture(scope="session")
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """What the script of a test module printed; the script must have ended well."""
    folder = tmp_path_factory.mktemp("interpreted")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started: dict[str, subprocess.Popen[bytes]] = {}
    for module in {item.module.__name__ for item in request.session.items if isinstance(item, pytest.Function)}:
        if module in SCRIPTS:
            with (folder / f"{module}.out").open("wb") as out, (folder / f"{module}.err").open("wb") as err:
                command = [sys.executable, str(FOLDER / SCRIPTS[module])]
                started[module] = subprocess.Popen(command, env=environment, stdout=out, stderr=err)

    def printed(module: str) -> str:
        status = started[module].wait(LIMIT_SECONDS)
        out, err = ((folder / f"{module}.{kind}").read_text() for kind in ("out", "err"))
        assert status == 0, f"after {len(out.splitlines())} lines: {err[-2000:]}"
        return out

    yield printed
    for process in started.values():
        process.kill()
        process.wait()
