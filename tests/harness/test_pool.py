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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

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


def _pid_and_noise(rank: int, world: int) -> tuple[int, Tensor]:
    os.environ["DMUON_POOL_PROBE"] = "1"
    return os.getpid(), torch.randn(4)


def _probe(rank: int, world: int) -> str | None:
    return os.environ.get("DMUON_POOL_PROBE")


def _unpicklable(rank: int, world: int) -> object:
    return lambda: None


def _groups(rank: int, world: int) -> tuple[bool, bool, int, list[str], int]:
    """Whether default group and mesh are the last call's; keys of that call that the store shows; groups; a sum."""
    kept = globals().setdefault("_kept", [])
    store = dist.distributed_c10d._get_default_store()
    seen = store.check([f"note of {rank}"])
    store.set(f"note of {rank}", "of this call")
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("a", "b"))
    names = sorted(dist.distributed_c10d._world.pg_names.values())
    dist.new_group([0, 1])
    part = DTensor.from_local(torch.tensor([float(rank + 1)]), mesh["b"], [Partial()], run_check=False)
    total = int(part.full_tensor().item())
    kept.append((dist.group.WORLD, mesh))
    same = [kept[-1][i] is kept[-2][i] for i in range(2)] if len(kept) > 1 else [False, False]
    return same[0], same[1], seen, names, total


def test_a_call_finds_groups_and_meshes_of_the_last_one_and_nothing_else(fresh: RankPool) -> None:
    first = fresh(4, _groups)
    fresh(2, _sum_of_ranks, 1.0)  # another world in between
    second = fresh(4, _groups)
    with pytest.raises(RankFailure, match="did not raise KeyError"):
        fresh(4, _raise_everywhere, expect=KeyError)
    third, fourth = fresh(4, _groups), fresh(4, _groups, fresh=True)
    for of_rank in zip(first, second, third, fourth, strict=True):
        assert [kept for kept, *_ in of_rank] == [False, True, False, False], "renewed after an error and on demand"
        assert [kept for _, kept, *_ in of_rank] == [False, True, False, False]
        assert not any(seen for _, _, seen, *_ in of_rank), "keys in the store are a call's own"
        assert of_rank[0][3] == of_rank[1][3], "the same groups, and none of those that the call made"
        assert len({total for *_, total in of_rank}) == 1, "what DTensor kept reduces over the right group"


def test_workers_are_reused_seeded_alike_and_keep_no_environment(ranks: RankPool) -> None:
    first = ranks(2, _pid_and_noise)
    assert ranks(2, _probe) == [None, None]
    second = ranks(2, _pid_and_noise)
    assert [pid for pid, _ in first] == [pid for pid, _ in second] == ranks.pids()[:2]
    assert torch.equal(first[0][1], second[0][1]) and torch.equal(first[0][1], first[1][1])


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


def test_result_that_cannot_be_pickled_is_an_error_of_its_rank(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(1, _unpicklable)
    assert outcomes[0].error is not None and "pickle" in outcomes[0].message.lower()
    with pytest.raises(ValueError, match="1 to 4 ranks"):
        ranks(5, _sum_of_ranks, 1.0)
