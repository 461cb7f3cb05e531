"""`dmuon-plan`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmuon.cli.plan import main
from dmuon.solver import Plan

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIG))
    return path


def status(*args: object) -> int:
    """The exit status, whether argparse or the command decides it."""
    try:
        return main([str(arg) for arg in args])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def test_prints_the_report(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(model, "--world", 4) == 0
    out = capsys.readouterr().out
    assert out.startswith("28 matrices in 4 blocks over 4 ranks\nmakespan")
    assert "estimated for 3 of 3 shapes" in out


def test_writes_the_plan_that_it_reports_and_leaves_nothing_else(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plans" / "plan.json"
    target.parent.mkdir()
    target.write_text("old")
    assert status(model, "--world", 4, "--json", target) == 0
    plan = Plan.from_json(json.loads(target.read_text()))
    assert plan.world == 4
    assert plan.digest in capsys.readouterr().out
    assert list(target.parent.iterdir()) == [target]


def test_compares_with_round_robin_lpt_and_the_bound(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(model, "--world", 3, "--method", "greedy", "--compare") == 0
    rows = {line.rpartition(" ms")[0][:12].strip(): line for line in capsys.readouterr().out.splitlines()[-4:]}
    ratio = {name: float(line.split(" ms")[1].split()[0]) for name, line in rows.items()}
    assert list(ratio) == ["round robin", "LPT", "this plan", "lower bound"]
    assert ratio["round robin"] >= ratio["this plan"] == 1.0 >= ratio["lower bound"] > 0.9
    assert ratio["LPT"] >= 1.0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--world", "0"], "--world: '0' is not a number of ranks; give an integer of at least 1"),
        (["--world", "two"], "--world: 'two'"),
        ([], "--world"),
        (["--world", "2", "--time-limit", "0"], "--time-limit: '0' is not a time limit"),
        (["--world", "2", "--time-limit", "nan"], "--time-limit: 'nan'"),
        (["--world", "2", "--method", "exact"], "--method"),
        (["--world", "2", "--costs", "/no/such/cache.json"], "/no/such/cache.json"),
    ],
)
def test_bad_arguments_end_with_status_2_and_write_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    target = tmp_path / "plan.json"
    assert status(model, *args, "--json", target) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert not target.exists()


def test_a_bad_model_ends_with_status_2_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = tmp_path / "model.json", tmp_path / "plan.json"
    path.write_text(json.dumps({**CONFIG, "hidden_size": None}))
    assert status(path, "--world", 2, "--json", target) == 2
    assert f"{path}: field 'hidden_size' is None; set it to an integer" in capsys.readouterr().err
    assert status(tmp_path / "none.json", "--world", 2, "--json", target) == 2
    assert "none.json" in capsys.readouterr().err
    assert not target.exists()


def test_a_target_that_cannot_be_written_ends_with_status_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(model, "--world", 2, "--json", tmp_path / "no" / "plan.json") == 2
    assert f"there is no folder {tmp_path / 'no'}; create it first" in capsys.readouterr().err
