"""Ranks wait for the work of one, and hear of it when that is gone or does not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.heard import heard
from harness.jobs import run_ranks
from harness.network import loss_of
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS, batch, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.comm import agreement, monitor
from dmuon.planning import cost_lookup, owner_plan
from dmuon.platform.streams import HostCopy

SPARE = 15.0  # for a busy machine


def interrupted(rank: int, world: int, where: str, victim: int) -> None:
    """SIGINT on one rank, at one place of dedicate_params."""

    def interrupt(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    def soon() -> None:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    patch = pytest.MonkeyPatch()
    options: dict[str, Any] = {"costs": "flops"}
    solve = owner_plan.solve_plan

    def slowly(*args: Any) -> Any:
        time.sleep(2.0)
        return solve(*args)

    patch.setattr(owner_plan, "solve_plan", slowly if where == "waiting" else solve)
    if rank == victim:
        match where:
            case "select":
                options["select"] = interrupt
            case "planning":
                patch.setattr(owner_plan, "solve_plan", interrupt)
            case "waiting":
                find: Callable[..., Any] = cost_lookup.find_costs
                patch.setattr(cost_lookup, "find_costs", lambda *a, **k: (soon(), find(*a, **k))[1])
            case "placing":
                patch.setattr("dmuon.dedicated.dedicate.share_initial_values", interrupt)
    dmuon.dedicate_params(build(), init_device_mesh("cpu", (world,)), **options)
    raise AssertionError("no one was interrupted")


@pytest.mark.slow
@pytest.mark.pitfall("P71")
@pytest.mark.parametrize(("where", "victim"), [("select", 1), ("planning", 0), ("waiting", 1), ("placing", 1)])
def test_an_interrupt_of_dedicate_params_ends_every_rank_with_a_named_error(where: str, victim: int) -> None:
    ends = run_ranks(2, interrupted, where, victim, limit=60.0)
    assert ends[victim].text.rstrip().splitlines()[-1].startswith("KeyboardInterrupt"), ends[victim].text
    other = ends[1 - victim]
    last = [line for line in other.text.splitlines() if "CollectiveError: rank" in line]
    assert last and f"CollectiveError: rank {1 - victim}" in last[-1], other.text
    assert ends[0].code and ends[1].code
    assert other.seconds < SPARE + 10.0


@pytest.mark.parametrize(
    "alone",
    [
        "vote before step()",
        pytest.param("of torch.distributed, for network.py:", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_a_rank_that_waits_long_says_who_has_not_come(rank: int, world: int, alone: str) -> None:
    """Of a step or a forward that one rank takes alone, until the other comes; quick waits say nothing."""
    with heard() as said, pytest.MonkeyPatch.context() as patch:
        for name, value in (("_watcher", None), ("_SECONDS", 1.0), ("_POLL_SECONDS", 0.2)):
            patch.setattr(monitor, name, value)
        model, mesh = build(), init_device_mesh("cpu", (world,))
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, **OPTIONS)
        for step in range(2):
            if step == 1 and rank == 1 and "torch" in alone:
                time.sleep(2.5)
            loss_of(model, *batch(step)).backward()
            if step == 1 and rank == 1 and "torch" not in alone:
                time.sleep(2.5)
            optimizer.step()
    told = [line for line in said if "has waited for" in line]
    if rank == 0:
        assert len(told) == 1 and alone in told[0]
        assert "ranks 1 do not wait for it too: let every rank come there" in told[0]
    else:
        assert not told
    assert not [wait for wait in monitor._waits if "torch" not in wait.what]


@on_ranks(1)
def test_a_vote_is_waited_for_by_name_where_the_host_reads_it(rank: int, world: int) -> None:
    """On an accelerator that is where the host waits: the collective itself was queued, and returned at once."""
    waits: list[list[str]] = []

    def noted() -> list[str]:  # without what the thread that looks has seen of tests before this one
        return [wait.what for wait in monitor._waits if "torch" not in wait.what]

    class Read(HostCopy):
        def tolist(self) -> list[int]:
            waits.append(noted())
            return super().tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "HostCopy", Read)
        group = dist.group.WORLD
        agreement.Vote([1], group, monitor.Monitor(group, torch.device("cpu")), "vote on all").result()
    assert waits == [["vote on all"]] and not noted()
