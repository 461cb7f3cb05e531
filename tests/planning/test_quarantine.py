"""Kernels that no GPU has run are tried in a process of their own, and timed only where they passed."""

from __future__ import annotations

import json
import sys
import time
import warnings

import pytest
import torch

from dmuon.kernels import Variant
from dmuon.planning import profiler, quarantine
from dmuon.planning.device_key import NsOptions
from dmuon.planning.quarantine import proven_kinds

CPU = torch.device("cpu")
SMALL, LARGE = (8, 16), (16, 32)
STANDARD = Variant("standard", (), "torch", 1)
LOADED = Variant("gram", (2,), "triton", 1, "128x64w8s4dhplg8")
QUACK = Variant("gram", (2,), "quack", 1)

TELL = f"import sys; file = open(sys.argv[2], 'a'); file.write('{json.dumps([*SMALL, None])}\\n'); file.flush(); "
WRONG = json.dumps([*LARGE, "says: it differs; not used"])


def _proven(monkeypatch: pytest.MonkeyPatch, program: str, seconds: float) -> frozenset[tuple[tuple[int, int], str]]:
    monkeypatch.setattr(quarantine, "_PROGRAM", (sys.executable, "-c", program))
    variants = [(SMALL, STANDARD), (LARGE, STANDARD)]
    return proven_kinds({"loader": variants}, CPU, NsOptions(), seconds)


@pytest.mark.parametrize(
    ("ending", "seconds", "told"),
    [
        ("import time; time.sleep(600)", 1.0, r"did not end in 1 s"),
        ("import subprocess; subprocess.run(['sleep', '600'])", 1.0, r"did not end in 1 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60.0, r"was ended by signal 11"),
        ("sys.exit(3)", 60.0, r"ended with status 3"),
        (f"file.write({WRONG!r} + '\\n')", 60.0, r"says: it differs; not used"),
        (f"file.write({WRONG[:9]!r})", 60.0, r"ended with status 0"),
    ],
    ids=["hangs", "leaves another", "dies", "fails", "is wrong", "is cut off"],
)
def test_what_hangs_dies_or_is_wrong_is_not_proven_and_what_was_told_before_counts(monkeypatch, ending, seconds, told):
    started = time.monotonic()
    with pytest.warns(
        UserWarning, match=rf"loader is not tried on matrices of 16x32: in a process of its own it {told}"
    ):
        assert _proven(monkeypatch, TELL + ending, seconds) == {(SMALL, "loader")}
    assert time.monotonic() - started < 30


def test_a_process_that_cannot_be_started_proves_nothing(monkeypatch):
    monkeypatch.setattr(quarantine, "_PROGRAM", ("/nonexistent/python",))
    with pytest.warns(UserWarning, match="cannot be started"):
        assert proven_kinds({"quack": [(SMALL, STANDARD)]}, CPU, NsOptions(), 5.0) == frozenset()


@pytest.mark.slow
def test_the_program_updates_and_judges_as_the_profiler_would():
    """Of the last, no kernel is there: it fails, and the others count all the same."""
    variants = [(SMALL, STANDARD), (LARGE, Variant("gram", (2,), "split", 1)), ((24, 48), LOADED)]
    with pytest.warns(
        UserWarning, match=r"matrices of 24x48: in a process of its own it failed \(ValueError: the Triton kernel"
    ):
        found = proven_kinds({"loader": variants}, CPU, NsOptions(), 120.0)
    assert found == {(SMALL, "loader"), (LARGE, "loader")}


def test_a_variant_that_computes_something_else_is_at_fault(monkeypatch):
    assert profiler.trial_fault((24, 32), CPU, NsOptions(), STANDARD) is None
    real = profiler.orthogonalize
    monkeypatch.setattr(
        profiler, "orthogonalize", lambda x, *, variant=None, **rest: real(x, **rest) * (0.85 if variant else 1.0)
    )
    assert "differs from the standard form" in profiler.trial_fault((24, 32), CPU, NsOptions(), STANDARD)


def _rivals(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Offers both kinds, each faster than anything; the list is of those that are timed."""
    clocked: list[Variant] = []

    def forms(best: Variant) -> tuple[Variant, ...]:
        return (STANDARD, LOADED, QUACK)

    monkeypatch.setattr(profiler, "alternatives", lambda *_: iter((forms, lambda best: ())))
    monkeypatch.setattr(profiler._Batch, "update", lambda self, options, variant=None: lambda: clocked.append(variant))
    monkeypatch.setattr(profiler, "_agrees", lambda *_: True)
    return clocked


def test_only_what_is_proven_on_a_shape_is_timed(monkeypatch):
    clocked = _rivals(monkeypatch)

    def clock(function: object) -> int:
        function()
        return 10 if clocked[-1] is not None and clocked[-1].unproven else 1000

    def fastest(proven: frozenset[tuple[tuple[int, int], str]]) -> Variant:
        clocked.clear()
        return profiler._fastest(profiler._Batch(SMALL, 1, CPU), NsOptions(), clock, 1e12, 0.0, proven)[0]

    assert not fastest(frozenset()).unproven and not any(v.unproven for v in clocked)
    assert not fastest(frozenset({(LARGE, "loader")})).unproven
    assert fastest(frozenset({(SMALL, "loader")})) == LOADED and QUACK not in clocked
    assert fastest(frozenset({(SMALL, "quack")})) == QUACK and LOADED not in clocked
    both = Variant("gram", (2,), "quack", 1, LOADED.tile)
    assert both.unproven == {"loader", "quack"} and LOADED.unproven == {"loader"} and not STANDARD.unproven


def test_only_where_time_is_given_for_it_does_measuring_start_processes(monkeypatch):
    _rivals(monkeypatch)
    asked = []
    monkeypatch.setattr(profiler, "proven_kinds", lambda *arguments: asked.append(arguments) or frozenset())
    profiler.measure({SMALL: (1,)}, device=CPU, budget_s=0.5)
    assert asked == []
    profiler.measure({SMALL: (1,)}, device=CPU, budget_s=0.5, trial_s=0.25)
    assert asked == [({"loader": [(SMALL, LOADED)], "quack": [(SMALL, QUACK)]}, CPU, NsOptions(), 0.25)]


def test_where_no_such_kernel_is_offered_no_process_is_started(monkeypatch):
    monkeypatch.setattr(quarantine.subprocess, "Popen", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiler.unproven_variants(SMALL, CPU, NsOptions()) == {}
        assert profiler.measure({SMALL: (1,)}, device=CPU, budget_s=0.5, trial_s=0.5)
