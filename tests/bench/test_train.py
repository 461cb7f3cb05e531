"""The training program: table, metrics, plot, option errors, interruption, failure, resume."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness.commands import BENCH
from harness.limits import ENDING_SECONDS, PROGRAM_SECONDS
from harness.plans import rotated

from dmuon import OwnerPlan

SCRIPT = BENCH / "train.py"
MODULE = "train"
ROWS = {
    "adamw": "FSDP2 + AdamW",
    "gather": "FSDP2 + Muon, gathered everywhere",
    "dmuon": "FSDP2 + dmuon.Muon",
    "dedicated": "dmuon.dedicate_params + dmuon.Muon",
}
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "16", "--device", "cpu"]


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _leave_nothing_running() -> Iterator[None]:
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


def _start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *TINY, "--out", str(out), *options]
    _started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return _started[-1]


def _run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    process = _start(out, *options)
    stdout, stderr = process.communicate(timeout=PROGRAM_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _records(out: Path, event: str, optimizer: str = "adamw") -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [r for r in records if (r["event"], r["optimizer"]) == (event, optimizer)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps with all optimizers."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = _run(out, "--steps", "12", "--checkpoint-every", "5", "--json", str(out / "summary.json"))
    assert done.returncode == 0, done.stderr
    (out / "stdout.txt").write_text(done.stdout)
    return out


@pytest.mark.slow
def test_run_ends_with_table_metrics_and_plot(uninterrupted: Path) -> None:
    table = (uninterrupted / "stdout.txt").read_text()
    for column in ("loss", "steps", "seconds", "ms a step", "exposed ms", "peak MB"):
        assert column in table
    said = " ".join(table.split())
    assert (
        "Predicted for Llama-3-8B on 64 H200: +" in said
        and "dmuon-plan examples/models/llama-3-8b.json --world 64" in said
    )
    assert max(len(line) for line in table.splitlines() if "/run/" not in line) <= 100, "paths are as long as they are"
    assert (uninterrupted / "loss.png").read_bytes().startswith(b"\x89PNG")
    starts = []
    record = json.loads((uninterrupted / "summary.json").read_text())
    assert {"command", "commit", "date"} <= record.keys() and str(uninterrupted / "summary.json") not in str(record)
    for optimizer, row in ROWS.items():
        (line,) = [line for line in table.splitlines() if line.startswith(f"{row}  ")]
        steps = _records(uninterrupted, "step", optimizer)
        assert [record["step"] for record in steps] == list(range(1, 13))
        assert all(record["step_ms"] > record["optimizer_ms"] > 0 for record in steps)
        evaluations = _records(uninterrupted, "eval", optimizer)
        assert evaluations[0]["step"] == 0 and evaluations[-1]["step"] == 12
        assert evaluations[0]["val_loss"] == pytest.approx(5.545, abs=0.1), "untrained: ln 256"
        assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"]
        assert f" {evaluations[-1]['val_loss']:.4f} " in line
        assert _records(uninterrupted, "result", optimizer)[0]["peak_mb"] > 0
        assert record["rows"][row]["loss"] == evaluations[-1]["val_loss"] and record["rows"][row]["started at"] == [0]
        starts.append((evaluations[0]["val_loss"], steps[0]["loss"]))
    for start in starts[1:]:
        assert start == pytest.approx(starts[0], abs=1e-6), "not the same start or not the same data"
    assert 1.0 <= _records(uninterrupted, "result", "dedicated")[0]["balance"] < 2.0


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (["--optimizers", "adamw,sgd"], "--optimizers"),
        (["--width", "30", "--heads", "4"], "--width"),
        (["--resume"], "--resume"),
    ],
)
def test_wrong_option_is_named_and_ends_with_code_2(
    tmp_path: Path,
    options: list[str],
    option: str,
    capsys: pytest.CaptureFixture[str],
    bench: ModuleType,
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main([*TINY, "--out", str(tmp_path / "run"), *options])
    assert caught.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, uninterrupted: Path) -> None:
    out = tmp_path / "run"
    options = ["--steps", "12", "--optimizers", "dedicated", "--checkpoint-every", "1"]
    process = _start(out, *options)
    folder = out / "checkpoints" / "dedicated-seed0"
    deadline = time.monotonic() + PROGRAM_SECONDS
    while not any(folder.glob("step-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, stderr = process.communicate(timeout=ENDING_SECONDS)
    before = max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    assert before < 12, "interrupted too late to test anything"
    assert process.returncode == 128 + signal.SIGTERM
    assert "interrupted" in stderr and "Traceback" not in stderr
    path = folder / f"step-{before:07d}" / "plan.json"
    other = rotated(OwnerPlan.load(path))
    other.save(path)
    done = _run(out, *options, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"dedicated goes on from step {before}" in done.stderr, "did not start from the checkpoint"
    assert [record["step"] for record in _records(out, "start", "dedicated")] == [0, before]
    assert f"plan: loaded from {path.parent}" in done.stderr
    assert OwnerPlan.load(folder / "step-0000012" / "plan.json").owners == other.owners, "planned anew"
    for event, key in (("step", "loss"), ("step", "grad_norm"), ("step", "lr"), ("eval", "val_loss")):
        resumed, straight = (
            [record[key] for record in _records(run, event, "dedicated")] for run in (out, uninterrupted)
        )
        # the two runs were planned apart and may batch differently, which moves the last bits
        assert resumed == pytest.approx(straight, rel=1e-6)
