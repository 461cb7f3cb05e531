"""Ranks that hold matrices together, and the process group that connects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dmuon.comm.agreement import Verdict, Vote
from dmuon.comm.monitor import Monitor
from dmuon.comm.process_groups import make_group, this_rank
from dmuon.layout.ranks import GlobalRank, Position, position_in
from dmuon.platform.streams import Stream
from dmuon.platform.torch_private import default_group_is_bound, default_store


@dataclass(slots=True, eq=False)
class Domain:
    """Ranks that hold matrices together.

    Attributes:
        ranks: ascending.
        position: of this rank.
        group: of dmuon's own.
        lane: of the monitor's journal; None where it is that of more ranks than these.
    """

    ranks: tuple[GlobalRank, ...]
    position: Position
    device: torch.device
    group: dist.ProcessGroup
    monitor: Monitor
    lane: str | None = "exchange"
    _vote_stream: Stream | None = None

    @property
    def world(self) -> int:
        return len(self.ranks)

    def vote(self, vote: Vote) -> Verdict:
        """What all ranks say, which no rank's device has to compute first. Collective.

        Raises:
            CollectiveError: on all ranks, if they issued different collectives before.
        """
        if self._vote_stream is None:
            self._vote_stream = Stream(self.device, priority=-1)
        with self._vote_stream.alone(), self.monitor.watch("vote before step()"):
            numbers = vote.encode().to(self.device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
            verdict = Vote.decode(numbers.tolist())
        if not verdict.same_collectives:
            self.monitor.disagree()
        return verdict


def make_domain(ranks: Sequence[GlobalRank], device: torch.device, timeout: timedelta | None = None) -> Domain:
    """Connect ``ranks``. Collective over them, and over no others.

    Raises:
        ValueError: some of all ranks, and the default process group is bound to a device.
    """
    members = tuple(sorted(ranks))
    if default_group_is_bound() and len(members) < dist.get_world_size():
        raise ValueError(
            f"ranks {list(members)} hold matrices together, and the default process group was bound to a device, which "
            "makes creating groups collective over all ranks; leave device_id out of init_process_group"
        )
    group = make_group(device.type, [members], "exchange", timeout)
    rank = this_rank()
    monitor = Monitor(members, rank, default_store(), group.group_name, device=device)
    return Domain(members, position_in(members, rank), device, group, monitor)
