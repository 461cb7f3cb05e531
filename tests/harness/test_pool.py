"""The rank pool itself: results, errors, hangs, deaths, reuse."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.pool import RankFailure, RankPool

pytestmark = pytest.mark.ranks  # beside which no other pool may run


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """A pool of its own, for tests that end workers."""
    pool = RankPool()
    yield pool
    pool.close()


def _sum_of_ranks(rank: int, world: int, scale: float) -> Tensor:
    assert dist.get_rank() == rank and dist.get_world_size() == world
    x = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(x)
    return x


def _raise_on(rank: int, world: int, failing: int) -> None:
    print(f"output of rank {rank}")
    if rank == failing:
        raise ValueError(f"bad rank {rank}")
    dist.barrier()


def _raise_everywhere(rank: int, world: int) -> None:
    dist.barrier()
    raise LookupError(f"named error on rank {rank}")


def _hang_on(rank: int, world: int, hanging: int) -> None:
    if rank == hanging:
        time.sleep(100)


def _die_on(rank: int, world: int, dying: int, how: str) -> None:
    if rank == dying:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_error_names_the_rank_and_ends_those_that_wait_for_it(fresh: RankPool) -> None:
    start = time.monotonic()
    fresh(2, _sum_of_ranks, 1.0)
    with pytest.raises(RankFailure, match="rank 1 raised first") as caught:
        fresh(2, _raise_on, 1)
    assert time.monotonic() - start < 60, "waited for the time limit although a rank had failed"
    message = str(caught.value)
    assert "ValueError: bad rank 1" in message and "in _raise_on" in message
    assert "output of rank 1" in message and "barrier" in message
    assert torch.equal(fresh(2, _sum_of_ranks, 1.0)[0], torch.full((3,), 3.0))


def test_expect_fails_where_a_rank_raises_something_else_or_nothing(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] did not raise KeyError"):
        ranks(2, _raise_everywhere, expect=KeyError)
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] did not raise ValueError"):
        ranks(2, _sum_of_ranks, 1.0, expect=ValueError)


def test_hang_fails_within_its_timeout_and_shows_stacks(fresh: RankPool) -> None:
    fresh(2, _sum_of_ranks, 1.0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 hung for 3 s first") as caught:
        fresh(2, _hang_on, 1, timeout=3)
    assert 3 <= time.monotonic() - start < 15
    assert "in _hang_on" in str(caught.value), "no stack of the hanging function"


@pytest.mark.parametrize(("how", "code"), [("exit", 7), pytest.param("kill", -9, marks=pytest.mark.slow)])
def test_death_is_reported_and_the_pool_recovers(fresh: RankPool, how: str, code: int) -> None:
    outcomes = fresh.outcomes(2, _die_on, 0, how, pg_timeout=10)
    assert outcomes[0].error == "WorkerDied" and f"exit code {code}" in outcomes[0].message
    assert not outcomes[1].ok
    assert torch.equal(fresh(2, _sum_of_ranks, 1.0)[1], torch.full((3,), 3.0))
