"""Kernels that no GPU has run are tried in a process of their own, and timed only where they passed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

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

MIDDLE = (12, 24)


def _tell(*lines: object) -> str:
    """A program that tells these lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return f"import sys; file = open(sys.argv[3], 'a'); file.write({text!r}); file.flush(); "


TELL = _tell(["ready"], [*SMALL, None])
WRONG = json.dumps([*LARGE, "says: it differs; not used"])
ROOT = Path(__file__).parents[2]


def _proven(monkeypatch: pytest.MonkeyPatch, program: str, seconds: float) -> frozenset[tuple[tuple[int, int], str]]:
    monkeypatch.setattr(quarantine, "_PROGRAM", (sys.executable, "-S", "-c", program))
    monkeypatch.setattr(quarantine, "_LEAST_SECONDS", 0.0)
    trials = [(shape, {1: [STANDARD]}) for shape in (SMALL, LARGE)]
    return proven_kinds({"loader": trials}, CPU, NsOptions(), seconds)


@pytest.mark.parametrize(
    ("ending", "seconds", "told"),
    [
        ("import time; time.sleep(600)", 0.6, r"did not end in 1 s"),
        ("import subprocess; subprocess.run(['sleep', '600'])", 0.6, r"did not end in 1 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60.0, r"was ended by signal 11"),
        ("sys.exit(3)", 60.0, r"ended with status 3$"),
        ("raise ImportError('no dmuon')", 60.0, r"ended with status 1 \(ImportError: no dmuon\)"),
        (f"file.write({WRONG!r} + '\\n')", 60.0, r"says: it differs; not used"),
        (f"file.write({WRONG[:9]!r})", 60.0, r"ended with status 0"),
    ],
    ids=["hangs", "leaves another", "dies", "fails", "raises", "is wrong", "is cut off"],
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
        assert proven_kinds({"quack": [(SMALL, {1: [STANDARD]})]}, CPU, NsOptions(), 5.0) == frozenset()


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("sys.exit(3)", {MIDDLE: "ended with status 3", LARGE: "was not tried after 12x24"}),
        (
            _tell([*MIDDLE, "failed"], ["lost"]),
            {MIDDLE: "failed", LARGE: "was not tried after 12x24"},
        ),
    ],
    ids=["dies", "loses its device"],
)
def test_what_was_not_tried_any_more_is_not_called_failing(monkeypatch, ending, told):
    monkeypatch.setattr(quarantine, "_PROGRAM", (sys.executable, "-S", "-c", TELL + ending))
    trials = [(shape, {1: [STANDARD]}) for shape in (SMALL, MIDDLE, LARGE)]
    with pytest.warns(UserWarning) as found:
        assert proven_kinds({"loader": trials}, CPU, NsOptions()) == {(SMALL, "loader")}
    head = "loader is not tried on matrices of"
    expected = [f"{head} {m}x{n}: in a process of its own it {fault}" for (m, n), fault in told.items()]
    assert [str(w.message) for w in found] == expected


def test_a_process_that_a_kill_does_not_end_proves_nothing(monkeypatch):
    """What it has told is not trusted beside a kernel that runs on."""
    monkeypatch.setattr(quarantine, "_ENDING_SECONDS", 0.1)
    real, killed = os.killpg, []
    monkeypatch.setattr(quarantine.os, "killpg", lambda *arguments: killed.append(arguments))
    with pytest.warns(UserWarning, match="did not end in 0 s, and runs on though it was killed"):
        assert _proven(monkeypatch, TELL + "import time; time.sleep(600)", 0.2) == frozenset()
    real(*killed[0])


def test_a_kind_that_is_soon_done_leaves_its_time_to_the_next(monkeypatch):
    shares = []

    def outcome(trials, device, options, seconds):
        shares.append(seconds)
        return quarantine._Outcome("ended", seconds=10.0, told={SMALL: None})

    monkeypatch.setattr(quarantine, "_outcome", outcome)
    trials = [(SMALL, {1: [STANDARD]})]
    assert len(proven_kinds({"loader": trials, "quack": trials}, CPU, NsOptions(), 5.0)) == 2
    assert shares == [60.0, 110.0], "a minute for each, at least"


