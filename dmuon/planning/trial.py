"""The program of a quarantine's process: updates batches of each shape with variants, and tells what came of it.

It is run by its path, and finds dmuon and all else where the process does that has started it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class Packages:
    """Finds packages in given folders."""

    def __init__(self, folders: Mapping[str, Sequence[str]]) -> None:
        self._folders = folders

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        folders = self._folders.get(name)
        if not folders:
            return None
        first = os.path.join(folders[0], "__init__.py")
        return importlib.util.spec_from_file_location(name, first, submodule_search_locations=list(folders))


def main(place: str, job: str, told: str) -> None:
    """A line once it can begin, and one for each shape of the ``job``: its sides, what is wrong or ``null``."""
    known = json.loads(Path(place).read_text())
    end_with(known["parent"])
    end_after(known["starting"])
    sys.path[:] = known["path"]
    sys.meta_path.insert(0, Packages(known["folders"]))
    profiler: Any = importlib.import_module("dmuon.planning.profiler")
    device, options, trials = pickle.loads(Path(job).read_bytes())
    profiler.touch(device)
    end_after(known["seconds"])
    with Path(told).open("a") as file:

        def tell(*line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        tell("ready")
        for shape, rivals in trials:
            try:
                fault = profiler.trial_fault(shape, device, options, rivals)
            except Exception as error:  # whatever a compiler or a driver may raise
                fault = f"failed ({type(error).__name__}: {error})"
            tell(*shape, fault)
            try:
                profiler.touch(device)
            except Exception:  # some errors stay, and every later call meets them
                tell("lost")
                return


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends, where the system can do so."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def end_after(seconds: int) -> None:
    """End this process after so many seconds, also where a call into a driver does not come back."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
