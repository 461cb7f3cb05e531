"""What one vote of all ranks tells each of them."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from harness.on_ranks import on_ranks

from dmuon.comm.agreement import Vote
from dmuon.comm.monitor import Monitor

CASES = 40


@on_ranks(3)
def test_the_maximum_of_all_votes_tells_what_all_ranks_said(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    monitor = Monitor(rank, group, torch.device("cpu"))
    for case in range(CASES):
        draw = random.Random(case)
        count = draw.randrange(4)
        flags = [[draw.randrange(2) for _ in range(count)] for _ in range(world)]
        changed = [draw.random() < 0.5 for _ in range(world)]
        faulty = [draw.choice([None, one]) for one in range(world)]
        result = Vote(flags[rank], group, monitor, "vote", changed=changed[rank], faulty=faulty[rank]).result()
        assert result.flags == tuple(map(max, zip(*flags, strict=True)))
        assert result.same_change == (len(set(changed)) == 1)
        assert result.faulty == max((one for one in faulty if one is not None), default=None)
