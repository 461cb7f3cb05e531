"""The program that solves MILPs in a process of its own. It imports nothing of dmuon, and ends all that it has started.

It is two processes. The first one adopts whatever is left without a parent below it, and watches a pipe. When that is
written to or closed, which it also is when the planner's process dies, or when the second one has ended, it kills every
process below it, those too that have made sessions of their own. The second one solves: a line of JSON comes in for
each model, and a line goes out.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from contextlib import suppress
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_POLL_MS = 200
_ENDING_SECONDS = 3.0
_FILE_BYTES = 1 << 28  # of what a solver may write to one file


def main(settings: dict[str, Any]) -> None:
    """Solve until told to end.

    Args:
        settings: ``path`` to import from, ``lifeline``, and of the solver its ``name`` and the ``command`` of CBC.
    """
    os.set_inheritable(settings["lifeline"], False)
    with suppress(Exception):  # not on every system; there a process with a session of its own is not found
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    planner = os.getppid()
    worker = os.fork()
    if worker:
        _watch(settings["lifeline"], planner, worker)
        _end_all()
        os._exit(0)
    try:
        _serve(settings)
    finally:
        os._exit(0)


def _watch(lifeline: int, planner: int, worker: int) -> None:
    """Wait until the planner or the worker is gone, or the planner says that it is done."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)  # the planner shall see that answers end
    watched = select.poll()
    watched.register(lifeline, select.POLLIN | select.POLLHUP)
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
    deadline = time.monotonic() + _ENDING_SECONDS
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


def _serve(settings: dict[str, Any]) -> None:
    """Answer one line with one line. What solvers print goes nowhere, and what they write has bounds."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # PuLP announces what its next version removes
    sys.path[:] = settings["path"]
    for line in requests:
        try:
            answer = _solve(json.loads(line), settings)
        except Exception as error:  # whatever PuLP, its solvers and their files raise
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _solve(request: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    import pulp

    model = pulp.LpProblem("owners", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(name, low, high, pulp.LpInteger if whole else pulp.LpContinuous)
        for name, low, high, whole in request["variables"]
    ]
    if request["objective"] is not None:
        model += pulp.LpAffineExpression([(variables[i], factor) for i, factor in request["objective"]])
    for name, sense, bound, terms in request["constraints"]:
        expression = pulp.LpAffineExpression([(variables[i], factor) for i, factor in terms])
        model += pulp.LpConstraint(expression, sense, name, bound)
    options = {"msg": False, "timeLimit": request["seconds"], "gapRel": 0.0}
    # CBC is single-threaded unless told otherwise; told to take one thread, it starts one and may wait for it until
    # the time limit.
    highs = settings["name"] == "HiGHS"
    model.solve(pulp.HiGHS(threads=1, **options) if highs else pulp.COIN_CMD(path=settings["command"], **options))
    return {
        "status": model.status,
        "solution": model.sol_status,
        "values": [variable.varValue for variable in variables],
        "duals": [constraint.pi for constraint in model.constraints.values()],
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
