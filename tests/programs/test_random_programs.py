"""Random programs equal their twins in one process; the driver notices one that does not."""

from __future__ import annotations

import pytest
from harness.pool import RankPool

from programs import random_programs
from programs.random_programs import CHUNK, SECONDS, play_all

pytestmark = pytest.mark.pitfall("P12", "P83", "P84", "P85", "P86", "P95")


def wrong(ranks: RankPool, seeds: range) -> list[str]:
    return ranks(2, play_all, list(seeds), timeout=60 + SECONDS * len(seeds), pg_timeout=40.0)[0]


def test_a_few_random_programs_equal_their_twins(ranks: RankPool) -> None:
    assert wrong(ranks, range(8)) == []


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("chunk", range(4))
def test_random_programs_equal_their_twins(ranks: RankPool, chunk: int) -> None:
    assert wrong(ranks, range(1000 + CHUNK * chunk, 1000 + CHUNK * (chunk + 1))) == []


def play_with_a_twin_that_missed_a_step(rank: int, world: int, seeds: list[int]) -> list[str]:
    twins = random_programs.Laid.__init__

    def init(self: random_programs.Laid, *args: object) -> None:
        twins(self, *args)  # type: ignore[arg-type]
        if self.layout == "alone":
            self.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]

    random_programs.Laid.__init__ = init  # type: ignore[method-assign,assignment]
    try:
        return play_all(rank, world, seeds)
    finally:
        random_programs.Laid.__init__ = twins  # type: ignore[method-assign]


def test_a_difference_is_noticed(ranks: RankPool) -> None:
    found = ranks(2, play_with_a_twin_that_missed_a_step, [0], timeout=60, pg_timeout=40.0)[0]
    assert len(found) == 1 and "AssertionError" in found[0]
