"""Process groups of dmuon's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import count

import torch.distributed as dist

from dmuon.comm.options import CommOptions
from dmuon.layout.ranks import GlobalRank
from dmuon.platform.streams import group_options
from dmuon.platform.torch_private import default_group_is_bound, group_names, new_named_group

__all__ = ["make_group", "ranks_of", "this_rank"]


def this_rank() -> GlobalRank:
    """The rank of this process; 0 of a process on its own."""
    return GlobalRank(dist.get_rank() if dist.is_initialized() else 0)


def ranks_of(group: dist.ProcessGroup | None) -> tuple[GlobalRank, ...]:
    """The ranks of ``group``, by position in it; of the default group for None."""
    return tuple(map(GlobalRank, dist.get_process_group_ranks(group)))


def make_group(
    device_type: str,
    partition: Sequence[Sequence[GlobalRank]],
    purpose: str,
    options: CommOptions,
    *,
    urgent: bool = False,
) -> dist.ProcessGroup:
    """This rank's process group out of ``partition``, of dmuon's own.

    Collective over the ranks of the group, and over no others, unless the default group is bound to a device: then
    all ranks have to make all groups, in one order.

    Args:
        partition: the ranks of each group, ascending; one of them holds this rank.
        urgent: on an accelerator its collectives run before others that wait.
    """
    rank = this_rank()
    pg_options = group_options(device_type, urgent, options.timeout)
    if not default_group_is_bound():
        ranks = next(list(ranks) for ranks in partition if rank in ranks)
        taken = group_names()
        number = next(i for i in count() if _group_name(purpose, ranks, i) not in taken)
        return new_named_group(
            ranks, _group_name(purpose, ranks, number), options.timeout, pg_options, f"dmuon_{purpose}"
        )
    own = None
    for members in partition:
        group = dist.new_group(
            list(members), timeout=options.timeout, pg_options=pg_options, group_desc=f"dmuon_{purpose}"
        )
        own = group if rank in members else own
    assert isinstance(own, dist.ProcessGroup)
    return own


def _group_name(purpose: str, ranks: Sequence[int], number: int) -> str:
    """The same on all of ``ranks``, however many groups each of them has: they have as many of these."""
    members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    return f"dmuon_{purpose}_{members}_{number}"