@pytest.mark.slow
def test_the_program_updates_and_judges_as_the_profiler_would():
    """Of the last, no kernel is there: it fails, and the others count all the same."""
    split = Variant("gram", (2,), "split", 1)
    trials = [
        (SMALL, {1: [STANDARD], 3: [STANDARD, split]}),
        (LARGE, {1: [split]}),
        ((24, 48), {1: [STANDARD, LOADED]}),
    ]
    with pytest.warns(
        UserWarning, match=r"matrices of 24x48: in a process of its own it failed \(ValueError: the Triton kernel"
    ):
        found = proven_kinds({"loader": trials}, CPU, NsOptions(), 120.0)
    assert found == {(SMALL, "loader"), (LARGE, "loader")}


PARENT = f"""
import sys
sys.path[:0] = ["bench", ""]
import common.checkout
import torch
from dmuon.kernels import Variant
from dmuon.planning.device_key import NsOptions
from dmuon.planning.quarantine import proven_kinds
print(proven_kinds({{"loader": [({SMALL}, {{1: [Variant.parse("{STANDARD}")]}})]}}, torch.device("cpu"), NsOptions()))
"""


@pytest.mark.slow
def test_the_program_runs_the_dmuon_of_a_checkout_that_is_not_installed(tmp_path):
    """Not that which is installed, and not the folder ``dmuon`` of the working folder, which has no kernels."""
    for name in ("dmuon", "kernels", "solver", "profiles", "bench/common"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    profiler_file = tmp_path / "dmuon/planning/profiler.py"
    text = profiler_file.read_text()
    head = "def trial_fault("
    assert head in text
    profiler_file.write_text(
        text.replace(head, "def trial_fault(*_):\n    return __file__\n\n\ndef other_trial_fault(")
    )
    done = subprocess.run([sys.executable, "-c", PARENT], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "frozenset()", done.stderr
    assert f"in a process of its own it {profiler_file}" in done.stderr


@pytest.mark.parametrize("how", ["killed", "late"])
def test_the_program_ends_with_its_parent_and_after_its_time(tmp_path, how):
    """Also where it hangs: nothing of Python has to run for that."""
    trial = quarantine.__file__.replace("quarantine", "trial")
    waits = f"""
import runpy, sys, time
program = runpy.run_path({trial!r})
program["end_with"](int(sys.argv[1]))
program["end_after"](1 if {how == "late"} else 60)
print("waits", flush=True)
time.sleep(120)
"""
    parent = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {waits!r}, str(os.getpid())], start_new_session=True)
