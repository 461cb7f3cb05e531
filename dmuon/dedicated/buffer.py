"""Owned matrices that communicate together: a flat buffer of whole weights, and how it is filled from the masters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.profiler import record_function

from dmuon.comm.context import Comm
from dmuon.comm.monitor import Pending, run_all
from dmuon.comm.transport import gather
from dmuon.dedicated.block import Block
from dmuon.dedicated.matrix import OwnedMatrix, Sites, TensorSharding
from dmuon.dedicated.owned_tensor import owned_tensor
from dmuon.layout.buffer import make_layout
from dmuon.layout.ranks import Position
from dmuon.layout.topology import Coordinate
from dmuon.platform.torch_private import local_tensor

__all__ = ["BufferState", "OwnedBuffer", "Weight"]

_ALIGN_BYTES = 256  # of each matrix in a flat buffer, so that every view suits vectorized loads


class BufferState(Enum):
    """What a buffer holds. Only ``READY`` may be used; only ``FREED`` may be filled."""

    FREED = "no weights"
    FILLING = "weights under way"
    READY = "whole weights"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix to be owned; initial values are read from ``param``.

    Attributes:
        owner: position of its owner among the data-parallel ranks.
        block: name and module of the block that it lies in.
    """

    fqn: str
    param: nn.Parameter
    sites: Sites
    owner: Position
    block: tuple[str, nn.Module]
    tensor: TensorSharding | None = None


