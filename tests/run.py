"""Runs the suite as several pytest processes side by side, each of which takes the next file that no other has taken.

Ranks wait for each other much of the time, so there are more processes than cores. Arguments are pytest's. The output
of one process comes as its tests run, that of the others when all have ended, and then one closing line.
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
FRAMEWORKS = "tests/frameworks"  # whose imports take long, and are in the first process alone
ORDER = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")


def start(number: int, expression: str, arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-u",  # what is shown comes as it is written
        "-m",
        "pytest",
        "-m",
        expression,
        "-o",
        f"cache_dir=.pytest_cache/{number}",
        f"--claims={folder}",
        *([f"--ignore={FRAMEWORKS}"] if number else []),
        *arguments,
    ]
    with log_of(number, folder).open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def log_of(number: int, folder: Path) -> Path:
    return folder / f"{number}.log"


def run(expression: str, arguments: list[str], folder: Path) -> list[int]:
    """Run all processes, each with its log; returns their exit statuses."""
    processes: list[subprocess.Popen[bytes]] = []
    shown = 0
    try:
        for number in range(AT_ONCE):
            processes.append(start(number, expression, arguments, folder))
        while True:
            ended = all(process.poll() is not None for process in processes)
            text = log_of(0, folder).read_bytes()
            sys.stdout.buffer.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
            if ended:
                return [process.returncode for process in processes]
            time.sleep(POLL_SECONDS)
    except BaseException:
        for process in processes:
            process.terminate()
            process.wait()
        raise


def closing(counts: Counter[str], seconds: float) -> str:
    """As pytest's last line, for all processes."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes, too
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = run(options.expression, arguments, folder)
        texts = [log_of(number, folder).read_text(errors="replace") for number in range(AT_ONCE)]
    print(*texts[1:], sep="\n", flush=True)
    counts = sum(map(count, texts), Counter())
    print(closing(counts, time.monotonic() - begin))
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


if __name__ == "__main__":
    sys.exit(main())
