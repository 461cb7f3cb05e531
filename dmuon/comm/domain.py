"""Ranks that hold matrices together, and the process group that connects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dmuon.comm.monitor import Monitor
from dmuon.comm.options import CommOptions
from dmuon.comm.process_groups import make_group
from dmuon.platform.streams import Stream
from dmuon.platform.torch_private import default_group_is_bound, default_store

__all__ = ["Domain", "make_domain"]


@dataclass(slots=True, eq=False)
class Domain:
    """Ranks that hold matrices together.

    Attributes:
        ranks: global, ascending.
        rank: position of this process.
        group: of dmuon's own.
        chunks: ``(small side, large side)`` to matrices per batch, as planned.
        lane: of the monitor's journal; None where it is that of more ranks than these.
        variants: ``(small side, large side)`` to batch size to how Newton–Schulz runs, as planned.
    """

    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    group: dist.ProcessGroup
    monitor: Monitor
    chunks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    variants: Mapping[tuple[int, int], Mapping[int, str]] = field(default_factory=dict)
    lane: str | None = "exchange"
    _vote_stream: Stream | None = None

    @property
    def world(self) -> int:
        return len(self.ranks)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum over the ranks, of numbers that no rank's device has to compute first. Collective."""
        if self._vote_stream is None:
            self._vote_stream = Stream(self.device, priority=-1)
        with self._vote_stream.alone(), self.monitor.watch("vote before step()"):
            votes = torch.tensor(values, dtype=torch.int64, device=self.device)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
            found: list[int] = votes.tolist()
        return found


def make_domain(ranks: Sequence[int], device: torch.device, options: CommOptions | None = None) -> Domain:
    """Connect ``ranks``. Collective over them, and over no others.

    Raises:
        ValueError: some of all ranks, and the default process group is bound to a device.
    """
    options = options or CommOptions()
    members = tuple(sorted(ranks))
    if default_group_is_bound() and len(members) < dist.get_world_size():
        raise ValueError(
            f"ranks {list(members)} hold matrices together, and the default process group was bound to a device, which "
            "makes creating groups collective over all ranks; leave device_id out of init_process_group"
        )
    group = make_group(device.type, [members], "exchange", options)
    rank = dist.get_rank()
    monitor = Monitor(
        members, rank, default_store(), group.group_name, device=device, asynchronous=options.asynchronous
    )
    return Domain(members, members.index(rank), device, group, monitor)
