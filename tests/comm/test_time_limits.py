"""dmuon's own process groups wait as long as the user has said."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness.on_ranks import on_ranks
from harness.pool import COLLECTIVE_SECONDS
from harness.topologies import lay
from harness.toy import build

import dmuon
from dmuon.comm.domain import make_domain
from dmuon.comm.monitor import CollectiveError
from dmuon.dedicated.dedication import dedications

CPU = torch.device("cpu")


def limit_of(group: dist.ProcessGroup) -> float:
    return group._get_backend(CPU).options._timeout.total_seconds()


@on_ranks(2)
def test_groups_have_the_limit_of_the_default_group_unless_told(rank: int, world: int) -> None:
    for timeout, seconds in ((None, COLLECTIVE_SECONDS), (timedelta(seconds=7), 7.0)):
        comm = dedications(lay("1d", build(), comm=dmuon.CommOptions(timeout=timeout)).model)[0].runtime.comm
        assert comm.row is not None
        assert {limit_of(g) for g in (comm.control, comm.average_group, comm.row.weights)} == {seconds}
        assert limit_of(make_domain(range(world), CPU, timeout).group) == seconds


@on_ranks(2)
def test_a_first_use_that_fails_is_named(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CollectiveError, match=r"first use of .* ranks \[0, 1\]"):
        patch.setattr(dist, "all_to_all_single", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no link")))
        make_domain(range(world), CPU)
