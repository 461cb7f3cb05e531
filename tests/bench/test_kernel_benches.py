"""The kernel benches run: the GPU script without a GPU, and training in fp16 Newton–Schulz beside fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from harness.commands import run_bench

MODULE = "gpu_kernels"
MODELS = ("qwen2.5-7b", "llama-3-8b", "pi0", "gpt2-1.5b")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    }
    for name in MODELS:
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def gpu_kernels(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """On a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    yield bench
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_gpu_script_runs_its_kernels_in_the_interpreter(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_bench("gpu_kernels.py", "--dry", "--models", models, "--json", path, "--seconds", 3, seconds=600)
    found = json.loads(path.read_text())
    assert found["dry"] and found["products"] and not found["faults"]


def test_the_gpu_script_runs_end_to_end_without_a_gpu(gpu_kernels: ModuleType, models: Path, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert gpu_kernels.main(["--dry", "--models", str(models), "--json", str(path), "--seconds", "60"]) == 0
    found = json.loads(path.read_text())
    assert found["dry"] and not found["faults"]
    assert [row["model"] for row in found["models"]] == list(MODELS)
    for row in found["models"]:
        assert {"dmuon", "cuBLAS standard", "cuBLAS gram", "torch.optim.Muon"} <= row["ms"].keys()
    assert found["shapes"] and all(max(row["errors"].values()) < 2e-2 for row in found["shapes"])


def test_without_a_gpu_the_gpu_script_wants_to_be_told_that_it_is_dry(
    gpu_kernels: ModuleType, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_kernels.main(["--models", str(models)])
    assert ended.value.code == 2 and "--dry runs the script without one" in capsys.readouterr().err
