"""What Triton's kernels compute in its interpreter, which is chosen when kernels are decorated.

So ``interpreted_*.py`` are tests of another process: ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted_update.py``
runs some of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILES = sorted(map(str, Path(__file__).parent.glob("interpreted_*.py")))
LIMIT_SECONDS = 380  # 20 s of work, more on a busy machine


def test_kernels_compute_in_the_interpreter_what_they_should() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert FILES and done.returncode == 0, done.stdout[-10_000:] + done.stderr
