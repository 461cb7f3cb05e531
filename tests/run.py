"""Runs the suite as three pytest processes side by side: two halves of the tests on ranks, and those of one process.

Ranks wait for each other much of the time; the other tests use the cores meanwhile. Arguments are pytest's. The output
of the first process comes as its tests run, that of the others when all have ended, and then one closing line.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

NO_TESTS = 5  # pytest's exit status where nothing was selected
PARTS = {
    "dedicated": "ranks and dedicated",
    "ranks": "ranks and not dedicated",
    "one-process": "not ranks",
}
# What a part need not collect, unless paths are given.
FOLDERS = {"dedicated": ["tests/dedicated"], "ranks": ["--ignore=tests/dedicated"], "one-process": []}
ORDER = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")


def start(name: str, expression: str, arguments: list[str], output: object) -> subprocess.Popen[bytes]:
    part = f"({PARTS[name]}) and ({expression})" if expression else PARTS[name]
    folders = [] if any(Path(argument.partition("::")[0]).exists() for argument in arguments) else FOLDERS[name]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        part,
        "-o",
        f"cache_dir=.pytest_cache/{name}",
        *folders,
        *arguments,
    ]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # type: ignore[call-overload, no-any-return]


def closing(counts: Counter[str], seconds: float) -> str:
    """As pytest's last line, for all parts."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the parts, too
    begin = time.monotonic()
    shown, *others = PARTS
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / name for name in others]
        processes = [start(shown, options.expression, arguments, subprocess.PIPE)]
        for name, log in zip(others, logs, strict=True):
            with log.open("wb") as output:
                processes.append(start(name, options.expression, arguments, output))
        try:
            assert processes[0].stdout is not None
            text = b""
            while chunk := processes[0].stdout.read1():  # type: ignore[attr-defined]
                text += chunk
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
            codes = [process.wait() for process in processes]
        except BaseException:
            for process in processes:
                process.terminate()
                process.wait()
            raise
        texts = [log.read_text(errors="replace") for log in logs]
    print(*texts, sep="\n", flush=True)
    counts = sum(map(count, texts), count(text.decode(errors="replace")))
    print(closing(counts, time.monotonic() - begin))
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


if __name__ == "__main__":
    sys.exit(main())
