"""``dmuon-check``: what it says about runs that hold and runs that do not, and its exit status."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.limits import PROGRAM_SECONDS

from dmuon.check.report import Board, Reading, Stopped
from dmuon.check.topologies import TOPOLOGIES, Grid, grid_of
from dmuon.cli.check import main

CHECKS = ["parity", "same bits", "clip", "accumulate", "placement", "memory", "collectives", "checkpoint"]


def torchrun(world: int, *arguments: str, program: tuple[str, ...] = ("-m", "dmuon.cli.check")) -> Any:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *launch, *program, "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS)


def lines_of(output: str) -> list[tuple[str, str, str]]:
    """Status, check and the rest of every line of the report."""
    kinds = ("pass", "fail", "skip", "warn", "info")
    return [(x[:6].strip(), x[6:19].strip(), x[19:]) for x in output.splitlines() if x.startswith(kinds)]


@pytest.mark.slow
def test_two_ranks_pass_and_say_what_was_checked(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = torchrun(2, "--quick", "--topologies", "1d,tp,hsdp", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(done.stdout)
    for grid in ("1d 2", "tp 1x2"):
        assert [check for status, check, rest in lines if status == "pass" and rest.startswith(grid)] == CHECKS
    assert next(rest for status, _, rest in lines if status == "skip").endswith(
        "needs an even number of at least 4 ranks, here are 2"
    )
    assert lines[0][:2] == ("info", "environment")
    report = json.loads(out.read_text())
    assert (report["exit_status"], report["world"]) == (0, 2)
    assert [(line["status"], line["check"]) for line in report["lines"]] == [line[:2] for line in lines]
    parity = next(line for line in report["lines"] if line["check"] == "parity")
    assert 0 < parity["value"] <= parity["limit"] == 1e-5


@pytest.mark.slow
def test_four_ranks_pass_on_every_topology_that_fits() -> None:
    done = torchrun(4, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {
        rest[:26].split()[0] for status, check, rest in lines_of(done.stdout) if (status, check) == ("pass", "parity")
    }
    assert passed == {"1d", "hsdp", "ddp", "cp", "tp", "fsdp2", "fsdp2-hsdp", "fsdp2-tp"}


@pytest.mark.slow
def test_a_limit_that_cannot_be_kept_fails_on_all_ranks_with_number_limit_and_rank() -> None:
    done = torchrun(2, "--quick", "--topologies", "ddp", "--limit", "0")
    assert done.returncode == 1
    failed = {check: rest for status, check, rest in lines_of(done.stdout) if status == "fail"}
    assert {"parity", "accumulate", "all"} <= failed.keys()
    assert re.search(r"\de-0[67] \(limit 0\), on rank \d", failed["parity"]), failed["parity"]
    assert "same bits" not in failed


FAULTY = """
import os, sys
import dmuon.check.run as run
from dmuon.cli.check import main

def faulty(original):
    def call(*args):
        if os.environ["RANK"] == "1":
            raise ArithmeticError("broken")
        return original(*args)
    return call

