"""``dmuon-check``: what it says about runs that hold and runs that do not, and its exit status."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.commands import command
from harness.jobs import Ended, run_file
from harness.limits import PROGRAM_SECONDS

from dmuon.kernels import choose_variant, coefficient_sequence
from dmuon.tools.check import TOPOLOGIES, Layout, Line, layout_of
from dmuon.tools.cli import check

main = command("dmuon-check")

CHECKS = ["parity", "clip", "same bits", "ownership", "collectives", "checkpoint"]


def lines_of(output: str) -> list[tuple[str, str, str]]:
    """Status, check and the rest of every line of the report."""
    kinds = ("pass", "fail", "skip", "warn", "info")
    unfolded = re.sub(r"\n {19,}", " ", output).splitlines()
    rows = [(x[:6].strip(), x[6:19].strip(), x[19:]) for x in unfolded if x.startswith(kinds)]
    wide = [x for x in output.splitlines() if rows and len(x) > 100 and x.startswith((*kinds, " " * 19))]
    assert all(len(x.split()[-1]) > 50 for x in wide), wide  # a path in an error is not broken
    return rows


# What each rank runs before `main`, on a smaller model.
PROGRAM = """
import os, sys
import dmuon.tools.check as training
from dmuon.tools.cli import check

training.LAYERS, training.CONTEXT = 2, 16

def raise_on(owner, name, ranks):
    original = getattr(owner, name)
    def call(*args):
        if os.environ["RANK"] in ranks:
            raise ArithmeticError("planted")
        return original(*args)
    setattr(owner, name, call)

{plant}
sys.exit(check.main(["--device", "cpu", *{arguments}]))
"""


def planted(folder: Path, world: int, plant: str, *arguments: str) -> list[Ended]:
    """How each rank ended."""
    script = folder / "planted.py"
    script.write_text(PROGRAM.format(plant=plant, arguments=arguments))
    return run_file(script, world, folder, PROGRAM_SECONDS, watch=None)


TOPOLOGIES_OF_FOUR = ("hsdp", "cp", "tp", "fsdp2-hsdp", "fsdp2-tp")


@pytest.mark.slow
def test_four_ranks_pass_on_every_topology_that_fits(tmp_path: Path) -> None:
    """Those of fewer ranks: tests/bench/test_gpu_hour.py."""
    ended = planted(tmp_path, 4, f"check.TOPOLOGIES = {TOPOLOGIES_OF_FOUR}")
    assert {end.code for end in ended} == {0}, ended[0].text
    lines = lines_of(ended[0].text)
    passed = {rest[:26].split()[0] for status, check, rest in lines if (status, check) == ("pass", "checkpoint")}
    assert passed == {*TOPOLOGIES_OF_FOUR}


# What is planted, by the checks of which a line then fails.
PLANTS = {
    "parity, collectives, ownership, same bits, checkpoint": """
