"""What a process waits for, and keeps, when it ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib

import pytest

from dmuon.platform.host import let_threads_rest


@pytest.mark.pitfall("P68")
def test_threads_that_run_are_waited_for() -> None:
    data = bytes(10_000_000)
    ended = []

    def work() -> None:
        for _ in range(10):
            zlib.crc32(data)  # without the interpreter
        ended.append(True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    let_threads_rest(60.0)
    assert len(ended) == 2


@pytest.mark.slow
@pytest.mark.pitfall("P68")
def test_what_an_unhandled_exception_holds_is_kept_at_exit() -> None:
    """A program whose last words come from the finalizer of what its exception holds would say more."""
    program = """
import atexit
from dmuon.platform.host import keep_what_was_raised
atexit.register(KEEP)
class Thing:
    def __del__(self): print("freed", flush=True)
def fail(thing): raise RuntimeError("no")
fail(Thing())
"""
    for keep, said in (("keep_what_was_raised", ""), ("int", "freed")):
        command = [sys.executable, "-c", program.replace("KEEP", keep)]
        assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == said