class OwnedBuffer:
    """Owned matrices of one block, or of several small neighbours.

    The buffer is divided by the shard of the owner, and within that by its replica. Publication carries what owners of
    other replicas updated along the columns, into stand-ins, or, where whole weights stay in memory, straight into the
    buffer; filling gathers the buffer along the rows.

    Args:
        weights: in forward order.
        comm_dtype: dtype of the buffer, of what travels, and of forward and backward.
        reduce_dtype: dtype of gradient reductions.
        keep: leave whole weights in the buffer after forward and backward.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        comm: Comm,
        *,
        comm_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        keep: bool,
    ) -> None:
        self.comm = comm
        self.reduce_dtype = reduce_dtype
        self.keep = keep or comm.row is None
        self.state = BufferState.FREED
        self.generation = -1  # of the weights in the buffer
        self.published = -1  # generation of the stand-ins, or of this column's segment of the buffer
        self._publication: Pending | None = None
        self._fill: Pending | None = None
        self._outgoing: Tensor | None = None
        locals_ = [local_tensor(w.param) for w in weights]
        where = [comm.coordinate(w.owner) for w in weights]
        self.layout = make_layout(
            [(at.r, at.s, local.numel()) for at, local in zip(where, locals_, strict=True)],
            comm.topology.replicas,
            comm.topology.shards,
            wanted=comm.options.transport,
            backend=comm.backend,
            resident=self.keep,
            align=max(1, _ALIGN_BYTES // comm_dtype.itemsize),
        )
        self._buffer = torch.empty(self.layout.size, dtype=comm_dtype, device=comm.device)
        self._nbytes = self.layout.size * comm_dtype.itemsize
        self._segments = [self._buffer[a:b] for a, b in self.layout.segments]
        of_column = self.layout.parts[comm.at.s]
        self._column_parts = [self._buffer[a:b] for a, b in of_column]
        self._column_region = self._buffer[of_column[0][0] : of_column[-1][1]]  # without the padding of the segment
        self._standins = {} if self.keep else self._make_standins(comm_dtype)
        self.entries: list[OwnedMatrix] = []
        self._slots: list[tuple[OwnedMatrix, tuple[int, int]]] = []  # of what this rank owns
        for weight, local, at, span in zip(weights, locals_, where, self.layout.slots, strict=True):
            entry = self._make_entry(weight, local, at, self._buffer[span[0] : span[1]].view(local.shape))
            self.entries.append(entry)
            if entry.owner == comm.position:
                self._slots.append((entry, span))
            entry.place(entry.rest)
        self._buffer.untyped_storage().resize_(0)
        members: dict[str, list[tuple[Weight, OwnedMatrix]]] = {}
        for weight, entry in zip(weights, self.entries, strict=True):
            members.setdefault(weight.block[0], []).append((weight, entry))
        self.blocks = [Block(name, m[0][0].block[1], [e for _, e in m], self) for name, m in members.items()]
        first, last = self.blocks[0].name, self.blocks[-1].name
        self.name = first if len(self.blocks) == 1 else f"{first} to {last}"

    def _make_entry(self, weight: Weight, local: Tensor, at: Coordinate, slot: Tensor) -> OwnedMatrix:
        comm, param, sharding = self.comm, weight.param, weight.tensor
        placements: list[Placement] = [Shard(0)] * comm.mesh.ndim
        if sharding is not None:
            placements.append(sharding.placement)
        rest = nn.Parameter(
            owned_tensor(
                _initial_master(local, weight.owner, comm),
                comm.mesh if sharding is None else comm.tensor_mesh,
                param.shape,
                fqn=weight.fqn,
                owner=weight.owner,
                placements=placements,
            ),
            requires_grad=param.requires_grad,
        )
        # `.data` gives the view a version counter of its own: filling the buffer must not look to autograd like an edit
        # of the weights that it saved.
        whole: Tensor = slot.data
        if sharding is not None:
            whole = sharding.wrap(whole, param.shape)
        full = nn.Parameter(whole, requires_grad=param.requires_grad)
        full._dmuon_rest = rest  # type: ignore[attr-defined]
        return OwnedMatrix(weight.fqn, param.shape, weight.owner, at, weight.sites, rest, full, sharding)

    def _make_standins(self, dtype: torch.dtype) -> dict[int, Tensor]:
        comm = self.comm
        return {
            r: torch.empty(b - a, dtype=dtype, device=comm.device)
            for r, (a, b) in enumerate(self.layout.parts[comm.at.s])
            if r != comm.at.r and b > a
        }

    @property
    def buffer_nbytes(self) -> int:
        """Bytes that the buffer holds now."""
        return self._buffer.untyped_storage().nbytes()

    @property
    def standin_nbytes(self) -> int:
        """Bytes of what this rank keeps for its row of matrices that other replicas own."""
        return sum(t.untyped_storage().nbytes() for t in self._standins.values())

    # -- weights ---------------------------------------------------------------------------------------------------

    def start_publication(self, generation: int) -> None:
        """Start sending along the columns what this rank owns, and receiving what other replicas own."""
        comm = self.comm
        if comm.column is None or self.published == generation:
            return
        self._require_idle()
        self._settle()
        column = comm.column
        start, end = self.layout.parts[comm.at.s][comm.at.r]
        if not self.keep:
            self._outgoing = self._buffer.new_empty(end - start)
        elif self.state is BufferState.FREED:
            self._buffer.untyped_storage().resize_(self._nbytes)
        with record_function(f"dmuon::publish {self.name}"), torch.no_grad(), comm.publish_stream.beside():
            if self._outgoing is None:
                self._write_masters(self._buffer, 0)
                region, parts = self._column_region, self._column_parts
            else:
                region = self._outgoing
                self._write_masters(region, start)
                parts = [self._standins.get(r, region[:0]) for r in range(comm.topology.replicas)]
                parts[comm.at.r] = region
            self._publication = comm.monitor.start(
                "publish", f"publish of block {self.name!r}", lambda: gather(self.layout.column, region, parts, column)
            )
        self.published = generation
        if self.keep:
            self.state = BufferState.FILLING

    def start_fill(self, generation: int) -> None:
        """Allocate the buffer and start gathering it; returns at once unless it has to wait for a publication."""
        comm = self.comm
        if self.generation == generation and self.state is not BufferState.FREED:
            return
        self._require_idle()
        if self.state is BufferState.READY and not self.keep:
            self.free()
        self.start_publication(generation)
        if comm.column is None:
            self._settle()
        if self.state is BufferState.FREED:
            self._buffer.untyped_storage().resize_(self._nbytes)
        # With one rank nothing travels, so nobody would wait for another stream.
        beside = comm.fill_stream.beside() if comm.world > 1 else nullcontext()
        with record_function(f"dmuon::fill {self.name}"), torch.no_grad(), beside:
            if comm.row is not None or comm.column is None:
                self._settle_publication()
                self._write_own_segment()
            if comm.row is not None:
                row = comm.row
                self._fill = comm.monitor.start(
                    "fill",
                    f"fill of block {self.name!r}",
                    lambda: gather(self.layout.row, self._buffer, self._segments, row),
                )
        self.state = BufferState.FILLING
        self.generation = generation

    def _write_own_segment(self) -> None:
        """What this rank is the source of on its row."""
        if not self.keep or self.comm.column is None:
            self._write_masters(self._buffer, 0)
        for r, standin in self._standins.items():
            self._column_parts[r].copy_(standin)

    def _write_masters(self, flat: Tensor, start: int) -> None:
        """Cast the masters of this rank into ``flat``, whose first element is element ``start`` of the layout."""
        if self._slots:
            slots = [flat[a - start : b - start].view(e.local_shape) for e, (a, b) in self._slots]
            torch._foreach_copy_(slots, [e.master for e, _ in self._slots])

    def finish_fill(self) -> None:
        if self.state is not BufferState.FILLING:
            raise RuntimeError(f"block {self.name!r} is {self.state.name}, expected FILLING: {self.state.value}")
        with record_function(f"dmuon::wait_fill {self.name}"):
            self._settle()
        self.state = BufferState.READY

    def require_ready(self) -> None:
        if self.state is not BufferState.READY:
            raise RuntimeError(f"block {self.name!r} is {self.state.name}, expected READY: {self.state.value}")

    @property
    def at_work(self) -> bool:
        """Whether a block computes with the buffer."""
        return any(block.at_work for block in self.blocks)

    def free(self) -> None:
        """Give the buffer's memory back."""
        self._require_idle()
        try:
            self._settle()
        finally:  # what failed has ended, too
            self._buffer.untyped_storage().resize_(0)
            self.state, self.generation = BufferState.FREED, -1
            if self.keep:
                self.published = -1

    def _require_idle(self) -> None:
        for block in self.blocks:
            if block.at_work:
                raise RuntimeError(
                    f"the weights of block {block.name!r} changed or were dropped while {block.phase.value}"
                )

    def settle_at_exit(self) -> None:
        """What was sent ahead for a forward that never came has a moment to arrive."""
        for pending in (self._publication, self._fill):
            if pending is not None and self.comm.device.type == "cpu":
                pending.wait_at_exit()

    def _settle(self) -> None:
        """Wait for everything under way."""
        started = [pending for pending in (self._publication, self._fill) if pending is not None]
        self._publication, self._fill = None, None
        run_all(pending.wait for pending in started)
        self._outgoing = None  # only now: what waits in between may be another stream than the one that allocates

    def _settle_publication(self) -> None:
        pending, self._publication = self._publication, None
        if pending is not None:
            pending.wait()


def _initial_master(local: Tensor, owner: Position, comm: Comm) -> Tensor:
    """The first rank's initial value of ``local``, fp32 or wider, whole on ``owner`` and empty elsewhere."""
    dtype = torch.promote_types(local.dtype, torch.float32)
    with torch.no_grad():
        value = local.detach().to(comm.device, copy=True).contiguous()
        if comm.world > 1:
            with comm.monitor.watch("broadcast of initial weights"):
                dist.broadcast(value, src=comm.ranks[0], group=comm.group)
        if owner == comm.position:
            return value.to(dtype)
        return torch.empty((0, local.shape[1]), dtype=dtype, device=comm.device)
