"""Rounds of chaos end in bounded time, with right numbers or an error on every rank; the checker sees what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from programs.chaos import ERROR, FAILED, FAULTS, ROOMS, Round, draw, run

SEED = 13
KILL = Round(SEED, 0, "1d", "", "kill", victim=1, phase="step", step=3, calls=300, other="")


def test_a_round_follows_from_its_seed_and_number_alone() -> None:
    rounds = [draw(SEED, number) for number in range(500)]
    assert rounds == [draw(SEED, number) for number in range(500)]
    assert {r.fault for r in rounds} == {name for name, (weight, _) in FAULTS.items() if weight}
    assert {r.layout for r in rounds} == set(ROOMS)


@pytest.mark.slow
def test_planted_wrongs_are_found(tmp_path: Path) -> None:
    for fault, phase, why in (
        ("planted wrong number", "step", "is off by"),
        ("planted hang", "forward", "still runs"),
    ):
        verdict = run(replace(KILL, fault=fault, phase=phase), tmp_path, limit=15.0)
        assert verdict.outcome == FAILED and why in verdict.why, (verdict.why, verdict.log)


@pytest.mark.slow
@pytest.mark.pitfall("P23", "P49")
@pytest.mark.parametrize(("layout", "other"), [("1d", "1d-4"), ("1d-4", "1d"), ("fsdp2-4", "fsdp2-2")])
def test_a_killed_save_leaves_a_checkpoint_for_any_number_of_ranks(tmp_path: Path, layout: str, other: str) -> None:
    verdict = run(replace(KILL, layout=layout, other=other, phase="save"), tmp_path)
    assert verdict.outcome == ERROR, (verdict.why, verdict.log)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.pitfall("P23", "P48", "P49", "P71")
def test_rounds_end_as_they_should(tmp_path: Path) -> None:
    verdicts = [run(draw(SEED, number), tmp_path) for number in range(6)]
    failed = [f"{v.round}: {v.why}\n{v.log}" for v in verdicts if v.outcome == FAILED]
    assert not failed, "\n".join(failed)
