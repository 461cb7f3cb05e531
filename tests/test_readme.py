"""The README's program runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_whole_program_of_the_readme_trains(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = next(block for block in blocks if block.startswith("# example.py"))
    (tmp_path / "example.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \d+\.\d+", line)]
    assert len(losses) == 40 and sum(losses[-5:]) < sum(losses[:5]) - 5 * 0.5, losses
    assert "blocks.3.down.weight" in done.stdout and "8 matrices" in done.stdout
