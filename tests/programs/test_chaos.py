"""Rounds of chaos end in bounded time, with right numbers or an error on every rank; the checker sees what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from programs.chaos import ERROR, FAILED, FAULTS, ROOMS, Chaos, draw

SEED = 13
KILL = replace(draw(SEED, 0, "kill"), layout="1d", variant="", other="", victim=1, phase="step", step=3, calls=300)


def test_a_round_follows_from_its_seed_and_number_alone() -> None:
    rounds = [draw(SEED, number) for number in range(500)]
    assert rounds == [draw(SEED, number) for number in range(500)]
    assert {r.fault for r in rounds} == {name for name, kind in FAULTS.items() if kind.weight}
    assert {r.layout for r in rounds} == set(ROOMS)


def flip(folder: Path) -> None:
    """One byte of a piece of the first checkpoint is another."""
    piece = sorted((folder / "checkpoints" / "step-2").glob("*.distcp"))[0]
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.write_bytes(bytes(data))


@pytest.mark.slow
def test_planted_wrongs_are_found(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, limit=15.0)
    for fault, phase, why in (
        ("planted wrong number", "step", "is off by"),
        ("planted hang", "forward", "still runs"),
    ):
        verdict = chaos.run(replace(KILL, fault=fault, phase=phase))
        assert verdict.outcome == FAILED and why in verdict.why, (verdict.why, verdict.log)
    verdict = Chaos(tmp_path, tamper=flip).run(KILL)
    assert verdict.outcome == FAILED and verdict.why == "step-2 was whole, and is another", (verdict.why, verdict.log)


@pytest.mark.slow
@pytest.mark.pitfall("P23", "P49")
@pytest.mark.parametrize(("layout", "other"), [("1d", "1d-4"), ("1d-4", "1d"), ("fsdp2-4", "fsdp2-2")])
def test_a_killed_save_leaves_a_checkpoint_for_any_number_of_ranks(tmp_path: Path, layout: str, other: str) -> None:
    verdict = Chaos(tmp_path).run(replace(KILL, layout=layout, other=other, phase="save"))
    assert verdict.outcome == ERROR, (verdict.why, verdict.log)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.pitfall("P23", "P48", "P49", "P71")
def test_rounds_end_as_they_should(tmp_path: Path) -> None:
    verdicts = [Chaos(tmp_path).run(draw(SEED, number)) for number in range(6)]
    failed = [f"{v.round}: {v.why}\n{v.log}" for v in verdicts if v.outcome == FAILED]
    assert not failed, "\n".join(failed)
