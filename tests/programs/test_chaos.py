"""Rounds of chaos end in bounded time, with right numbers or an error on every rank; the checker sees what is wrong."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.topologies import LAYOUTS

from programs.chaos import Chaos, table
from programs.chaos_jobs import LIMIT, Ended, RankEnd
from programs.chaos_rounds import FAULTS, ROOMS, Round, draw, part_of, steps_of
from programs.chaos_verdict import FAILED, GLOO, GLOOS, NAMED, RIGHT, TORCHS, UNNAMED, expected, judge

SEED = 13


def test_a_round_follows_from_its_seed_and_number_alone() -> None:
    rounds = [draw(SEED, number) for number in range(500)]
    assert rounds == [draw(SEED, number) for number in range(500)]
    assert rounds[7:9] == [draw(SEED, 7), draw(SEED, 8)] != [draw(SEED + 1, 7), draw(SEED + 1, 8)]
    assert {r.fault for r in rounds} == {name for name, kind in FAULTS.items() if kind.weight}
    assert {r.layout for r in rounds} == set(ROOMS)
    for r in rounds:
        assert r.victim < r.world and r.step in steps_of(r.phase) and r.phase in r.kind.phases
        assert not r.other or LAYOUTS[r.other].world != r.world
        assert replace(draw(SEED, r.number, r.fault)) == r


def test_parts_of_a_batch_are_those_of_the_layout() -> None:
    assert [part_of("hsdp", rank) for rank in range(4)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [part_of("tp-fsdp", rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [part_of("tp-alone", rank) for rank in range(2)] == [(0, 1), (0, 1)]


# -- the checker ------------------------------------------------------------------------------------------------------

KILL = replace(draw(SEED, 0, "kill"), layout="1d", variant="", victim=1, phase="step", step=2)
PAUSE = replace(KILL, fault="pause", detail="short")
OTHER_ORDER = replace(draw(SEED, 0, "other order"), layout="1d", variant="", victim=1, step=2)


def said(digest: str | None = "a" * 64, **error: Any) -> str:
    """What a rank prints that comes to its end, or that raises."""
    losses = expected().losses
    lines = [f"LOSS {step} {losses[(step, 0, 2)]!r}" for step in range(4)]
    lines.append(f"EVALUATION {losses[(-1, 0, 2)]!r}")
    if error:
        end = {"message": "it says", "through_dmuon": True, "from_dmuon": False, **error}
        return "\n".join([*lines[:2], "[rank0]: END " + json.dumps(end)]) + "\n"
    return "\n".join([*lines, f"DIGEST {digest}"]) + "\n"


def other_part(text: str) -> str:
    losses = expected().losses
    for step in (-1, 0, 1, 2, 3):
        text = text.replace(repr(losses[(step, 0, 2)]), repr(losses[(step, 1, 2)]))
    return text


GOOD = [RankEnd(0, "", 1.0), RankEnd(0, "", 1.0)]
KILLED = RankEnd(-signal.SIGKILL, "", 0.0)
NAME = {"kind": "CollectiveError", "from_dmuon": True}


def ended(first: RankEnd, second: RankEnd, **more: Any) -> Ended:
    return Ended([first, second], **{"faults": {1: 1.0}, **more})


def cases() -> Iterator[Any]:
    fine, error = said(), said(**NAME)
    right = RankEnd(0, fine, 1.0)
    peer = RankEnd(0, other_part(fine), 1.0)
    named = RankEnd(1, error, 2.0)
    step_2 = repr(expected().losses[(2, 0, 2)])
    wrong = replace(right, text=fine.replace(step_2, "2.5"))
    wrong_before = replace(named, text=error.replace(repr(expected().losses[(1, 0, 2)]), "2.5"))
    torchs = {"kind": "RuntimeError", "through_dmuon": False}
    yield "pause, right", PAUSE, ended(right, peer), (RIGHT, "")
    yield "kill, named", KILL, ended(named, KILLED), (NAMED, "")
    yield "torch's own", KILL, ended(RankEnd(1, said(**torchs), 2.0), KILLED), (TORCHS, "")
    yield "no name", KILL, ended(RankEnd(1, said(kind="RuntimeError"), 2.0), KILLED), (UNNAMED, "it says")
    yield "wrong loss", PAUSE, ended(wrong, peer), (FAILED, "loss of step 2 is 2.5")
    yield "wrong loss before an error", KILL, ended(wrong_before, KILLED), (FAILED, "loss of step 1 is 2.5")
    yield "other bits", PAUSE, ended(replace(right, text=said("b" * 64)), peer), (FAILED, "different weights")
    both = ended(replace(right, text=said("b" * 64)), replace(peer, text=other_part(said("b" * 64))))
    yield "not the bits", PAUSE, both, (FAILED, "not the bits")
    yield "hang", KILL, ended(replace(named, hung=True), KILLED), (FAILED, "still runs")
    yield "late", KILL, ended(replace(named, after=LIMIT + 1), KILLED), (FAILED, "after the fault")
    yield "abort", KILL, ended(RankEnd(-signal.SIGABRT, error, 2.0), KILLED), (FAILED, "exit status -6")
    yield "segfault", KILL, ended(RankEnd(-signal.SIGSEGV, error, 2.0), KILLED), (FAILED, "exit status -11")
    yield "silent", KILL, ended(RankEnd(1, "", 2.0), KILLED), (FAILED, "exit status 1")
    yield "ends early", KILL, ended(RankEnd(0, "", 2.0), KILLED), (FAILED, "exit status 0")
    yield "left", KILL, ended(named, KILLED, left=["77 cbc"]), (FAILED, "processes are left")
    yield "no fault", KILL, ended(right, peer, faults={}), (FAILED, "never came")
    yield "not killed", KILL, ended(named, named), (FAILED, "was to be killed")
    aborted = RankEnd(-signal.SIGABRT, f"Received data size doesn't match expected size. {GLOO}", 0.0)
    yield "gloo aborts both", OTHER_ORDER, ended(aborted, aborted), (GLOOS, "")
    silent = ended(aborted, replace(aborted, text=""))
    yield "one of them without a word", OTHER_ORDER, silent, (FAILED, "exit status -6")
    yield "gloo aborts all without a reason", KILL, ended(aborted, KILLED), (FAILED, "nobody has a message")
    yield "harm", PAUSE, ended(named, replace(named, text=said(**NAME))), (FAILED, "shorter than the timeout")


@pytest.mark.parametrize("number", range(21))
def test_the_checker_tells_right_from_wrong(tmp_path: Path, number: int) -> None:
    all_cases = list(cases())
    assert len(all_cases) == 21
    name, round_, job, (outcome, why) = all_cases[number]
    torch.save(expected().weights, tmp_path / "weights.pt")
    found = judge(round_, job, tmp_path, "a" * 64)
    assert found[0] == outcome and why in found[1], (name, found)


def test_wrong_weights_are_found(tmp_path: Path) -> None:
    weights = {name: t.clone() for name, t in expected().weights.items()}
    weights["blocks.1.up.weight"][3, 4] *= 1.01
    torch.save(weights, tmp_path / "weights.pt")
    job = ended(RankEnd(0, said(), 1.0), RankEnd(0, other_part(said()), 1.0))
    outcome, why = judge(PAUSE, job, tmp_path, "a" * 64)
    assert outcome == FAILED and "blocks.1.up.weight is off by" in why


# -- whole rounds -----------------------------------------------------------------------------------------------------


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    chaos = Chaos(tmp_path)
    yield chaos
    chaos.forks.close()


def tear(_round: Round, folder: Path) -> None:
    """One byte of a piece of the first checkpoint is another."""
    piece = sorted((folder / "checkpoints" / "step-2").glob("*.distcp"))[0]
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.write_bytes(bytes(data))


@pytest.mark.slow
def test_planted_wrongs_are_found_in_whole_rounds(chaos: Chaos) -> None:
    for fault, phase, why in (
        ("planted wrong number", "step", "is off by"),
        ("planted hang", "forward", "still runs"),
    ):
        chaos.limit = 15.0
        verdict = chaos.run(replace(KILL, number=len(fault), fault=fault, phase=phase, step=3))
        assert verdict.outcome == FAILED and why in verdict.why, (verdict.why, verdict.log)
    chaos.tamper = tear
    verdict = chaos.run(replace(KILL, number=1, step=3))
    assert verdict.outcome == FAILED and verdict.why == "step-2 was whole, and is another", (verdict.why, verdict.log)


@pytest.mark.slow
@pytest.mark.pitfall("P23", "P49")
@pytest.mark.parametrize(("layout", "other"), [("1d", "1d-1"), ("1d", "1d-4"), ("1d-4", "1d"), ("fsdp2-4", "fsdp2-2")])
def test_a_killed_save_leaves_a_checkpoint_for_any_number_of_ranks(chaos: Chaos, layout: str, other: str) -> None:
    """It resumes bitwise on as many ranks, and with one process's numbers on others."""
    round_ = replace(KILL, layout=layout, other=other, phase="save", step=3, moment=0.6)
    verdict = chaos.run(round_)
    assert verdict.outcome in (NAMED, TORCHS), (verdict.why, verdict.log)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.pitfall("P23", "P48", "P49", "P71")
def test_rounds_end_as_they_should(chaos: Chaos) -> None:
    verdicts = [chaos.run(draw(SEED, number)) for number in range(8)]
    print(table(verdicts))
    failed = [f"{v.round.command()}: {v.round}: {v.why}\n{v.log}" for v in verdicts if v.outcome == FAILED]
    assert not failed, "\n".join(failed)
