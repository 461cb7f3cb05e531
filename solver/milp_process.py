"""A process of its own for MILP solvers, which may hang, print without end, die, or leave processes behind."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("milp_program.py")
_CHUNK = 1 << 16
_BYTES_PER_NUMBER = 32  # of an answer; a float has at most 25
_BYTES_BESIDE = 1 << 14
_ENDING_SECONDS = 5.0  # for the program to end what it has started


class SolverFailed(Exception):
    """The solver gave nothing that can be used; the message says what happened."""


class MilpProcess:
    """A running process, which answers one question at a time. After a question that failed it can only be ended.

    Args:
        name: ``"HiGHS"`` or ``"CBC"``.
        command: the file that is CBC.

    Raises:
        SolverFailed: it cannot be started.
    """

    def __init__(self, name: str, command: str) -> None:
        self._closed = False
        # Files of solvers that are killed are left where they were: here, and it is removed with all that it holds.
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="dmuon-milp-", ignore_cleanup_errors=True)
        except OSError as error:
            raise SolverFailed(f"no temporary folder can be made ({error})") from error
        watched, self._lifeline = os.pipe()
        path = [os.path.abspath(part) for part in sys.path]
        settings = {"path": path, "name": name, "command": command, "lifeline": watched}
        place = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._folder.name)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=self._folder.name,
                env={**os.environ, **place},
                pass_fds=(watched,),
                start_new_session=True,  # a signal to the planner's group, as by Ctrl-C, is for the planner
            )
        except BaseException as error:
            os.close(self._lifeline)
            self._folder.cleanup()
            if isinstance(error, (OSError, ValueError, TypeError)):  # ValueError, TypeError: an odd sys.executable
                raise SolverFailed(f"its process cannot be started ({error})") from error
            raise
        finally:
            os.close(watched)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        for pipe in (self._requests, self._answers):
            os.set_blocking(pipe.fileno(), False)

    def ask(self, model: Any, seconds: float, deadline: float) -> None:
        """Solve a PuLP ``model``; status, values and duals are then in it.

        Args:
            seconds: that the solver is told to take at most.
            deadline: of the answer, by ``time.monotonic``.

        Raises:
            SolverFailed: there was none by then, or none that can be used.
        """
        variables = model.variables()
        constraints = list(model.constraints.values())
        places = {id(variable): i for i, variable in enumerate(variables)}

        def terms(expression: Any) -> list[tuple[int, float]]:
            return [(places[id(variable)], factor) for variable, factor in expression.items()]

        request = {
            "seconds": max(1, math.ceil(seconds)),
            "variables": [(v.name, v.lowBound, v.upBound, v.cat != "Continuous") for v in variables],
            "objective": None if model.objective is None else terms(model.objective),
            "constraints": [(c.name, c.sense, -c.constant, terms(c)) for c in constraints],
        }
        most = _BYTES_BESIDE + _BYTES_PER_NUMBER * (len(variables) + len(constraints))
        answer = _checked(self._exchange(json.dumps(request).encode() + b"\n", most, deadline))
        if len(answer["values"]) != len(variables) or len(answer["duals"]) != len(constraints):
            raise SolverFailed("an answer to another question came back")
        for variable, value in zip(variables, answer["values"], strict=True):
            variable.varValue = value
        for constraint, price in zip(constraints, answer["duals"], strict=True):
            constraint.pi = price
        model.status, model.sol_status = answer["status"], answer["solution"]

    def close(self) -> None:
        """End it, with every process that it has started."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            os.write(self._lifeline, b"x")  # a process that was forked from this one may keep it open
        for each in (self._requests, self._answers):
            each.close()
        os.close(self._lifeline)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)
        if self._process.returncode != 0:  # it was killed, or stopped
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def _exchange(self, request: bytes, most: int, deadline: float) -> bytes:
        """Send a line and receive one of ``most`` bytes, whatever the process does with its ends of the pipes."""
        left, answer = memoryview(request), bytearray()
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        poll.register(self._requests, select.POLLOUT)
        while not answer.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise SolverFailed("it gave no answer within its time, and was ended")
            ready = dict(poll.poll(math.ceil(1000 * remaining)))
            try:
                if self._requests.fileno() in ready and left:
                    left = left[os.write(self._requests.fileno(), left[:_CHUNK]) :]
                    if not left:
                        poll.unregister(self._requests)
                if self._answers.fileno() in ready:
                    part = os.read(self._answers.fileno(), _CHUNK)
                    answer += part
                    if not part:
                        raise SolverFailed("its process ended without an answer")
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise SolverFailed("its process ended without an answer") from error
            if len(answer) > most:
                raise SolverFailed(f"its answer is longer than {most} bytes")
        return bytes(answer)


def _checked(line: bytes) -> dict[str, Any]:
    """What the line holds, if it is an answer."""
    try:
        answer = json.loads(line)
        if "error" in answer:
            raise SolverFailed(str(answer["error"]))
        numbers = [number for name in ("values", "duals") for number in answer[name] if number is not None]
        sound = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        sound = sound and all(type(answer[name]) is int for name in ("status", "solution"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SolverFailed("its answer cannot be read") from error
    if not sound:
        raise SolverFailed("its answer holds what is no number")
    return dict(answer)
