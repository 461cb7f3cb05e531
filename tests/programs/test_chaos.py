"""Rounds of chaos end in bounded time, with right numbers or an error on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from programs.chaos import Round, draw, run

SEED = 13


@pytest.mark.slow
@pytest.mark.pitfall("P23", "P49")
def test_a_killed_save_leaves_a_checkpoint_for_another_layout(tmp_path: Path) -> None:
    assert not run(Round(0, "1d", "", "kill", victim=1, phase="save", step=2, calls=300, other="fsdp2-3"), tmp_path)


@pytest.mark.slow
@pytest.mark.pitfall("P23", "P48", "P49", "P71")
@pytest.mark.parametrize("number", range(5))
def test_a_round_ends_as_it_should(tmp_path: Path, number: int) -> None:
    run(draw(SEED, number), tmp_path)
