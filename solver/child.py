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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_POLL_MS = 200
_GRACE_S = 3.0  # beyond what the search may take: a start on a busy machine, a solver between two looks at the clock
_FILE_BYTES = 1 << 28  # of what a solver may write to one file
_QUESTION, _ANSWER = "question", "answer"


class SolverFailed(Exception):
    """The solver gave nothing that can be used; the message says what happened."""


# -- the planner's side -----------------------------------------------------------------------------------------------


def run_search(question: object, seconds: float) -> dict[str, Any]:
    """The last answer that ``dmuon.solver.exact.search`` reported about ``question`` in a child of its own.

    Args:
        question: its first arguments, which are pickled.
        seconds: that the search takes by itself; it is killed a few seconds later.

    Raises:
        SolverFailed: there is no child, or no answer that can be read.
    """
    command = _cbc()
    try:
        folder = tempfile.TemporaryDirectory(prefix="dmuon-milp-", ignore_cleanup_errors=True)
    except OSError as error:
        raise SolverFailed(f"no temporary folder can be made ({error})") from error
    with folder as place:  # files of solvers that are killed are removed with it
        Path(place, _QUESTION).write_bytes(pickle.dumps(question))
        settings = {"path": [os.path.abspath(part) for part in sys.path], "command": command, "place": place}
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps(settings)],
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
        return _read(Path(place, _ANSWER), fault)


def _cbc() -> str:
    """The file that is CBC."""
    try:
        # From a thread: PuLP keeps frames of imports that fail inside it, and so all that their callers hold.
        with ThreadPoolExecutor(1) as pool:
            pulp = pool.submit(importlib.import_module, "pulp").result()
    except ImportError as error:
        raise SolverFailed(f"PuLP cannot be imported ({error}); install pulp>=3.3,<4") from error
    return str(pulp.PULP_CBC_CMD.pulp_cbc_path)


def _read(path: Path, fault: str) -> dict[str, Any]:
    """The answer in ``path``, with ``fault`` as its note where the search was cut off."""
    try:
        if path.stat().st_size > _FILE_BYTES:
            raise SolverFailed(f"its answer is longer than {_FILE_BYTES} bytes")
        answer = dict(json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        raise SolverFailed(fault) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SolverFailed("its answer cannot be read") from error
    if not answer.get("done"):
        answer |= {"note": f"failed: {fault}", "incomplete": True}
    return answer


# -- the child --------------------------------------------------------------------------------------------------------


def main(settings: dict[str, Any]) -> None:
    """Search until done, or until the planner's process is gone."""
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    threading.Thread(target=_end_with_planner, args=(pipe, os.getppid()), daemon=True).start()
    try:
        _search(**settings)
    finally:
        os._exit(0)


def _end_with_planner(pipe: int, planner: int) -> None:
    """Kill this group when the planner's process has ended, which closes the pipe unless a fork of it keeps that."""
    watched = select.poll()
    watched.register(pipe, select.POLLIN | select.POLLHUP)
    while os.getppid() == planner and not watched.poll(_POLL_MS):
        pass
    os.killpg(0, signal.SIGKILL)


def _search(path: list[str], command: str, place: str) -> None:
    """Import the package alone, as ``dmuon`` would bring torch, and answer the question."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # PuLP announces what its next version removes
    sys.path[:] = path
    folder, name = Path(__file__).parent, "dmuon.solver"
    sys.modules["dmuon"] = types.ModuleType("dmuon")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    exact = importlib.import_module(f"{name}.exact")

    def report(answer: dict[str, Any]) -> None:
        new = Path(place, f"{_ANSWER}.new")
        new.write_text(json.dumps(answer))
        new.replace(Path(place, _ANSWER))

    exact.search(*pickle.loads(Path(place, _QUESTION).read_bytes()), command, report)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
