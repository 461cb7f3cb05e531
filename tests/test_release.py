"""What is published: one version, one address, a package with what its description links to, a notebook that runs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from harness.limits import PROGRAM_SECONDS

import dmuon

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "one_gpu.ipynb"
CHECKS = ["parity", "clip", "same bits", "ownership", "collectives", "checkpoint"]  # of each layout, in this order


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match is not None, f"{file} has no {pattern}"
    return match[1]


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dmuon_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_version_everywhere() -> None:
    versions = {
        found(r'^version = "(.*)"$', "pyproject.toml"),
        found(r"^version: (.*)$", "CITATION.cff"),
        dmuon.__version__,
    }
    assert len(versions) == 1
    assert f"## {versions.pop()}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("address", ["", "https://example.org/o/dmuon"])
def test_the_description_has_no_relative_links(setup: ModuleType, address: str) -> None:
    setup.ADDRESS = address
    text = setup.description()
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", text)
    assert bool(setup.urls()) == bool(address) == (f"{address}/blob/main/docs/limits.md" in text and address != "")
    assert "optimizer = dmuon.Muon(model)" in text


def test_every_supported_python_is_named_and_tried() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(pythons) <= set(re.findall(r'python(?:-version)?: "(3\.\d+)"', workflow)), pythons
    oldest = found(r'"torch>=(\d+\.\d+)"', "pyproject.toml")
    pinned = found(r"^torch==(.*)$", "constraints.txt")
    assert f'torch: "{oldest}.' in workflow and f'torch: "{pinned}"' in workflow


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="build is not installed")
def test_the_source_holds_docs_and_examples(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    linked = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()))
    kept = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".json")}
    assert linked | kept | {"Dockerfile", "setup.py", str(NOTEBOOK.relative_to(ROOT))} <= names


@pytest.mark.slow
def test_the_notebook_runs_and_learns(tmp_path: Path) -> None:
    """Its cells in order, in one process, as a kernel runs them; among them the first run of `dmuon-check`."""
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join(cells))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=3 * PROGRAM_SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    adamw, muon = (
        float(found) for found in re.findall(r"^(?:AdamW|dmuon)  (\d+\.\d+) after", done.stdout, re.MULTILINE)
    )
    assert adamw < 4 and muon < 4, (adamw, muon)
    assert "blocks.0.up.weight" in done.stdout
    report = json.loads((tmp_path / "dmuon-first-run.json").read_text())
    assert (report["exit_status"], report["world"]) == (0, 2)
    lines = report["lines"]
    assert lines[0]["check"] == "environment" and lines[0]["where"] == "2 ranks"
    passed = [(line["check"], line["where"]) for line in lines if line["status"] == "pass"]
    assert sum(check == "kernels" for check, _ in passed) == 36
    for layout in ("1d 2 reshard fp32", "1d 2 keep fp32", "tp 1x2 keep fp32"):
        assert [check for check, where in passed if where.startswith(layout)] == CHECKS
    assert {line["check"] for line in lines if "bf16" in line["where"]} == set(CHECKS[:3])
    skipped = next(line for line in lines if line["status"] == "skip")
    assert skipped["where"] == "hsdp" and skipped["text"] == "needs at least 4 ranks and a multiple of 2, here are 2"
    parity = next(line for line in lines if line["check"] == "parity")
    assert 0 < parity["value"] <= parity["limit"] == 1e-3
