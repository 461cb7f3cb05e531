"""``dmuon-check``: what it says about runs that hold and runs that do not, and its exit status."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.commands import command
from harness.jobs import Ended, run_file
from harness.limits import PROGRAM_SECONDS

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
    if checks == "all further":
        assert "rank 1: training 1d 2 reshard fp32: ArithmeticError: planted" in said
        assert sum(name == "training" for _, name, _ in lines) == 1, "it ends"


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
        (("--timeout", "1e308"), "'1e308' is no number of seconds from 1"),
        (("--first-run", "--device", "cpu", "--json", "/absent/x.json"), "no such folder"),
    ],
)
def test_bad_options_are_named_before_anything_runs(
    arguments: tuple[str, ...], message: str, ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = ended(main, *arguments)
    assert done.status == 2 and message in done.err
    assert not lines_of(done.out)
