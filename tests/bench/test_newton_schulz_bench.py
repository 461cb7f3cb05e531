"""The CPU bench of Newton–Schulz: its rows of small matrices and of halves are there, and of the right programs."""

from __future__ import annotations

import importlib
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
    assert tiny[6] == "standard torch" and larger[6] == "gram r2 torch"
    assert float(tiny[5]) > 0.3 and float(larger[5]) > 0.7


def test_halves_are_timed_beside_their_errors(monkeypatch, capsys):
    monkeypatch.setattr(bench, "HALVES", ((64, 96),))
    bench.halves(3, 1.0)
    ((m, n, fp32, mixed, bf16, *_),) = rows(capsys.readouterr().out)
    assert (m, n) == ("64", "96")
    errors = [float(cell.split("(")[1].rstrip(")")) for cell in (fp32, mixed, bf16)]
    assert errors[0] < 1e-4 < errors[1] < errors[2] < 0.05


@pytest.mark.parametrize("wide", [True, False])
def test_the_plain_loops_are_torchs_and_ours(wide):

    polar = coefficient_sequence("polar_express", 5)
    x = torch.randn(24, 40 if wide else 24, generator=torch.Generator().manual_seed(0))
    for loop in (bench.standard, bench.torch_in_fp32):
        torch.testing.assert_close(loop(x, polar), orthogonalize(x, method="standard"), rtol=0, atol=1e-5)
