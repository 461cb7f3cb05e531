"""``dmuon-profile``: what it writes, and what it refuses."""

from __future__ import annotations

import json
from functools import partial

import pytest
from harness.commands import command
from harness.configs import written

main = command("dmuon-profile")

TINY = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}


@pytest.fixture(autouse=True)
def users_cache(tmp_path, monkeypatch):
    """The folder of the user's caches, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    monkeypatch.setattr("dmuon.planning.profiler._MAX_ROUNDS", 1)  # what is timed counts here, not how well
    return tmp_path.parent / f"{tmp_path.name}-cache" / "dmuon"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    """That of a cache which is measured here."""
    path = tmp_path_factory.mktemp("here") / "costs.json"
    given = ("--shapes", "8x8", "--max-batch", "1", "--budget", "1", "--device", "cpu")
    assert main([*given, "--out", str(path)]) == 0
    return json.loads(path.read_bytes())["key"]


@pytest.fixture
def status(ended):
    return partial(ended, main)


@pytest.fixture
def run(status):
    """``dmuon-profile`` on the CPU, how it ended and what it said."""
    return lambda *arguments: status("--device", "cpu", *arguments)


def batches(path):
    entries = json.loads(path.read_bytes())["entries"]
    return {shape: tuple(map(int, timings)) for shape, timings in entries.items()}


def test_shapes_go_to_the_users_cache(run, users_cache):
    done = run("--shapes", "16x48,32x16", "--max-batch", "4", "--budget", "5")
    [path] = users_cache.iterdir()
    assert done.status == 0 and str(path) in done.out
    assert batches(path) == {"16x32": (1, 2, 4), "16x48": (1, 2, 4)}


def test_a_model_goes_to_a_file_which_later_runs_add_to(run, tmp_path):
    model, out = written(tmp_path, TINY), tmp_path / "out.json"
    assert run(model, "--out", out, "--max-batch", "1", "--budget", "5").status == 0
    assert batches(out) == {"16x16": (1,), "16x64": (1,)}
    assert run("--shapes", "8x8", "--out", out, "--max-batch", "1", "--budget", "5").status == 0
    assert batches(out) == {"8x8": (1,), "16x16": (1,), "16x64": (1,)}


@pytest.mark.pitfall("P10")
def test_options_reach_the_key(run, tmp_path):
    out, options = tmp_path / "out.json", ("--dtype", "fp16", "--coefficients", "you", "--steps", "4")
    assert run("--shapes", "32x32", "--max-batch", "1", "--out", out, "--budget", "5", *options).status == 0
    key = json.loads(out.read_bytes())["key"]
    assert (key["dtype"], key["coefficients"], key["steps"]) == ("float16", "you", 4)


def test_what_the_budget_leaves_out_is_said(run):
    done = run("--shapes", "8x8,8192x32768", "--budget", "0.5", "--max-batch", "1")
    assert done.status == 0
    assert "not timed within --budget 0.5, planned by estimate: 8192x32768" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no matrices to time; pass a MODEL.json or --shapes"),
        (["--shapes", "64"], "--shapes: shape '64' is not like '1024x4096'"),
        (["--shapes", "8x8", "--steps", "9", "--coefficients", "you"], "steps=9"),
        (["none.json"], "none.json: no such file; pass a model's config.json"),
        (["--shapes", "8x8", "--out", "nowhere/out.json"], "no such folder nowhere"),
        (["--shapes", "8x8", "--out", "bad.json"], "bad.json: corrupt or truncated JSON"),
        (["--shapes", "8x8", "--out", "alien.json"], "alien.json: key field 'sm_count' is 7, not 0"),
        (["--merge", "a.json", "b.json"], "--merge: was removed; write one --out for all runs, which add to it"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(run, key, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    alien = {"schema": 3, "key": key | {"sm_count": 7}, "entries": {}}
    (tmp_path / "alien.json").write_text(json.dumps(alien))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run(*arguments)
    assert done.status == 2
    assert done.err.startswith("dmuon-profile: ") and message in done.err and done.out.count("\n") <= 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
