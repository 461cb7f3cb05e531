"""The GPU script: it runs without a GPU, interpreted and uninstalled, and saves what it has when something fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness.commands import ROOT

MODULE = "gpu_kernels"


def settings(bench: ModuleType) -> Any:
    return bench.Settings(dry=True)


# -- what fails -------------------------------------------------------------------------------------------------------


def test_what_fails_is_a_row_and_the_rest_goes_on(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("ptxas died")

    def large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    journal = bench.Journal(tmp_path / "found.json", {})
    programs = {"peer": broken, "large": large, "works": lambda: torch.ones(8).sum()}
    times = settings(bench).medians(programs, journal, "product", others=["peer"])
    assert times.keys() == {"works"} and not journal.wrong
    assert [(row["what"], row["ours"]) for row in journal.document["faults"]] == [
        ("product: peer", False),
        ("product: large", False),
    ]
    assert "FAILED product: peer: RuntimeError: ptxas died" in capsys.readouterr().out
    assert settings(bench).medians({"broken": broken}, journal, "product") == {}
    assert journal.wrong and json.loads((tmp_path / "found.json").read_text()) == journal.document


# -- how it runs ----------------------------------------------------------------------------------------------------


MODELS = ("qwen2.5-7b", "llama-3-8b", "pi0", "gpt2-1.5b")


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", [False, True])
def test_it_runs_from_a_checkout_that_is_not_installed(tmp_path: Path, interpreted: bool) -> None:
    """With the files that a GPU machine gets, on Python with torch, Triton and NumPy, but without PuLP."""
    unwanted = shutil.ignore_patterns("__pycache__", "results", "*.egg-info")
    for name in ("bench", "dmuon", "kernels", "solver", "profiles", "tests/kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unwanted)
    models, blocked = tmp_path / "models", tmp_path / "blocked"
    models.mkdir()
    config = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 1, "n_head": 16, "vocab_size": 50257}
    for name in MODELS:
        (models / f"{name}.json").write_text(json.dumps(config))
    blocked.mkdir()
    (blocked / "pulp.py").write_text("raise ModuleNotFoundError(__name__)\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(blocked), str(Path(torch.__file__).parents[1])])
    environment["CUDA_VISIBLE_DEVICES"] = ""
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-S"]  # without what site-packages' .pth files add
    command += ["bench/gpu_kernels.py", "--dry", "--models", "models", "--json", "out/found.json"]
    command += ["--seconds", "3" if interpreted else "60"]  # interpreted kernels take long
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert found["dry"] and not found["faults"]
    if interpreted:
        assert found["products"]
        return
    assert [row["model"] for row in found["models"]] == list(MODELS)
    for row in found["models"]:
        assert {"dmuon", "cuBLAS standard", "cuBLAS gram", "torch.optim.Muon"} <= row["ms"].keys()
    assert found["shapes"] and all(max(row["errors"].values()) < 2e-2 for row in found["shapes"])
