"""The ranks that share one model, process groups over them, and what blocks gather and reduce over these."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon.comm.domain import Domain
from dmuon.comm.monitor import Line, Monitor
from dmuon.comm.process_groups import connect, make_group, this_rank
from dmuon.layout.buffer import Transport
from dmuon.layout.topology import Position, Ranks, Topology, position_in
from dmuon.platform.options import check_choice, check_flag, check_integer
from dmuon.platform.streams import Stream, mesh_device

_REMOVED = {  # options, and what to do instead
    "outstanding_reductions": "gradients of two blocks travel at once; leave it out",
    "hierarchical": "shard within a node and replicate across nodes instead: dedicate over "
    "init_device_mesh(device, (nodes, ranks_per_node), mesh_dim_names=('replicate', 'shard'))",
    "max_ctas": "to bound the multiprocessors that a collective may occupy, set NCCL's own environment variable "
    "NCCL_MAX_CTAS",
}


@dataclass(frozen=True, slots=True)
class Lanes:
    """A line of the topology for weights and one for gradients, so that neither waits for the other."""

    weights: Line
    gradients: Line


@dataclass(frozen=True, slots=True)
class CommOptions:
    """Transport and overlap of the owned matrices.

    Attributes:
        transport: ``"broadcast"`` sends each owner's part by a broadcast of its own and reduces gradients likewise, on
            NCCL all parts of a block by one launch; ``"single"`` is one all-gather and one reduce-scatter over parts
            padded to one size. ``"auto"`` on NCCL takes ``single`` for a block whose padding is at most 15 %, else
            ``broadcast``; elsewhere ``broadcast``.
        prefetch: blocks whose weights are on their way while another one computes, and that ``step()`` fills.
        merge_bytes: neighbouring blocks communicate together until they hold this many bytes of weights. 0 merges
            nothing.
        asynchronous: ``False`` waits for every collective where it starts: for debugging; results are bitwise the same.
        timeout: of dmuon's own process groups, a ``datetime.timedelta``; ``None`` is that of ``init_process_group``.

    Raises:
        TypeError, ValueError: an option out of its range, by name.
    """

    transport: Transport = "auto"
    prefetch: int = 1
    outstanding_reductions: InitVar[None] = None
    merge_bytes: int = 0
    hierarchical: InitVar[None] = None
    max_ctas: InitVar[None] = None
    asynchronous: bool = True
    timeout: timedelta | None = None

    def __post_init__(self, *removed: object) -> None:
        for (name, instead), value in zip(_REMOVED.items(), removed, strict=True):
            if value is not None:
                raise ValueError(f"comm.{name}={value!r} is gone; {instead}")
        check_choice("comm.transport", self.transport, get_args(Transport))
        check_integer("comm.prefetch", self.prefetch, 0)
        merge_bytes: object = self.merge_bytes
        if merge_bytes == "auto":
            raise TypeError("comm.merge_bytes='auto' is no number; write a number of bytes, or 0")
        check_integer("comm.merge_bytes", self.merge_bytes, 0)
        check_flag("comm.asynchronous", self.asynchronous)
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(f"comm.timeout must be a datetime.timedelta or None, got {self.timeout!r}")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"comm.timeout must be positive, got {self.timeout}")


class Comm:
    """What a dedicated model needs to communicate; making it makes dmuon's process groups.

    That is collective over all ranks of the topology, which have agreed on the options.

    All process groups are dmuon's own: collectives of one group must come in one order on all its ranks, which no one
    could promise for a group that a user communicates over as well. There are several because collectives of one group
    also run one after the other: weights must not wait behind gradients (two lines in :class:`Lanes`), and a vote must
    reach every rank of the model (``control``), also one that is about to reduce something else. Gradients of what
    nobody shards are averaged over :attr:`averages`.

    Attributes:
        mesh: the data-parallel mesh.
        tensor_mesh: with tensor parallelism, its dimension behind those of ``mesh``; otherwise ``mesh``.
        group: over ``ranks``: broadcasts of initial values, and other collectives that block.
        control: over all ranks of the topology, tensor parallelism included: agreement on plans, and votes.
        at: the coordinate of this rank.
        ranks: of this tensor-parallel rank's mesh, ascending.
        position: of this rank among them.
        fill_stream: whole weights are gathered along the row, while the block before them computes.
        publish_stream: updated weights are sent along the column, while the optimizer updates the next ones.
        reduce_stream: gradients are reduced and averaged, while backward computes the next ones.
        tensor: the tensor-parallel ranks at this coordinate: pieces of matrices, to their owners and back. None without
            tensor parallelism.
        row: the ranks over which weights are sharded: fills and reductions. None if weights are not sharded.
        column: those that hold the same shard in every replica: publications and reductions. None with one replica.
        averages: over ``ranks``, for gradients of parameters that nobody shards: a vote must tell ranks that are out of
            step, and not be taken for part of an average. That of collectives that block, if votes go over another one.
            It is connected by its first use, since where FSDP2 shards all that dmuon does not own there is none.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        topology: Topology,
        group: dist.ProcessGroup,
        options: CommOptions,
        tensor_mesh: DeviceMesh | None,
        control: dist.ProcessGroup,
    ) -> None:
        self.mesh = mesh
        self.topology = topology
        self.group, self.control = group, control
        self.options = options
        self.device = device = mesh_device(mesh.device_type)
        self.at = at = topology.of(this_rank())
        self.ranks = topology.data_parallel(at.t)
        self.position = position_in(self.ranks, this_rank())
        self.fill_stream, self.publish_stream, self.reduce_stream = Stream(device), Stream(device), Stream(device)
        self.monitor = Monitor(control, device, asynchronous=options.asynchronous)
        self.tensor: Domain | None = None
        if topology.tensor > 1:
            members = Ranks(topology.rank_at(at.r, at.s, t) for t in range(topology.tensor))
            across = make_group(device, members, "tensor", options.timeout)
            self.tensor = Domain(members, Position(at.t), device, across, self.monitor, lane=None)
        self.row, self.column = (_lanes(topology, along, device, options) for along in ("s", "r"))
        self.averages = group
        if control is group:
            self.averages = make_group(device, self.ranks, "average", options.timeout)
        with self.monitor.watch("first use of dmuon's process groups"):
            for one in dict.fromkeys((control, group)):
                connect(one, device)
            if self.tensor is not None:
                connect(self.tensor.group, device, exchanges=True, gathers=True)
            for lanes in (self.row, self.column):
                if lanes is not None:
                    connect(lanes.weights.group, device, gathers=True)
                    connect(lanes.gradients.group, device, reduces=True)
            self.monitor.synchronize()  # what is wrong with a link shows here
        self.tensor_mesh = mesh if tensor_mesh is None else _with_dimension(mesh, tensor_mesh, topology)

    @property
    def world(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.ranks)


