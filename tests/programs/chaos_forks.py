"""Ranks forked from a process that has imported everything and has one thread; each ends as an interpreter does.

That process calls ``serve``, which reads jobs from its standard input, a line each, and writes who started and who
ended. ``Forks`` is the other end.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class End:
    """How a process ended, and when by ``time.monotonic``."""

    code: int
    time: float


class Forks:
    """Starts ranks, and knows of all that have ended."""

    def __init__(self, program: Path) -> None:
        """``program`` calls :func:`serve`."""
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            text=True,
        )
        self._news = threading.Condition()
        self._pids: dict[int, int] = {}
        self._ends: dict[int, End] = {}
        self._last = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, log: Path, job: dict[str, Any]) -> int:
        """The id of a new process that is given ``job``, with its output in ``log``."""
        assert self._process.stdin is not None
        with self._news:
            self._last += 1
            number = self._last
            line = {"number": number, "log": str(log), "job": job}
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
            if not self._news.wait_for(lambda: number in self._pids or self._process.poll() is not None, 120):
                raise RuntimeError("the process that forks does not answer")
            return self._pids[number]

    def ends(self, pids: list[int]) -> dict[int, End]:
        """Of those that have ended."""
        with self._news:
            return {pid: self._ends[pid] for pid in pids if pid in self._ends}

    def close(self) -> None:
        """End it; ranks are ended by who started them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            with self._news:
                if "code" in news:
                    self._ends[news["pid"]] = End(news["code"], news["time"])
                else:
                    self._pids[news["number"]] = news["pid"]
                    self._ends.pop(news["pid"], None)  # of an earlier process: the system uses numbers again
                self._news.notify_all()


def serve() -> dict[str, Any] | None:
    """Fork until the input ends; in a child, the job that it is to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this process
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread"
    out = os.dup(1)
    os.dup2(2, 1)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    buffer = b""
    while True:
        if selector.select(POLL_SECONDS):
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return None
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    os.close(out)
                    _become(order["log"])
                    job: dict[str, Any] = order["job"]
                    return job
                os.write(out, f'{{"number": {order["number"]}, "pid": {pid}}}\n'.encode())
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            os.write(out, f'{{"pid": {pid}, "code": {code}, "time": {time.monotonic()}}}\n'.encode())


def _become(log: str) -> None:
    """A process of its own session, so that what it leaves behind is found."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
