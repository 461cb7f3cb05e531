"""``dmuon-profile``: what it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.commands import command
from harness.configs import written

from dmuon.kernels import newton_schulz_flops
from dmuon.planning import profiler

main = command("dmuon-profile")

CPU = torch.device("cpu")
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


def cache(key, medians, path):
    def timing(ns):
        return {"median_ns": ns, "p10_ns": ns, "p90_ns": ns, "n": 9}

    entries = {shape: {str(k): timing(ns) for k, ns in batches.items()} for shape, batches in medians.items()}
    Path(path).write_text(json.dumps({"schema": 2, "key": key, "entries": entries}))


def medians(path):
    entries = json.loads(Path(path).read_bytes())["entries"]
    return {shape: {int(k): t["median_ns"] for k, t in batches.items()} for shape, batches in entries.items()}


@pytest.fixture
def status(ended):
    return partial(ended, main)


@pytest.fixture
def run(status):
    """``dmuon-profile`` on the CPU, how it ended and what it said."""
    return lambda *arguments: status(*arguments, "--device", "cpu")


def batches(path):
    return {shape: tuple(timings) for shape, timings in medians(path).items()}


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
def test_options_reach_the_key_and_a_check_reads_them_there(run, tmp_path):
    out, options = tmp_path / "out.json", ("--dtype", "fp16", "--coefficients", "you", "--steps", "4")
    assert run("--shapes", "32x32", "--max-batch", "1", "--out", out, "--budget", "5", *options).status == 0
    key = json.loads(out.read_bytes())["key"]
    assert (key["dtype"], key["coefficients"], key["steps"]) == ("float16", "you", 4)
    done = run("--check", out)
    assert done.status in (0, 1) and "valid on cpu, exactly" in done.out


def test_what_the_budget_leaves_out_is_said(run):
    done = run("--shapes", "8x8,8192x32768", "--budget", "0.5", "--max-batch", "1")
    assert done.status == 0
    assert "not timed within --budget 0.5, planned by estimate: 8192x32768" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no matrices to time; pass a MODEL.json or --shapes"),
        (["--shapes", "64"], "--shapes: shape '64' is not like '1024x4096'"),
        (["--shapes", "8x8", "--max-batch", "0"], "--max-batch: '0' is no positive integer"),
        (["--shapes", "8x8", "--max-batch", "65"], "--max-batch: 65 is more than 64"),
        (["--shapes", "8x8", "--steps", "9", "--coefficients", "you"], "steps=9"),
        (["--shapes", "8x8", "--budget", "nan"], "--budget: 'nan'"),
        (["--shapes", "8x8", "--device", "toaster"], "--device: 'toaster' is no device"),
        (["--shapes", "8x8", "--device", "meta"], "--device: 'meta' is not supported"),
        (["none.json"], "none.json: no such file; pass a model's config.json"),
        (["."], "config.json: no such file; pass a model's config.json"),
        (["--shapes", "8x8", "--out", "."], "--out .: is a folder"),
        (["--shapes", "8x8", "--png", "x.png"], "--png goes with --show only; leave it out"),
        (["--show", "--check"], "--check and --show exclude each other"),
        (["bad.json"], "bad.json"),
        (["--shapes", "8x8", "--out", "nowhere/out.json"], "no such folder nowhere"),
        (["--merge", "good.json"], "--merge needs --out FILE"),
        (["--merge", "good.json", "bad.json", "--out", "new.json"], "bad.json: corrupt or truncated JSON"),
        (
            ["--merge", "good.json", "alien.json", "--out", "new.json"],
            "alien.json: key field 'sm_count' is 7, but 0 in go",
        ),
        (["--merge", "good.json", "--out", "alien.json"], "alien.json: key field 'sm_count' is 7, not 0"),
        (["--merge", "good.json", "--out", "new.json", "--budget", "3"], "--budget does not go with --merge; leave it"),
        (["--check", "bad.json"], "bad.json: corrupt or truncated JSON"),
        (["--check", "empty.json"], "empty.json: holds no timings to check"),
        (["--check", "unknown.json"], "unknown.json: field 'key.dtype' is 'float99', no dtype of torch"),
        (["--check", "good.json", "--budget", "0"], "--budget: '0' is no number of seconds above 0"),
        (["--check", "good.json", "--steps", "5"], "--steps: good.json says so itself"),
        (["--check", "--device", "cpu"], "no cache for "),
        (["model.json", "--quack"], "--quack: was removed; leave it out: an installed quack is tried wherever it can"),
        (["--show", "good.json", "--device", "cpu"], "--device: good.json says so itself"),
        (["--show", "good.json", "model.json"], "MODEL does not go with --show"),
        (["--show", "good.json", "--png", "plot.pdf"], "--png plot.pdf: what is written is a PNG"),
        (["--show", "empty.json", "--png", "plot.png"], "holds no timings to draw"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(status, key, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    cache(key, {"64x64": {1: 300_000}}, "good.json")
    cache(key, {}, "empty.json")
    cache(key | {"sm_count": 7}, {"8x8": {1: 1000}}, "alien.json")
    cache(key | {"dtype": "float99"}, {"8x8": {1: 1000}}, "unknown.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = status(*arguments)
    assert done.status == 2
    assert done.err.startswith("dmuon-profile: ") and message in done.err and done.out.count("\n") <= 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_merging_adds_up_and_the_last_wins(status, key, tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json", "out.json")]
    cache(key, {"64x64": {1: 100_000, 2: 150_000}}, paths[0])
    cache(key, {"64x64": {2: 160_000}, "8x8": {1: 50_000}}, paths[1])
    cache(key, {"16x16": {1: 60_000}, "8x8": {1: 70_000}}, paths[2])
    done = status("--merge", *paths[:2], "--out", paths[2])
    assert (done.status, done.out) == (0, f"wrote {paths[2]}: 4 timings of 3 shapes\n")
    assert medians(paths[2]) == {"64x64": {1: 100_000, 2: 160_000}, "8x8": {1: 50_000}, "16x16": {1: 60_000}}


@pytest.fixture
def measured_here(run, tmp_path):
    """A cache that was measured on this machine."""
    # Long enough that the noise of a busy machine stays within what --check tolerates.
    path = tmp_path / "costs.json"
    assert run("--shapes", "128x512", "--max-batch", "1", "--budget", "5", "--out", path).status == 0
    return path


def test_check_tells_whether_a_cache_holds_here(run, measured_here, monkeypatch):
    recorded = medians(measured_here)["128x512"][1]
    now = recorded

    def measure(work, **options):
        # The agreement is of what is recorded with what is measured, which a busy machine must not decide here.
        [(shape, timings)] = real(work, **options).items()
        return {shape: {k: replace(t, median_ns=now, p10_ns=now, p90_ns=now) for k, t in timings.items()}}

    real = profiler.measure
    monkeypatch.setattr("dmuon.tools.cli.profile.measure", measure)
    done = run("--check", measured_here)
    assert done.status == 0
    assert f"{measured_here}: valid on cpu, exactly" in done.out
    assert "agrees (ratios" in done.out and " 1.00\n" in done.out
    for factor, status in ((1.4, 0), (1 / 1.4, 0), (1.7, 1), (1 / 1.7, 1)):
        now = round(recorded * factor)
        done = run("--check", measured_here)
        assert done.status == status and f" {factor:.2f}\n" in done.out
        assert ("does not agree; measure anew" in done.out) == (status == 1)


def test_check_measures_for_real_and_takes_the_users_cache_by_default(run, users_cache):
    assert run("--shapes", "8x8,16x48,256x256", "--max-batch", "16", "--budget", "5").status == 0
    done = run("--check", "--budget", "5")
    assert done.status in (0, 1)  # a busy machine may disagree with itself
    [path] = users_cache.iterdir()
    assert done.out.startswith(f"{path}: valid on cpu, exactly\n")
    rows = [line.split() for line in done.out.splitlines()[2:-1]]
    assert len(rows) == 5 and rows[0][:2] == ["8x8", "1"] and rows[-1][:2] == ["256x256", "1"]


@pytest.mark.pitfall("P10", "P50")
@pytest.mark.parametrize(
    ("field", "value", "ends", "says"),
    [
        ("device", "Another device", (1,), "not valid on cpu: device 'Another device', here"),
        ("kernels", "older", (1,), "not valid on cpu: kernels 'older', here"),
        ("sm_count", 7, (1,), "not valid on cpu: sm_count 7, here"),
        ("torch", "2.11.0", (0, 1), "valid on cpu, measured with other versions: torch '2.11.0', here"),
    ],
)
def test_check_finds_a_cache_of_another_device_kernel_or_version(run, key, tmp_path, field, value, ends, says):
    other = tmp_path / "other.json"
    cache(key | {field: value}, {"128x512": {1: 1_000_000}}, other)
    done = run("--check", other)
    assert done.status in ends and says in done.out


def test_show_prints_rates_and_draws(status, key, tmp_path):
    path, png = tmp_path / "costs.json", tmp_path / "plot.png"
    cache(key, {"64x64": {1: 100_000, 2: 150_000}, "8x8": {1: 50_000}}, path)
    png.write_bytes(b"old")
    done = status("--show", path)
    assert done.status == 0
    rate = newton_schulz_flops((64, 64), "polar_express", 5, None, CPU) / 75_000
    assert "float32, polar_express, 5 steps; torch" in done.out
    row = next(line.split() for line in done.out.splitlines() if line.split()[:2] == ["64x64", "2"])
    assert row[2:5] == ["0.150", "0.075", f"{rate:.4g}"]
    pytest.importorskip("matplotlib")
    assert status("--show", path, "--png", png).status == 0
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["costs.json", "plot.png"]


def test_without_matplotlib_drawing_says_what_to_install(status, key, tmp_path, monkeypatch):
    cache(key, {"8x8": {1: 50_000}}, tmp_path / "costs.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = status("--show", tmp_path / "costs.json", "--png", tmp_path / "plot.png")
    assert done.status == 2 and "needs matplotlib; install it with pip install 'dmuon[bench]'" in done.err
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(status):
    done = status("--shapes", "8x8", "--device", "cuda:3")
    assert done.status == 2 and "'cuda:3' is not there" in done.err
