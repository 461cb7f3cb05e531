"""Runs the suite as four pytest processes: programs, two halves of the tests on ranks, and those of one process.

Three run side by side, the fourth when the first of them has ended. Ranks wait for each other much of the time, and the
other tests use the cores meanwhile. Arguments are pytest's. The output of one process comes as its tests run, that of
the others when all have ended, and then one closing line.
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

AT_ONCE = 3
POLL_SECONDS = 0.2
NO_TESTS = 5  # pytest's exit status where nothing was selected
PROGRAMS = ("bench", "cli", "examples", "frameworks", "programs")  # folders of tests that start programs
WITHOUT_RANKS = ("kernels", "model", "simulation", "solver")  # folders in which no test asks for ranks
FIRST_HALF = ("dedicated", "parity", "planning", "pretend", "streams")  # folders; the other half takes about as long
# In the order in which they start.
PARTS = {
    "programs": "programs",
    "first": "ranks and first_half",
    "second": "ranks and not first_half and not programs",
    "one-process": "not ranks and not programs",
}
SHOWN = "first"
# What a part collects, unless paths are given: collecting takes seconds.
FOLDERS = {
    "programs": [f"tests/{folder}" for folder in PROGRAMS],
    "first": [f"tests/{folder}" for folder in FIRST_HALF],
    "second": [f"--ignore=tests/{folder}" for folder in (*FIRST_HALF, *PROGRAMS, *WITHOUT_RANKS)],
    "one-process": [f"--ignore=tests/{folder}" for folder in PROGRAMS],
}
ORDER = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")


def start(name: str, expression: str, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    part = f"({PARTS[name]}) and ({expression})" if expression else PARTS[name]
    folders = [] if any(Path(argument.partition("::")[0]).exists() for argument in arguments) else FOLDERS[name]
    command = [
        sys.executable,
        "-u",  # what is shown comes as it is written
        "-m",
        "pytest",
        "-m",
        part,
        "-o",
        f"cache_dir=.pytest_cache/{name}",
        *folders,
        *arguments,
    ]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def run(expression: str, arguments: list[str], logs: dict[str, Path]) -> list[int]:
    """Run all parts, each with its log; returns their exit statuses."""
    processes: list[subprocess.Popen[bytes]] = []
    waiting = list(PARTS)
    shown = 0
    try:
        while True:
            running = sum(process.poll() is None for process in processes)
            while waiting and running < AT_ONCE:
                name = waiting.pop(0)
                processes.append(start(name, expression, arguments, logs[name]))
                running += 1
            if logs[SHOWN].exists():
                text = logs[SHOWN].read_bytes()
                sys.stdout.buffer.write(text[shown:])
                sys.stdout.flush()
                shown = len(text)
            if not running:
                return [process.returncode for process in processes]
            time.sleep(POLL_SECONDS)
    except BaseException:
        for process in processes:
            process.terminate()
            process.wait()
        raise


def closing(counts: Counter[str], seconds: float) -> str:
    """As pytest's last line, for all parts."""
    parts = [f"{counts[kind]} {kind}" for kind in ORDER if counts[kind]]
    return f" {', '.join(parts) or 'no tests ran'} in {seconds:.2f}s ".center(100, "=")


def count(text: str) -> Counter[str]:
    """What pytest's closing line counts; a library may say more at the end of the process."""
    closed = re.findall(r"^=+ (.* in [\d.]+s.*) =+$", text, re.MULTILINE)
    line = closed[-1] if closed else ""
    return Counter({kind.removesuffix("s"): int(n) for n, kind in re.findall(r"(\d+) ([a-z]+)", line)})


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-m", default="", dest="expression")
    options, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the parts, too
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder) / name for name in PARTS}
        codes = run(options.expression, arguments, logs)
        texts = {name: log.read_text(errors="replace") for name, log in logs.items()}
    print(*(text for name, text in texts.items() if name != SHOWN), sep="\n", flush=True)
    counts = sum(map(count, texts.values()), Counter())
    print(closing(counts, time.monotonic() - begin))
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


if __name__ == "__main__":
    sys.exit(main())
