"""The ranks that share one model, dmuon's own process groups over them, and the exchange that precedes any data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon._torch import backend_of, default_group_is_bound, default_store, group_names, new_named_group
from dmuon.comm_options import CommOptions
from dmuon.device import CommStreams, group_options, mesh_device
from dmuon.monitor import CollectiveError, Monitor, first_line
from dmuon.topology import Coordinate, Topology
from dmuon.transport import Lane

__all__ = ["Comm", "agree", "make_comm", "make_group", "require_same"]


@dataclass(frozen=True, slots=True)
class Comm:
    """What blocks need to communicate. Groups are dmuon's own, so that a user's collectives cannot interleave.

    Attributes:
        mesh: the data-parallel mesh.
        tensor_mesh: with tensor parallelism, its dimension behind those of ``mesh``; otherwise ``mesh``.
        flat_mesh: the ranks of ``mesh`` as one dimension, ascending; what state dicts are laid out on.
        flat_tensor_mesh: with tensor parallelism, its dimension behind that; otherwise ``flat_mesh``.
        ranks: global ranks of this tensor-parallel rank's mesh, ascending.
        rank: this process's position among them.
        at: its coordinate.
        row: the ranks over which weights are sharded; None if they are not.
        column: those that hold the same shard in every replica; None with one replica.
        group: over ``ranks``: averages of what nobody shards, and whatever blocks.
        average_group: over ``ranks``: all-reduces of gradients that nobody shards.
        control: over all ranks of the topology, tensor parallelism included.
        tensor: over the tensor-parallel ranks at this coordinate; None without.
    """

    mesh: DeviceMesh
    tensor_mesh: DeviceMesh
    flat_mesh: DeviceMesh
    flat_tensor_mesh: DeviceMesh
    topology: Topology
    ranks: tuple[int, ...]
    rank: int
    at: Coordinate
    device: torch.device
    streams: CommStreams
    options: CommOptions
    monitor: Monitor
    row: Lane | None
    column: Lane | None
    group: dist.ProcessGroup
    average_group: dist.ProcessGroup
    control: dist.ProcessGroup
    tensor: dist.ProcessGroup | None

    @property
    def world(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.ranks)

    @property
    def backend(self) -> str:
        """Name of the back end that moves tensors of this device."""
        return backend_of(self.group, self.device)

    def coordinate(self, owner: int) -> Coordinate:
        """Of a position among the data-parallel ranks."""
        return self.topology.of(self.ranks[owner])


def make_group(
    device_type: str, partition: Sequence[Sequence[int]], purpose: str, options: CommOptions, *, urgent: bool = False
) -> dist.ProcessGroup:
    """This rank's process group out of ``partition``, of dmuon's own.

    Collective over the ranks of the group, and over no others, unless the default group is bound to a device: then
    all ranks have to make all groups, in one order.

    Args:
        partition: global ranks of each group, ascending; one of them holds this rank.
        urgent: on an accelerator its collectives run before others that wait.
    """
    pg_options = group_options(device_type, urgent, options.timeout)
    if not default_group_is_bound():
        ranks = next(list(ranks) for ranks in partition if dist.get_rank() in ranks)
        taken = group_names()
        number = next(i for i in count() if _group_name(purpose, ranks, i) not in taken)
        return new_named_group(
            ranks, _group_name(purpose, ranks, number), options.timeout, pg_options, f"dmuon_{purpose}"
        )
    mine = None
    for members in partition:
        group = dist.new_group(
            list(members), timeout=options.timeout, pg_options=pg_options, group_desc=f"dmuon_{purpose}"
        )
        mine = group if dist.get_rank() in members else mine
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _group_name(purpose: str, ranks: Sequence[int], number: int) -> str:
    """The same on all of ``ranks``, however many groups each of them has: they have as many of these."""
    members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    return f"dmuon_{purpose}_{members}_{number}"


def make_comm(
    mesh: DeviceMesh,
    topology: Topology,
    group: dist.ProcessGroup,
    options: CommOptions,
    tensor_mesh: DeviceMesh | None,
) -> Comm:
    """Create dmuon's process groups. Collective over all ranks of ``topology``, and over no others.

    Args:
        group: over the data-parallel ranks of this process.
        tensor_mesh: of tensor parallelism, 1-D.
    """
    device = mesh_device(mesh.device_type)
    rank = dist.get_rank()
    at = topology.of(rank)
    ranks = topology.data_parallel(at.t)
    control, tensor = group, None
    if topology.tensor > 1:
        control = make_group(device.type, [topology.ranks], "control", options)
        tensor = make_group(device.type, topology.partition("t"), "tensor", options)
    flat = mesh
    if mesh.ndim > 1:
        flat = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("dmuon",))
    return Comm(
        mesh=mesh,
        tensor_mesh=_with_dimension(mesh, tensor_mesh, topology),
        flat_mesh=flat,
        flat_tensor_mesh=_with_dimension(flat, tensor_mesh, topology),
        topology=topology,
        ranks=ranks,
        rank=ranks.index(rank),
        at=at,
        device=device,
        streams=CommStreams(device),
        options=options,
        monitor=Monitor(
            topology.ranks, rank, default_store(), control.group_name, device=device, asynchronous=options.asynchronous
        ),
        row=_lane(device.type, topology, "s", rank, options),
        column=_lane(device.type, topology, "r", rank, options),
        group=group,
        average_group=make_group(device.type, topology.partition("rs"), "average", options),
        control=control,
        tensor=tensor,
    )


def _with_dimension(mesh: DeviceMesh, tensor_mesh: DeviceMesh | None, topology: Topology) -> DeviceMesh:
    """``mesh`` with the dimension of tensor parallelism behind its own."""
    if tensor_mesh is None:
        return mesh
    where = [topology.of(rank) for rank in mesh.mesh.flatten().tolist()]
    ranks = torch.tensor([[topology.rank_at(at.r, at.s, t) for t in range(topology.tensor)] for at in where])
    names = mesh.mesh_dim_names or tuple(f"dmuon_{i}" for i in range(mesh.ndim))
    return DeviceMesh.from_group(
        [mesh.get_group(dim) for dim in range(mesh.ndim)] + [tensor_mesh.get_group()],
        mesh.device_type,
        mesh=ranks.view(*mesh.mesh.shape, topology.tensor),
        mesh_dim_names=(*names, *(tensor_mesh.mesh_dim_names or ("dmuon_tensor",))),
    )


def _lane(
    device_type: str, topology: Topology, along: Literal["r", "s"], rank: int, options: CommOptions
) -> Lane | None:
    partition = topology.partition(along)
    ranks = next(group for group in partition if rank in group)
    if len(ranks) == 1:
        return None
    by_rank = [sorted(group) for group in partition]
    return Lane(
        ranks,
        ranks.index(rank),
        make_group(device_type, by_rank, f"weights_along_{along}", options, urgent=True),
        make_group(device_type, by_rank, f"gradients_along_{along}", options),
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
        CollectiveError: the exchange failed.
    """
    said = error
    if isinstance(error, Exception):
        said = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
    statuses: list[Any] = [None] * dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    try:
        dist.all_gather_object(statuses, (said, payload), group=group)
    except RuntimeError as fault:
        raise CollectiveError(
            f"rank {dist.get_rank()}: the exchange of what ranks {ranks} were given failed: "
            f"{first_line(fault)}. A rank was killed, raised elsewhere, or is late: see the logs of "
            f"the others{f'. This rank would have reported: {said}' if said is not None else ''}"
        ) from fault
    faults = [f"rank {rank}: {fault}" for rank, (fault, _) in zip(ranks, statuses, strict=True) if fault is not None]
    if isinstance(error, Exception):
        raise error
    if faults:
        raise ValueError(said if said is not None and len(faults) == len(statuses) else "; ".join(faults))
    return [status[1] for status in statuses]


_Here = TypeVar("_Here")


def require_same(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    error: Exception | None,
    description: list[tuple[str, str]],
    here: _Here | None,
) -> list[_Here]:
    """Raise on every rank unless all have the same description and no error; what every rank says of itself."""
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    found = agree(group, error, (digest, here))
    if len({theirs for theirs, _ in found}) == 1:
        return [there for _, there in found]
    descriptions = agree(group, None, description)
    first = dict(descriptions[0])
    for rank, items in zip(ranks, descriptions, strict=True):
        theirs = dict(items)
        name = next((n for n in [*first, *theirs] if first.get(n) != theirs.get(n)), None)
        if name is not None:
            raise ValueError(
                f"{name} is {theirs.get(name, 'absent')} on rank {rank} and {first.get(name, 'absent')} on rank "
                f"{ranks[0]}; build the same model with the same options on every rank"
            )
    raise ValueError("the parameters come in another order on some ranks; build the same model on every rank")
