"""``dmuon-profile``: what it writes, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from dmuon.cli.profile import main
from dmuon.cost_cache import CostCache, user_cache_path
from dmuon.profiler import NsOptions, device_key

CPU = torch.device("cpu")
TINY = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: str) -> int:
    return main([*arguments, "--device", "cpu"])


def test_shapes_go_to_the_users_cache(capsys):
    assert run("--shapes", "16x48,32x16", "--max-batch", "4", "--budget", "5") == 0
    path = user_cache_path(device_key(CPU, NsOptions()))
    entries = CostCache.load(path).entries
    assert {shape: tuple(batches) for shape, batches in entries.items()} == {(16, 32): (1, 2, 4), (16, 48): (1, 2, 4)}
    assert str(path) in capsys.readouterr().out


def test_a_model_goes_to_a_file_which_later_runs_add_to(tmp_path):
    model, out = tmp_path / "model.json", tmp_path / "out.json"
    model.write_text(json.dumps(TINY))
    assert run(str(model), "--out", str(out), "--max-batch", "1", "--budget", "5") == 0
    assert set(CostCache.load(out).entries) == {(16, 16), (16, 64)}
    assert run("--shapes", "8x8", "--out", str(out), "--max-batch", "1", "--budget", "5") == 0
    assert set(CostCache.load(out).entries) == {(8, 8), (16, 16), (16, 64)}


@pytest.mark.pitfall("P10")
def test_options_reach_the_key(tmp_path):
    out = tmp_path / "out.json"
    options = ("--dtype", "fp16", "--coefficients", "you", "--steps", "4")
    assert run("--shapes", "8x8", "--out", str(out), "--budget", "5", *options) == 0
    key = CostCache.load(out).key
    assert (key.dtype, key.coefficients, key.steps) == ("float16", "you", 4)
    assert key == device_key(CPU, NsOptions("you", 4, torch.float16))


def test_what_the_budget_leaves_out_is_said(capsys):
    assert run("--shapes", "8x8,8192x32768", "--budget", "0.5", "--max-batch", "1") == 0
    assert "not timed within --budget 0.5, planned by estimate: 8192x32768" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no matrices to time; pass a MODEL.json or --shapes"),
        (["--shapes", "64"], "--shapes: '64' is not like 1024x4096"),
        (["--shapes", "0x4"], "--shapes: '0x4'"),
        (["--shapes", "8x8", "--max-batch", "0"], "--max-batch: '0' is no positive integer"),
        (["--shapes", "8x8", "--steps", "x"], "--steps: 'x'"),
        (["--shapes", "8x8", "--steps", "9", "--coefficients", "you"], "steps=9"),
        (["--shapes", "8x8", "--budget", "nan"], "--budget: 'nan'"),
        (["--shapes", "8x8", "--budget", "-1"], "--budget: '-1'"),
        (["--shapes", "8x8", "--budget", "soon"], "--budget: 'soon'"),
        (["--shapes", "8x8", "--device", "toaster"], "--device: 'toaster' is no device"),
        (["--shapes", "8x8", "--device", "meta"], "--device: 'meta' is not supported"),
        (["none.json"], "none.json"),
        (["bad.json"], "bad.json"),
        (["--shapes", "8x8", "--out", "nowhere/out.json"], "no such folder nowhere"),
        (["--shapes", "8x8", "--out", "bad.json"], "bad.json"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    assert main(arguments if "--device" in arguments else ["--device", "cpu", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("dmuon-profile: ") and message in captured.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.json"]
    assert (tmp_path / "bad.json").read_text() == "{"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(capsys):
    assert main(["--shapes", "8x8", "--device", "cuda:3"]) == 2
    assert "'cuda:3' is not there" in capsys.readouterr().err
