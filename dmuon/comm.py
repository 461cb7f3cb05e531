"""The ranks that share one model, dmuon's own process groups over them, and the exchange that precedes any data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon.device import CommStreams, mesh_device

__all__ = ["Comm", "agree", "make_comm"]


@dataclass(frozen=True, slots=True)
class Comm:
    """What a block needs to communicate. Groups are dmuon's own, so that a user's collectives cannot interleave.

    Attributes:
        mesh: the 1-D mesh.
        ranks: global rank of each mesh coordinate.
        rank: this process's coordinate on the mesh.
        fill_group: broadcasts of weights from their owners.
        reduce_group: reductions of gradients to their owners, and control messages.
        average_group: all-reduces of gradients that nobody shards.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    streams: CommStreams
    fill_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    average_group: dist.ProcessGroup

    @property
    def world(self) -> int:
        return len(self.ranks)


def make_comm(mesh: DeviceMesh) -> Comm:
    """Create dmuon's process groups over a 1-D ``mesh``. Collective over its ranks, and over no others."""
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    device = mesh_device(mesh.device_type)
    fill, reduce, average = (
        dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"dmuon_{purpose}")
        for purpose in ("fill", "reduce", "average")
    )
    return Comm(
        mesh=mesh,
        ranks=ranks,
        rank=ranks.index(dist.get_rank()),
        device=device,
        streams=CommStreams(device),
        fill_group=fill,
        reduce_group=reduce,
        average_group=average,
    )


def agree(group: dist.ProcessGroup, error: Exception | str | None, payload: Any = None) -> list[Any]:
    """Exchange one status per rank, so that a fault on one rank ends all of them before any data moves.

    Args:
        error: what is wrong on this rank, or None. An exception is raised here as it is, so that its type and its
            traceback survive.
        payload: any picklable object.

    Returns:
        Every rank's payload, in rank order.

    Raises:
        ValueError: on every rank when any of them reported an error; names the rank.
    """
    said = error
    if isinstance(error, Exception):
        said = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
    statuses: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(statuses, (said, payload), group=group)
    faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(statuses) if fault is not None]
    if isinstance(error, Exception):
        raise error
    if faults:
        raise ValueError(said if said is not None and len(faults) == len(statuses) else "; ".join(faults))
    return [status[1] for status in statuses]
