"""The first hour on GPUs: it goes on where it was killed, ends what takes too long, and runs without a GPU."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness.commands import run_bench

MODULE = "gpu_hour"
COUNT = "from pathlib import Path; path = Path('{}'); path.open('a').write('x'); "
KILL = "import os, signal, time; len(path.read_text()) > 1 or os.kill(os.getppid(), signal.SIGTERM) or time.sleep(60)"


@pytest.fixture
def hour(bench: ModuleType) -> Iterator[ModuleType]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield bench
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def begun(hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Replaces the parts by commands that note each start in a file of their own, before they do what is given."""

    def replace(**work: str) -> list[Path]:
        starts = [tmp_path / name for name in work]
        parts = [
            hour.Part(start.name, 2.0 if "forever" in start.name else 60.0,
                      (sys.executable, "-c", COUNT.format(start) + code), tmp_path / "none")
            for start, code in zip(starts, work.values(), strict=True)
        ]  # fmt: skip
        monkeypatch.setattr(hour, "parts", lambda *_: parts)
        return starts

    return replace


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "hour.json").read_text())
    return found


def test_it_goes_on_with_the_part_in_which_it_was_killed(
    hour: ModuleType, begun: Callable[..., list[Path]], tmp_path: Path
) -> None:
    first, second = begun(first="", second=KILL)
    with pytest.raises(SystemExit) as ended:
        hour.main(["--dry", "--out", str(tmp_path)])
    assert ended.value.code == 128 + signal.SIGTERM
    assert written(tmp_path)["parts"].keys() == {"first"}
    assert hour.main(["--dry", "--out", str(tmp_path)]) == 0
    assert [len(path.read_text()) for path in (first, second)] == [1, 2]
    assert {part["status"] for part in written(tmp_path)["parts"].values()} == {"done"}


def test_what_fails_or_takes_too_long_is_said_and_tried_again(
    hour: ModuleType, begun: Callable[..., list[Path]], tmp_path: Path
) -> None:
    starts = begun(fails="raise SystemExit(3)", forever="import time; time.sleep(60)", last="")
    for _ in range(2):
        assert hour.main(["--dry", "--out", str(tmp_path)]) == 1
    said = [part["status"] for part in written(tmp_path)["parts"].values()]
    assert said == ["failed with exit status 3", "ended after its 2 s", "done"]
    assert [len(path.read_text()) for path in starts] == [2, 2, 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs_without_a_gpu_and_says_what_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_bench("gpu_hour.py", "--dry", "--out", tmp_path / "hour", seconds=800)
    found = written(tmp_path / "hour")
    assert found["dry"] and [*found["parts"]] == ["checks", "kernels", "costs", "steps 1", "steps 2"]
    rows = {row["what"]: row for row in found["verdict"]}
    assert rows["lines of dmuon-check that fail"]["held"]
    lines = json.loads((tmp_path / "hour/checks.json").read_text())["lines"]
    passed = [line["where"].split()[0] for line in lines if (line["check"], line["status"]) == ("checkpoint", "pass")]
    assert {*passed} == {"1d", "ddp", "tp", "fsdp2"}
    assert {"dmuon over AdamW, 2 GPUs", "dedicated over AdamW, 2 GPUs"} <= rows.keys()
    programs = json.loads((tmp_path / "hour/steps-2.json").read_text())["programs"]
    assert {"adamw", "dmuon", "dedicated", "torch.optim.Muon"} <= programs.keys()
    assert all(row["step_ms"] > 0 for row in programs.values())
