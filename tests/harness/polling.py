"""Keeps gloo's threads from polling: see ``polling.c``. Ranks that exchange much take half of the processor time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def calm(folder: str) -> None:
    """For all processes that this one starts from now on; where that cannot be built, they only take longer."""
    compiler, library = shutil.which(os.environ.get("CC", "cc")), f"{folder}/polling.so"
    if sys.platform == "linux" and compiler is not None and "LD_PRELOAD" not in os.environ:
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", library, str(SOURCE), "-ldl"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            os.environ["LD_PRELOAD"] = library