def _with_dimension(mesh: DeviceMesh, tensor_mesh: DeviceMesh, topology: Topology) -> DeviceMesh:
    """``mesh`` with the dimension of tensor parallelism behind its own."""
    coordinates = [topology.of(rank) for rank in mesh.mesh.flatten().tolist()]
    ranks = torch.tensor([[topology.rank_at(at.r, at.s, t) for t in range(topology.tensor)] for at in coordinates])
    names = mesh.mesh_dim_names or tuple(f"dmuon_{i}" for i in range(mesh.ndim))
    return DeviceMesh.from_group(
        [mesh.get_group(dim) for dim in range(mesh.ndim)] + [tensor_mesh.get_group()],
        mesh.device_type,
        mesh=ranks.view(*mesh.mesh.shape, topology.tensor),
        mesh_dim_names=(*names, *(tensor_mesh.mesh_dim_names or ("dmuon_tensor",))),
    )


def _lanes(topology: Topology, along: Literal["r", "s"], device: torch.device, options: CommOptions) -> Lanes | None:
    """Of the line of this rank; None of a rank on its own."""
    ranks = next(line for line in topology.partition(along) if this_rank() in line)
    if len(ranks) == 1:
        return None
    position = position_in(ranks, this_rank())
    weights = make_group(device, sorted(ranks), f"weights_along_{along}", options.timeout, urgent=True)
    gradients = make_group(device, sorted(ranks), f"gradients_along_{along}", options.timeout)
    return Lanes(Line(ranks, position, weights), Line(ranks, position, gradients))
