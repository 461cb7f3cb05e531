"""The GPU script: what it saves when something fails, its order and its limits, and that it runs uninstalled."""

from __future__ import annotations

import importlib
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

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_kernels")


def settings(script: ModuleType) -> Any:
    return script.Settings(torch.device("cpu"), 128, 60.0, 2, Path())


# -- what fails -------------------------------------------------------------------------------------------------------


def test_what_fails_is_a_row_and_the_rest_goes_on(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("ptxas died")

    def large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    journal = script.Journal(tmp_path / "found.json", {})
    programs = {"peer": broken, "large": large, "works": lambda: torch.ones(8).sum()}
    times = settings(script).medians(programs, journal, "product", others=["peer"])
    assert times.keys() == {"works"} and not journal.wrong
    assert [(row["what"], row["ours"]) for row in journal.document["faults"]] == [
        ("product: peer", False),
        ("product: large", False),
    ]
    assert "FAILED product: peer: RuntimeError: ptxas died" in capsys.readouterr().out
    assert settings(script).medians({"broken": broken}, journal, "product") == {}
    assert journal.wrong and json.loads((tmp_path / "found.json").read_text()) == journal.document


def test_after_an_illegal_access_nothing_more_is_tried(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    journal = script.Journal(None, {})
    with pytest.raises(script.DeviceLost, match="product: an illegal memory access"), journal.guarded("product"):
        raise ValueError
    assert [row["what"] for row in journal.document["faults"]] == ["product"]


# -- how it starts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository that a GPU machine gets, and nothing installed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("bench", "dmuon", "kernels", "solver", "profiles", "tests/kernels"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results", "*.egg-info")
        )
    return folder


def bare(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with torch, Triton and NumPy, but without dmuon, PuLP and tqdm."""
    blocked = checkout / "blocked"
    blocked.mkdir(exist_ok=True)
    for name in ("pulp", "tqdm"):
        (blocked / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)\n")
    packages = Path(torch.__file__).parents[1]
    environment = {"PATH": os.environ["PATH"], "HOME": str(checkout), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(blocked), str(packages)])
    command = [sys.executable, "-S", *arguments]  # without what site-packages' .pth files add
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, cwd=checkout)


@pytest.mark.slow
def test_it_runs_from_a_checkout_that_is_not_installed(checkout: Path) -> None:
    models = checkout / "models"
    models.mkdir(exist_ok=True)
    config = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 1, "n_head": 16, "vocab_size": 50257}
    for name in ("llama-3-8b", "qwen2.5-7b", "gpt2-1.5b", "pi0"):
        (models / f"{name}.json").write_text(json.dumps(config))
    done = bare(
        checkout, "bench/gpu_kernels.py", "--dry", "--models", "models", "--json", "out/found.json", "--seconds", "2"
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((checkout / "out" / "found.json").read_text())
    assert found["models"] and not found["faults"]
