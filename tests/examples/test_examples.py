"""The examples, as users start them: each trains on two processes, and what the docs list is what there is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.limits import PROGRAM_SECONDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = 120
FRAMEWORKS = ("accelerate", "lightning", "peft", "torchtitan", "transformers")


def command(example: Path) -> list[str]:
    """As the file's first lines say."""
    said = re.search(rf"^(python|torchrun)(.*) examples/{example.name}$", example.read_text(), re.MULTILINE)
    assert said is not None, f"{example.name} does not say how it is started"
    program = [sys.executable] if said[1] == "python" else [sys.executable, "-m", "torch.distributed.run"]
    return [*program, *said[2].split(), str(example)]


@pytest.mark.slow
@pytest.mark.pitfall("P78")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_trains(example: Path, tmp_path: Path) -> None:
    for package in FRAMEWORKS:
        used = re.search(rf"^(import|from) {package}\b", example.read_text(), re.MULTILINE) is not None
        if used and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (the extra 'frameworks')")
    done = subprocess.run(command(example), cwd=tmp_path, capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    assert len(losses) >= 4 and losses[-1] < losses[0] - 0.5, done.stdout


def test_each_is_short_and_listed() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert re.findall(r"`examples/(\w+\.py)`", page) and EXAMPLES
    assert sorted(re.findall(r"`examples/(\w+\.py)`", page)) == [example.name for example in EXAMPLES]
    assert all(len(example.read_text().splitlines()) < LINES for example in EXAMPLES)