run.train_alone = faulty(run.train_alone) if {alone} else run.train_alone
run.Trial.accumulation = run.Trial.accumulation if {alone} else faulty(run.Trial.accumulation)
sys.exit(main())
"""


@pytest.mark.pitfall("P49")
@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=pytest.mark.slow) for where in ("reference", "accumulate")],
    ids=["alone", "in-collective"],
)
def test_a_fault_on_one_rank_ends_all(tmp_path: Path, where: str) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(alone=where == "reference"))
    done = torchrun(2, "--quick", "--topologies", "1d", "--timeout", "10", program=(str(script),))
    assert done.returncode == 1
    assert f"rank 1: {where}" in done.stderr and "ArithmeticError: broken" in done.stderr
    lines = lines_of(done.stdout)
    assert [check for status, check, _ in lines if status == "skip"] == ["all further"]
    assert [check for status, check, _ in lines if status == "fail"] == [where, "all"]


def test_one_process_checks_what_it_can_and_says_how_to_launch(
    ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    arguments = ["--device", "cpu", "--topologies", "1d,ddp", "--width", "32", "--tokens", "32", "--layers", "1"]
    done = ended(main, *arguments, "--dtype", "fp32", "--reshard")
    lines = lines_of(done.out)
    assert done.status == 0
    assert [check for status, check, rest in lines if status == "pass"] == [*CHECKS, "all"]
    assert "torchrun --nproc-per-node 8 --no-python dmuon-check" in done.out
    assert any(check == "speed" and " ms a step" in rest for _, check, rest in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topologies", "1d,ring"), "--topologies: 'ring' is not one of 1d, hsdp"),
        (("--topologies", ","), "--topologies: ',' is not one of"),
        (("--dtype", "fp8"), "--dtype: 'fp8' is not one of fp32, bf16"),
        (("--limit", "-1"), "'-1' is no number of at least 0"),
        (("--limit", "nan"), "'nan' is no number of at least 0"),
        (("--timeout", "0"), "'0' is no number of seconds from 1"),
        (("--timeout", "1e308"), "'1e308' is no number of seconds from 1"),
        (("--width", "0"), "'0' is no positive integer"),
        (("--quick", "--keep"), "--keep does not go with --quick"),
        (("--quick", "--tokens", "9"), "--tokens does not go with --quick"),
        (("--budget", "60"), "--budget goes with --first-run only"),
        (("--ranks", "2"), "--ranks goes with --first-run only"),
        (("--first-run", "--quick"), "--quick does not go with --first-run"),
        (("--first-run", "--topologies", "1d"), "--topologies does not go with --first-run"),
        (("--first-run", "--device", "cpu", "--json", "/absent/x.json"), "no such folder"),
        (("--first-run", "--budget", "0"), "'0' is no number of seconds from 1"),
        (("--timeout", "1e308"), "'1e308' is no number of seconds from 1"),
        (("--device", "tpu"), "invalid choice: 'tpu'"),
        (("--device", "cpu", "--json", "/absent/x.json"), "no such folder"),
    ],
)
def test_bad_options_are_named_before_anything_runs(
    arguments: tuple[str, ...], message: str, ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = ended(main, *arguments)
    assert done.status == 2 and message in done.err
    assert not lines_of(done.out)


def test_a_first_run_under_torchrun_is_refused(ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    done = ended(main, "--first-run", "--device", "cpu")
    assert done.status == 2 and "--first-run starts its own ranks; start it once, without torchrun" in done.err


class TwoRanks:
    """Rank 0 of two; the other one says what it is told: a fault or none, and its readings."""

    rank, world = 0, 2

    def __init__(self, fault: str | None, readings: list[Reading]) -> None:
        self._other = (fault, False, readings)

    def gather(self, item: Any) -> list[Any]:
        return [item, self._other]


def fault_here() -> list[Reading]:
    raise ValueError("rank 0 cannot")


@pytest.mark.parametrize(
    ("here", "there", "status", "rank"),
    [
        (Reading("x", "here", 0.5, 1, "error"), Reading("x", "there", 2.0, 1, "error"), "fail", 1),  # the worst decides
        (Reading("x", "here", 0.5, 1, "error"), Reading("x", "there", math.nan, 1, "error"), "fail", 1),
        # Ranks that must be alike.
        (Reading("x", "bits", 0, 0, same="a"), Reading("x", "bits", 0, 0, same="a"), "pass", 0),
        pytest.param(
            *(Reading("x", "bits", 0, 0, same=bits) for bits in "ab"), "fail", 1, marks=pytest.mark.pitfall("P11")
        ),
    ],
)
def test_a_line_is_judged_over_both_ranks(here: Reading, there: Reading, status: str, rank: int) -> None:
    board = Board(TwoRanks(None, [there]), seconds=10)  # type: ignore[arg-type]
    assert board.judge("x", "1d 2", lambda: [here])
    [line] = board.lines
    assert line.status == status and (line.status == "pass" or line.rank == rank)
    if not here.same:
        assert line.text == f"there; error {there.value:.2g} (limit 1), on rank 1"


def test_the_same_fault_on_all_ranks_fails_one_line_and_goes_on() -> None:
    board = Board(TwoRanks("ValueError: rank 1 cannot", []), seconds=10)  # type: ignore[arg-type]
    assert not board.judge("x", "1d 2", fault_here)
    assert (board.failed, board.lines[0].rank) == (1, 0)


def test_a_fault_on_some_ranks_only_stops() -> None:
    board = Board(TwoRanks("ValueError: there", []), seconds=10)  # type: ignore[arg-type]
    with pytest.raises(Stopped):
        board.judge("x", "1d 2", list)
    assert (board.failed, board.lines[0].rank) == (1, 1)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 64])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_grids_use_every_rank(name: str, world: int) -> None:
    for hosts in (1, 2, 4):
        grid = grid_of(name, world, hosts)
        if isinstance(grid, Grid):
            assert math.prod(extent for _, extent in grid.dims) == world
        else:
            assert grid.startswith("needs ")
