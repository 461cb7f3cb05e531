"""The CPU bench of Newton–Schulz: its rows of small matrices and of halves are there, and of the right programs."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

from dmuon.kernels import coefficient_sequence, orthogonalize

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
bench = importlib.import_module("newton_schulz")


def rows(text: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines[2:] if len(line) > 1]


def test_single_small_matrices_take_the_form_with_fewer_calls(monkeypatch, capsys):
    """And are not slowed by more than calls take; the bounds are wide, as the machine is shared."""
    monkeypatch.setattr(bench, "SMALL", ((16, 16), (128, 512)))
    bench.small(30, 0.2)
    (tiny, larger) = rows(capsys.readouterr().out)
    assert tiny[7] == "standard torch" and larger[7] == "gram r2 torch"
    assert float(tiny[6]) > 0.5 and float(larger[6]) > 0.7


def test_halves_are_timed_beside_their_errors(monkeypatch, capsys):
    monkeypatch.setattr(bench, "HALVES", ((64, 96),))
    bench.halves(3, 1.0)
    ((m, n, fp32, mixed, bf16, *_),) = rows(capsys.readouterr().out)
    assert (m, n) == ("64", "96")
    errors = [float(cell.split("(")[1].rstrip(")")) for cell in (fp32, mixed, bf16)]
    assert errors[0] < 1e-4 < errors[1] < errors[2] < 0.05


def test_the_committed_page_of_modes_is_what_the_bench_prints(monkeypatch, capsys):
    """But for its figures, where they were measured, and columns of programs that are not installed here."""
    for name, sizes in (("HALVES", ((16, 24),)), ("SMALL", ((16, 16),)), ("SQUARES", (16,))):
        monkeypatch.setattr(bench, name, sizes)
    bench.modes()
    printed = capsys.readouterr().out
    committed = (Path(bench.__file__).parent / "results" / "newton-schulz-modes-cpu.md").read_text()

    def text(page: str) -> list[str]:
        return [line for line in page.splitlines() if line and not line.startswith("|") and "one thread" not in line]

    def columns(page: str) -> list[set[str]]:
        lines = page.splitlines()
        return [set(above.split(" | ")) for above, line in itertools.pairwise(lines) if line.startswith("|--:|")]

    assert text(printed) == text(committed)
    assert len(columns(printed)) == 3
    assert all(here <= there for here, there in zip(columns(printed), columns(committed), strict=True))


@pytest.mark.parametrize("wide", [True, False])
def test_the_plain_loops_are_torchs_and_ours(wide):
    polar = coefficient_sequence("polar_express", 5)
    x = torch.randn(24, 40 if wide else 24, generator=torch.Generator().manual_seed(0))
    for loop in (bench.standard, bench.torch_in_fp32):
        torch.testing.assert_close(loop(x, polar), orthogonalize(x, method="standard"), rtol=0, atol=1e-5)
