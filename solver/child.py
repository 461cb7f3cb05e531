"""The process in which MILPs are searched for: a solver may hang, print without end, die, or leave processes behind.

The child is two processes. The first one adopts whatever is left without a parent below it, and watches a pipe. When
that is written to or closed, which it also is when the planner's process dies, or when the second one has ended, it
kills every process below it, those too that have made sessions of their own. The second one searches, and keeps the
best that it has found in a file, so that a search that is cut off loses nothing.

This file is also the program of the child, so it imports nothing of the package before it has forked.
"""

from __future__ import annotations

import ctypes
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
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_POLL_MS = 200
_GRACE_S = 3.0  # beyond what the search may take: a start on a busy machine, a solver between two looks at the clock
_ENDING_S = 3.0  # for the child to end what it has started
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
                start_new_session=True,  # a signal to the planner's group, as by Ctrl-C, is for the planner
            )
        except (OSError, ValueError, TypeError) as error:  # the last two: an odd sys.executable
            raise SolverFailed(f"its process cannot be started ({error})") from error
        fault = "its process ended without an answer"
        try:
            process.wait(seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            fault = "it gave no answer within its time, and was ended"
        finally:
            _end(process)
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child with every process that it has started."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(b"x")  # a process that was forked from this one may keep the pipe open
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_S + 2)
    if process.returncode != 0:  # it was killed, or stopped
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
    """Search until done, or until told to end by the pipe that is standard input."""
    with suppress(Exception):  # not on every system; there a process with a session of its own is not found
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    planner = os.getppid()
    worker = os.fork()
    if worker:
        _watch(planner, worker)
        _end_all()
        os._exit(0)
    try:
        _search(**settings)
    finally:
        os._exit(0)


def _search(path: list[str], command: str, place: str) -> None:
    """Import the package alone, as ``dmuon`` would bring torch, and answer the question."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # the pipe is the watcher's
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


def _watch(planner: int, worker: int) -> None:
    """Wait until the planner or the worker is gone, or the planner says that it is done."""
    watched = select.poll()
    watched.register(0, select.POLLIN | select.POLLHUP)
    ended = None
    while ended != worker and os.getppid() == planner and not watched.poll(_POLL_MS):
        ended = _reap(worker)


def _reap(worker: int) -> int | None:
    """Collect what has ended; ``worker`` if that has, None if no process is left."""
    with suppress(ChildProcessError):
        found = -1
        while found:
            found, _ = os.waitpid(-1, os.WNOHANG)
            if found == worker:
                return worker
        return 0
    return None


def _end_all() -> None:
    deadline = time.monotonic() + _ENDING_S
    while time.monotonic() < deadline:
        for process in _below(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if _reap(0) is None:
            return
        time.sleep(0.005)


def _below(root: int) -> set[int]:
    """All processes that descend from ``root``."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read(4096).rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        new = set(children.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found - {root}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
