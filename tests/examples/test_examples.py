"""The examples: each trains on two processes, and what the docs list is what there is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.jobs import run_file
from harness.limits import PROGRAM_SECONDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = 120
AS_SAID = "dedicated"
FRAMEWORKS = ("accelerate", "lightning", "peft", "torchtitan", "transformers")


def started(example: Path, folder: Path) -> str:
    """What it prints, started as its first lines say: by `torchrun` itself the example ``AS_SAID``."""
    said = re.search(rf"^(python|torchrun)(.*) examples/{example.name}$", example.read_text(), re.MULTILINE)
    assert said is not None, f"{example.name} does not say how it is started"
    ranks = re.fullmatch(r" --standalone --nproc-per-node (\d+)", said[2])
    if ranks is not None and example.stem != AS_SAID:
        ended = run_file(example, int(ranks[1]), folder, PROGRAM_SECONDS)
        assert all(end.code == 0 for end in ended), "\n".join(f"--- {end.code}\n{end.text[-3000:]}" for end in ended)
        return "\n".join(end.text for end in ended)
    program = [sys.executable] if said[1] == "python" else [sys.executable, "-m", "torch.distributed.run"]
    command = [*program, *said[2].split(), str(example)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.pitfall("P78")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_trains(example: Path, tmp_path: Path) -> None:
    for package in FRAMEWORKS:
        used = re.search(rf"^(import|from) {package}\b", example.read_text(), re.MULTILINE) is not None
        if used and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (the extra 'frameworks')")
    printed = started(example, tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\d+\.\d+)$", printed, re.MULTILINE)]
    assert len(losses) >= 4 and losses[-1] < losses[0] - 0.5, printed


def test_each_is_short_and_listed() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert re.findall(r"`examples/(\w+\.py)`", page) and EXAMPLES
    assert sorted(re.findall(r"`examples/(\w+\.py)`", page)) == [example.name for example in EXAMPLES]
    assert all(len(example.read_text().splitlines()) < LINES for example in EXAMPLES)
