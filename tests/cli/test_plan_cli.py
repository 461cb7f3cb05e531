"""`dmuon-plan`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmuon.cli.plan import main
from dmuon.planning.cost_cache import CacheKey, CostCache, Timing
from dmuon.planning.owner_plan import OwnerPlan

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


def test_prints_plan_costs_and_predicted_step(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(model, "--world", 4) == 0
    out = capsys.readouterr().out
    assert out.startswith("costs: estimated: wave model of H200\n28 matrices in 4 blocks over 4 ranks\nmakespan")
    assert "estimated for 3 of 3 shapes" in out
    rows = {
        line[:14].strip(): line.split()[-5:] for line in out.splitlines() if line.startswith(("dedicated ", "adamw"))
    }
    assert {"dedicated", "dedicated keep", "adamw"} <= set(rows)
    assert float(rows["dedicated"][0]) >= float(rows["dedicated"][1]) > 0  # a step takes at least forward and backward


def test_writes_the_plan_that_it_reports_and_leaves_nothing_else(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plans" / "plan.json"
    target.parent.mkdir()
    target.write_text("old")
    picture = target.parent / "plan.png"
    assert status(model, "--world", 4, "--json", target, "--png", picture) == 0
    plan = OwnerPlan.load(target)
    assert plan.world == 4
    assert plan.solution.digest in capsys.readouterr().out
    assert sorted(target.parent.iterdir()) == [target, picture]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_lists_the_owner_of_every_matrix(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert status(model, "--world", 3, "--owners", "--json", target) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("model.layers.")]
    assert {name: int(owner) for name, _, owner in rows} == OwnerPlan.load(target).owners
    assert all(shape in ("512x512", "128x512", "1536x512", "512x1536") for _, shape, _ in rows)


def test_compares_plans_with_one_bound(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(model, "--world", 3, "--compare", "lpt,round-robin,greedy,milp") == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["lpt", "round-robin", "greedy", "milp", "this plan"]
    rows = {name: next(line for line in lines if line.startswith(f"{name} ")) for name in names}
    ratio = {name: float(line.split(" ms")[1].split()[0]) for name, line in rows.items()}
    gap = {name: float(line.split("%")[0].split()[-1]) for name, line in rows.items()}
    assert ratio["this plan"] == 1.0 and ratio["milp"] <= 1.01
    assert all(ratio[name] >= 0.999 for name in ("lpt", "round-robin", "greedy"))
    assert gap["this plan"] <= min(gap["lpt"], gap["round-robin"], gap["greedy"])


def test_grid_memory_and_speed_reach_the_plan(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    grid = ["--world", 8, "--nodes", 2, "--replicate", 2, "--tp", 2]
    assert status(model, *grid, "--speed", "3=0.5", "--memory-gib", 0.05, "--json", target) == 0
    slow = OwnerPlan.load(target).solution
    assert slow.world == 8
    held = [sum(8 * m.rows * m.cols for m in slow.matrices if slow.owners[m.name] == rank) for rank in range(8)]
    assert max(held) <= 0.05 * 2**30
    assert slow.rank_matrices[3] < max(slow.rank_matrices)
    assert "tensor-parallel" in OwnerPlan.load(target).cost_source
    assert status(model, "--world", 8, "--json", target) == 0
    # The same model without tensor parallelism: no gather in the costs.
    assert OwnerPlan.load(target).solution.makespan_ns < slow.makespan_ns


def test_costs_of_a_cache_are_measured_and_need_a_device_for_a_prediction(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = CacheKey("a device", 0, "", "2.13", "", "float32", "k", "polar_express", 5)
    timings = {k: Timing(1000 * k, 900 * k, 1100 * k, 9) for k in (1, 2)}
    cache = tmp_path / "cache.json"
    CostCache(key, {(512, 512): timings, (128, 512): timings, (512, 1536): timings}).save(cache)
    assert status(model, "--world", 4, "--costs", cache) == 0
    out = capsys.readouterr().out
    assert f"costs: measured on a device, cost cache {cache}" in out and "costs     measured" in out
    assert "no step time is predicted: the costs are another device's" in out
    assert status(model, "--world", 4, "--costs", cache, "--device", "h100") == 0
    assert "predicted step, 4 × H100" in capsys.readouterr().out


def test_overrides_change_the_prediction(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(*args: object) -> float:
        assert status(model, "--world", 16, "--method", "greedy", *args) == 0
        line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("dedicated  "))
        return float(line.split()[1])

    def share(*args: object) -> float:
        assert status(model, "--world", 16, "--method", "greedy", *args) == 0
        line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("the largest owner keeps"))
        return float(line.split(", ")[1].split("%")[0])

    assert share("--set", "device_memory=1e8") > share() == 0.0
    assert step("--set", "inter_bandwidth=1e9") > step() > step("--efficiency", "1.0")
    assert step("--recompute") > step()
    assert step("--tokens", 32768) > step()


@pytest.mark.parametrize("device", ["h200", "h100", "a800"])
def test_every_preset_plans(model: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert status(model, "--world", 32, "--nodes", 4, "--device", device, "--spread-cap", "auto") == 0
    assert device.upper() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--world", "0"], "--world: '0' is no positive integer"),
        (["--world", "two"], "--world: 'two'"),
        ([], "--world"),
        (["--world", "2", "--time-limit", "0"], "--time-limit: '0' is no positive number"),
        (["--world", "6", "--nodes", "4"], "--nodes 4 does not divide --world 6"),
        (["--world", "8", "--replicate", "3"], "replicate=3 × tp=1 does not divide world=8"),
        (["--world", "8", "--tp", "3"], "tp=3 does not divide world=8"),
        (["--world", "2", "--compare", "best"], "'best' is not one of round-robin, lpt, greedy, milp"),
        (["--world", "2", "--speed", "2=0.5"], "--speed: '2=0.5' names no rank below 2"),
        (["--world", "2", "--speed", "1=2,1=3"], "--speed: rank 1 is there twice"),
        (["--world", "2", "--set", "name=3"], "name"),
        (["--world", "2", "--spread-cap", "1e300"], "spread_cap"),
        (["--world", "2", "--speed", "1=fast"], "the factor is no number"),
        (["--world", "2", "--memory-gib", "0.001"], "raise memory"),
        (["--world", "2", "--memory-gib", "-1"], "--memory-gib: '-1' is no positive number"),
        (["--world", "2", "--spread-cap", "0.5"], "spread_cap must be None, 'auto' or a number from 1 to 1000000"),
        (["--world", "2", "--gap", "100"], "--gap: '100' is no percentage"),
        (["--world", "2", "--set", "nvlink=3"], "nvlink"),
        (["--world", "2", "--set", "intra_bandwidth=-1"], "intra_bandwidth"),
        (["--world", "2", "--device", "h300"], "--device"),
        (["--world", "2", "--tokens", "1000", "--sequence", "4096"], "sequence"),
        (["--world", "2", "--efficiency", "2"], "efficiency"),
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
    assert f"no such folder {tmp_path / 'no'}; create it" in capsys.readouterr().err