training.DECAY = 5.0  # of the one process
training.totals = lambda messages: {"fill": (1, 0)}
training.is_matrix = lambda name: name.endswith('up.weight')
unsharded = training._unsharded
training._unsharded = lambda model: {n: t + int(os.environ["RANK"]) * 1e-7 for n, t in unsharded(model).items()}
training.set_state_dict = lambda *args, **kwargs: None""",
    "training": "raise_on(training.Training, 'ownership', '01')",
    "all further": "raise_on(training.Training, 'ownership', '1')",
}
ONE = 'check.TOPOLOGIES = ("1d",)\n'


@pytest.mark.pitfall("P11", "P49")
@pytest.mark.slow
@pytest.mark.parametrize("checks", PLANTS)
def test_what_is_wrong_fails_by_name_on_all_ranks(tmp_path: Path, checks: str) -> None:
    """An error on one rank alone ends all, within the time of a collective."""
    ended = planted(tmp_path, 2, ONE + PLANTS[checks], "--timeout", "10")
    said = "".join(end.text for end in ended)
    assert [end.code for end in ended] == [1, 1], said
    lines = lines_of(ended[0].text)
    assert {*checks.split(", ")} <= {name for status, name, _ in lines if status in ("fail", "skip")}, lines
    assert lines[-1][:2] == ("fail", "all")
    if checks in ("training", "all further"):
        assert "rank 1: training 1d 2 reshard fp32: ArithmeticError: planted" in said
        assert sum(name == "training" for _, name, _ in lines) == (2 if checks == "training" else 1), "goes on, or ends"


@pytest.mark.slow
def test_a_rank_that_hangs_ends_with_its_stack(tmp_path: Path) -> None:
    hang = "import time\ntraining.Training.parity = lambda self: time.sleep(1000) if os.environ['RANK'] == '1' else []"
    out = tmp_path / "report.json"
    ended = planted(tmp_path, 2, ONE + hang, "--timeout", "5", "--json", str(out))
    said = "".join(end.text for end in ended)
    assert [end.code for end in ended] == [1, 1] and "Timeout (0:00:20)!" in said and "in check_layout" in said, said
    report = json.loads(out.read_text())
    assert report["exit_status"] is None and report["lines"], "what came before is in the file"


def test_one_process_checks_what_it_can_and_says_how_to_launch(
    ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = ended(main, "--device", "cpu", "--json", tmp_path / "report.json")
    lines = lines_of(done.out)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.status == report["exit_status"] == 0
    assert [(line["status"], line["check"]) for line in report["lines"]] == [line[:2] for line in lines]
    assert [check for status, check, _ in lines if status == "pass"] == [*CHECKS, *CHECKS[:3], "all"]
    assert "torchrun --nproc-per-node 8 --no-python dmuon-check" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topologies", "1d"), "--topologies: was removed; leave it out: all topologies that fit"),
        (("--timeout", "0"), "'0' is no number of seconds from 1"),
        (("--timeout", "1e308"), "'1e308' is no number of seconds from 1"),
        (("--device", "tpu"), "invalid choice: 'tpu'"),
        (("--device", "cpu", "--json", "/absent/x.json"), "no such folder"),
        (("--first-run", "--device", "cpu", "--json", "/absent/x.json"), "no such folder"),
        (("--quick",), "--quick: was removed; leave it out: all topologies that fit, all dtypes"),
        (("--first-run", "--budget", "60"), "--budget: was removed; leave it out"),
        (("--ranks", "2"), "--ranks: was removed; write torchrun --nproc-per-node N --no-python dmuon-check --first"),
    ],
)
def test_bad_options_are_named_before_anything_runs(
    arguments: tuple[str, ...], message: str, ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = ended(main, *arguments)
    assert done.status == 2 and message in done.err
    assert not lines_of(done.out)


def test_a_first_run_finds_the_package_from_a_clone_and_has_up_to_eight_ranks(tmp_path: Path) -> None:
    """There the folder dmuon/ holds a part of it."""
    (tmp_path / "dmuon").mkdir()
    (tmp_path / "dmuon" / "__init__.py").touch()
    launched = check.launch(0, ["--first-run", "--device", "tpu"])
    rank = launched[launched.index("--no-python") + 1 :]
    done = subprocess.run(rank, cwd=tmp_path, capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    assert done.returncode == 2 and "invalid choice: 'tpu'" in done.stderr
    assert [check.launch(gpus, ["--first-run"])[4] for gpus in (0, 1, 2, 5, 16)] == [
        f"--nproc-per-node={ranks}" for ranks in (2, 2, 2, 5, 8)
    ]


@pytest.mark.parametrize("multiprocessors", [108, 132, 160])
def test_a_first_run_multiplies_by_each_way_that_the_rule_takes(multiprocessors: int) -> None:
    """Of an A100, an H100 and larger ones, with as many matrices as are updated there."""
    device, polar = torch.device("cuda", 0), coefficient_sequence("polar_express", 5)
    ways = [choose_variant(m, 3, polar, torch.float16, device, multiprocessors=multiprocessors) for m in check._SHAPES]
    assert {way.backend for way in ways} == {"torch", "triton"}


# -- what forbids a run -------------------------------------------------------------------------------------------

SOFTWARE = "torch 2.13, dmuon 0.1, NCCL 2.30"
GPU = check.Machine(SOFTWARE, "H100", "a")


class TwoRanks:
    """Rank 0 of two; the other one says no error, and its lines."""

    rank, world = 0, 2

    class timeout:
        total_seconds = staticmethod(lambda: 10.0)

    def __init__(self, *lines: Line) -> None:
        self.other = (None, False, [*lines])

    def gather(self, item: Any) -> list[Any]:
        return [item, self.other]


def board_of(*lines: Line) -> check.Board:
    return check.Board(TwoRanks(*lines))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "status", "text"),
    [
        ({}, "info", f"{SOFTWARE}, 1 host, 2 × H100"),
        ({"device": "A100"}, "fail", "A100 on rank 1; H100 on rank 0; choose GPUs of one kind by CUDA_VISIBLE"),
        ({"software": "torch 2.12"}, "fail", f"differ in software: torch 2.12 on rank 1; {SOFTWARE} on rank 0; inst"),
        ({"fault": f"{check._NO_BUILD} (gcc)"}, "fail", "rank 1: the kernel does not build (gcc); Triton needs a C"),
        ({"fault": "compute capability 7.5"}, "warn", "rank 1: compute capability 7.5; cuBLAS and operations of torch"),
    ],
)
def test_what_forbids_the_run_is_named_with_its_remedy(other: dict[str, str], status: str, text: str) -> None:
    board = board_of()
    assert check.describe(board, [GPU, replace(GPU, **other)]) == 1  # type: ignore[arg-type]
    line = board.lines[-1]
    assert line.status == status and text in line.text
    assert board.failed == (status == "fail")


def test_why_cuda_does_not_start_is_named(ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 10010)")

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA; install" in str(check.cuda_fault())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    done = ended(main, "--first-run")
    assert done.status == 2 and "The NVIDIA driver on your system is too old (found version 10010));" in done.err


# -- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (0.5, 0.7, "there; error 0.7 (limit 1)"),
        (0.5, 2.0, "there; error 2 (limit 1), on rank 1"),
        (0.5, math.nan, "there; error nan (limit 1), on rank 1"),
    ],
)
def test_the_worst_rank_decides(here: float, there: float, text: str) -> None:
    board = board_of(Line("x", "there", there, 1, "error"))
    board.judge("x", "1d 2", lambda: [Line("x", "here", here, 1, "error")])
    [line] = board.lines
    assert line.text == text and line.status == ("pass" if there < 1 else "fail")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 64])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_layouts_use_every_rank(name: str, world: int) -> None:
    for hosts in (1, 2, 4):
        layout = layout_of(name, world, hosts)
        if isinstance(layout, Layout):
            assert math.prod(extent for _, extent in layout.dims) == world
        else:
            assert layout.startswith("needs ")
