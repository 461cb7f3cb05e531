"""The process in which MILPs are searched for: a solver may hang, print without end, die, or leave processes behind.

The child and what it starts are one process group, which is killed when it has ended, when its time is over, and when
the planner's process is gone. It keeps the best that it has found in a file, so that a search that is cut off loses
nothing. This file is also its program.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

_POLL_MS = 200
_GRACE_S = 3.0  # beyond what the search may take: a start on a busy machine, a solver between two looks at the clock
_FILE_BYTES = 1 << 28  # that the child and its solver may write to one file
_QUESTION, _ANSWER = "question", "answer"


class SolverFailed(Exception):
    """The solver gave nothing that can be used; the message says what happened."""


# -- the planner's side -----------------------------------------------------------------------------------------------


def run_search(question: object, seconds: float) -> tuple[Any, str]:
    """The last answer that ``dmuon.solver.exact.search`` reported about ``question`` in a child of its own.

    Args:
        question: its first arguments, which are pickled.
        seconds: that the search takes by itself; it is killed a few seconds later.

    Returns:
        the answer, and what ended the child if the answer is not its last one.

    Raises:
        SolverFailed: there is no child, or no answer that can be read.
    """
    if importlib.util.find_spec("pulp") is None:
        raise SolverFailed("PuLP cannot be imported; install pulp>=3.3,<4")
    try:
        folder = tempfile.TemporaryDirectory(prefix="dmuon-milp-", ignore_cleanup_errors=True)
    except OSError as error:
        raise SolverFailed(f"no temporary folder can be made ({error})") from error
    with folder as place:  # files of solvers that are killed are removed with it
        Path(place, _QUESTION).write_bytes(pickle.dumps(question))
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps([os.path.abspath(part) for part in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=place,
                env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), place)},
                start_new_session=True,  # its own group; a signal to the planner's, as by Ctrl-C, is for the planner
            )
        except (OSError, ValueError, TypeError) as error:  # the last two: an odd sys.executable
            raise SolverFailed(f"its process cannot be started ({error})") from error
        fault = "its process ended without an answer"
        try:
            process.wait(seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            fault = "it gave no answer within its time, and was ended"
        finally:
            with suppress(OSError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        try:
            return pickle.loads(Path(place, _ANSWER).read_bytes()), fault
        except FileNotFoundError as error:
            raise SolverFailed(fault) from error


# -- the child --------------------------------------------------------------------------------------------------------


def main(path: list[str]) -> None:
    """Search until done, or until the planner's process is gone; ``path`` is the planner's ``sys.path``."""
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    threading.Thread(target=_end_with_planner, args=(pipe, os.getppid()), daemon=True).start()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")  # PuLP announces what its next version removes
        sys.path[:] = path
        for name, folders in (("dmuon", []), ("dmuon.solver", [str(Path(__file__).parent)])):
            sys.modules[name] = types.ModuleType(name)  # without their own code, of which nothing is needed here
            sys.modules[name].__path__ = folders
        exact = importlib.import_module("dmuon.solver.exact")
        exact.search(*pickle.loads(Path(_QUESTION).read_bytes()), _report)
    finally:
        os._exit(0)


def _report(answer: object) -> None:
    new = Path(f"{_ANSWER}.new")
    new.write_bytes(pickle.dumps(answer))
    new.replace(_ANSWER)


def _end_with_planner(pipe: int, planner: int) -> None:
    """Kill this group when the planner's process has ended, which closes the pipe unless a fork of it keeps that."""
    watched = select.poll()
    watched.register(pipe, select.POLLIN | select.POLLHUP)
    while os.getppid() == planner and not watched.poll(_POLL_MS):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
