"""Random programs equal their twins in one process."""

from __future__ import annotations

import pytest
from harness.pool import RankPool

from programs.random_programs import CHUNK, SECONDS, play_all

pytestmark = pytest.mark.pitfall("P12", "P83", "P85", "P86", "P95")


def wrong(ranks: RankPool, seeds: range) -> list[str]:
    return ranks(2, play_all, list(seeds), timeout=60 + SECONDS * len(seeds))[0]


def test_a_few_random_programs_equal_their_twins(ranks: RankPool) -> None:
    assert wrong(ranks, range(6)) == []


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("chunk", range(2))
def test_random_programs_equal_their_twins(ranks: RankPool, chunk: int) -> None:
    assert wrong(ranks, range(1000 + CHUNK * chunk, 1000 + CHUNK * (chunk + 1))) == []
