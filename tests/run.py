"""Runs the suite as two pytest processes side by side: the tests on ranks, and those that need one process.

Ranks wait for each other much of the time; the other tests use the cores meanwhile. Two pools of ranks would not.
Arguments are pytest's. The output of the tests on ranks comes as they run, the other when they have ended, and then
one closing line for both.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

NO_TESTS = 5  # pytest's exit status where nothing was selected
HALVES = {"ranks": "ranks", "one-process": "not ranks"}
ORDER = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")


def start(name: str, expression: str, arguments: list[str], output: object) -> subprocess.Popen[bytes]:
    half = f"({HALVES[name]}) and ({expression})" if expression else HALVES[name]
    command = [sys.executable, "-m", "pytest", "-m", half, "-o", f"cache_dir=.pytest_cache/{name}", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # type: ignore[call-overload, no-any-return]


def closing(counts: Counter[str], seconds: float) -> str:
    """As pytest's last line, for both halves."""
    parts = [f"{counts[kind]} {kind}" for kind in ORDER if counts[kind]]
    return f" {', '.join(parts) or 'no tests ran'} in {seconds:.2f}s ".center(100, "=")


def count(text: str) -> Counter[str]:
    """What the last line of pytest's output counts."""
    line = text.rstrip().rpartition("\n")[2]
    return Counter({kind.removesuffix("s"): int(n) for n, kind in re.findall(r"(\d+) ([a-z]+)", line)})


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-m", default="", dest="expression")
    options, arguments = parser.parse_known_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "one-process"
        with log.open("wb") as output:
            alone = start("one-process", options.expression, arguments, output)
            on_ranks = start("ranks", options.expression, arguments, subprocess.PIPE)
            try:
                assert on_ranks.stdout is not None
                text = b""
                while chunk := on_ranks.stdout.read1():  # type: ignore[attr-defined]
                    text += chunk
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.flush()
                codes = [on_ranks.wait(), alone.wait()]
            except BaseException:
                for process in (on_ranks, alone):
                    process.terminate()
                    process.wait()
                raise
        other = log.read_text(errors="replace")
    print(other, flush=True)
    print(closing(count(text.decode(errors="replace")) + count(other), time.monotonic() - begin))
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


if __name__ == "__main__":
    sys.exit(main())