print(child.pid, flush=True)
print(child.wait(), flush=True)
"""
    with subprocess.Popen([sys.executable, "-S", "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "waits\n"
        if how == "late":
            assert int(process.stdout.readline()) == -signal.SIGALRM
            return
        process.kill()
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline, f"process {child} outlived its parent"
        time.sleep(0.02)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_variant_that_computes_something_else_is_at_fault(monkeypatch):
    rivals = {1: [STANDARD]}
    assert profiler.trial_fault((24, 32), CPU, NsOptions(), rivals) is None
    real = profiler.orthogonalize
    monkeypatch.setattr(
        profiler, "orthogonalize", lambda x, *, variant=None, **rest: real(x, **rest) * (0.85 if variant else 1.0)
    )
    assert "differs from the standard form" in profiler.trial_fault((24, 32), CPU, NsOptions(), rivals)
    monkeypatch.setattr(profiler, "_agrees", lambda *_: False)
    assert "says: differs" in profiler.trial_fault((24, 32), CPU, NsOptions(), rivals), "without a warning too"


def _tried(monkeypatch: pytest.MonkeyPatch, fits: int = 100) -> list[tuple[tuple[int, int], int, Variant]]:
    tried = []

    def agrees(batch, options, variant):
        if batch.k > fits:
            raise torch.OutOfMemoryError("too large")
        tried.append((batch.shape, batch.k, variant))
        return True

    monkeypatch.setattr(profiler, "_agrees", agrees)
    monkeypatch.setattr(profiler._Batch, "update", lambda self, options, variant=None: lambda: None)
    monkeypatch.setattr(profiler, "product_fault", lambda *_: None)
    return tried


def test_a_trial_covers_one_matrix_and_the_largest_batch_all_variants_and_both_orientations(monkeypatch):
    tried = _tried(monkeypatch)
    rivals = {5: [STANDARD], 1: [STANDARD, LOADED]}
    assert profiler.trial_fault(SMALL, CPU, NsOptions(), rivals) is None
    tall = SMALL[::-1]
    assert tried == [
        *[(sides, 1, variant) for sides in (SMALL, tall) for variant in (STANDARD, LOADED)],
        *[(sides, 5, STANDARD) for sides in (SMALL, tall)],
    ]
    tried.clear()
    assert profiler.trial_fault((8, 8), CPU, NsOptions(), {1: [LOADED]}) is None and len(tried) == 1


@pytest.mark.parametrize("sides", [(8, 16), (16, 8)])
def test_only_what_no_gpu_has_run_is_repeated_with_the_small_side_first(monkeypatch, sides):
    _tried(monkeypatch)
    asked = []

    def repeated(x: torch.Tensor, variant: Variant, dtype: torch.dtype) -> str:
        asked.append((tuple(x.shape), x.stride(), variant, dtype))
        return "gives another product"

    monkeypatch.setattr(profiler, "product_fault", repeated)
    half = NsOptions(dtype=torch.float16)
    assert profiler.trial_fault(sides, CPU, half, {2: [STANDARD]}) is None and not asked
    told = profiler.trial_fault(sides, CPU, half, {2: [QUACK]})
    assert told == f"gives another product (2 of {sides[0]}x{sides[1]} by {QUACK})"
    strides = (128, 16, 1) if sides == (8, 16) else (128, 1, 8)
    assert asked == [((2, 8, 16), strides, QUACK, torch.float16)]


def test_a_batch_that_does_not_fit_is_halved_until_it_does(monkeypatch):
    tried = _tried(monkeypatch, fits=3)
    assert profiler.trial_fault((8, 8), CPU, NsOptions(), {16: [LOADED]}) is None
    assert tried == [((8, 8), 2, LOADED)]
    _tried(monkeypatch, fits=0)
    with pytest.raises(torch.OutOfMemoryError):
        profiler.trial_fault((8, 8), CPU, NsOptions(), {16: [LOADED]})


def test_every_form_that_is_offered_is_a_candidate_of_its_kind(monkeypatch):
    def alternatives(shape, k, *_):
        forms = (STANDARD, Variant("standard", (), "triton", k), Variant("gram", (2,), "triton", k), QUACK)
        tiles = {"triton": (LOADED.tile,), "quack": (LOADED.tile,)}

        def replays(best):
            return (profiler.replace(best, replay=True),) if k == 1 else ()

        yield from (
            lambda best: forms,
            lambda best: tuple(profiler.replace(best, tile=t) for t in tiles.get(best.backend, ())),
            lambda best: (),
            replays,
        )

    monkeypatch.setattr(profiler, "alternatives", alternatives)
    found = profiler.unproven_variants(SMALL, (1, 2, 4), CPU, NsOptions())
    named = {kind: {k: list(map(str, v)) for k, v in rivals.items()} for kind, rivals in found.items()}
    tile = LOADED.tile
    assert named == {
        "loader": {
            1: [f"{form} triton {tile} by1{end}" for form in ("standard", "gram r2") for end in ("", " replay")],
            4: [f"{form} triton {tile} by4" for form in ("standard", "gram r2")],
        },
        "quack": {1: ["gram r2 quack by1", "gram r2 quack by1 replay"], 4: ["gram r2 quack by1"]},
    }


def _rivals(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Offers both kinds, each faster than anything; the list is of those that are timed."""
    clocked: list[Variant] = []

    def forms(best: Variant) -> tuple[Variant, ...]:
        return (STANDARD, LOADED, QUACK)

    monkeypatch.setattr(profiler, "alternatives", lambda *_: iter((forms, *[lambda best: ()] * 3)))
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
    profiler.measure({SMALL: (1,)}, device=CPU, budget_s=0.1)
    profiler.measure({SMALL: (1,)}, device=CPU, budget_s=0.1, trial_s=0.25, kinds=())
    assert asked == []
    profiler.measure({SMALL: (1, 2, 4)}, device=CPU, budget_s=0.1, trial_s=0.25)
    trials = {kind: [(SMALL, {1: [one], 4: [one]})] for kind, one in (("loader", LOADED), ("quack", QUACK))}
    assert asked.pop() == (trials, CPU, NsOptions(), 0.25)
    profiler.measure({SMALL: (1,)}, device=CPU, budget_s=0.1, trial_s=0.25, kinds={"quack"})
    assert asked.pop() == ({"quack": [(SMALL, {1: [QUACK]})]}, CPU, NsOptions(), 0.25)


def test_where_no_such_kernel_is_offered_no_process_is_started(monkeypatch):
    monkeypatch.setattr(quarantine.subprocess, "Popen", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiler.unproven_variants(SMALL, (1,), CPU, NsOptions()) == {}
        assert profiler.measure({SMALL: (1,)}, device=CPU, budget_s=0.5, trial_s=0.5)
