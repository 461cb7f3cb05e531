"""The flat buffers in which owned matrices are whole: who uses them, how they are filled, what a step publishes.

[Note: what a generation is]
Masters have versions, which ``Runtime.generation`` counts: whatever may change a master (a step, a load, an edit of a
resting form) raises it, and values are never compared. A buffer remembers of which generation its weights are, and of
which its stand-ins are. Before each use it is filled again unless that is the runtime's, so no forward or backward
computes with weights that are out of date, whoever changed them. The number depends only on what all ranks do alike,
hence all of them fill, or none.

[Note: from a step to the next forward]
With replicas of shards, ``u`` updates masters, ``p`` publishes along the column, ``f`` fills along the row::

    computes         | u1 | u2 | u3     | forward 1 | forward 2 | …
    publish_stream   |    | p1 | p2  p3 |           |
    fill_stream      |         | f1     | f2        | f3

A publication reads masters: it waits for what the computing stream has queued by then, which is their update, and what
is queued later may write them only after it has read (``Runtime.before_write``). Of weights that are freed it sends
from memory of its own and arrives in stand-ins, so that it depends on no fill, and a buffer may be freed and filled
meanwhile; of those that are kept it goes from buffer to buffer. A fill waits for the publication of its own buffer, and
for what was queued so far, since the memory may have come from the block before; then it copies masters and stand-ins
into their slots and gathers. A forward waits for the fill of its own block alone. Publications and fills have streams
and process groups of their own, or the first fill would wait behind all publications.

Which of them start, and when, follows from the order of the last forward and from the options ([Note: one order of
collectives]): a buffer whose masters are up to date early waits for its turn. A buffer is freed by the computing
stream, which by then has waited for all that was queued on its memory; where a user computes on another stream,
``Origin`` lets the stream that gets the memory back wait for that one.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.profiler import record_function

from dmuon.comm.context import Comm
from dmuon.comm.monitor import Pending, gather
from dmuon.dedicated.matrix import OwnedMatrix, Part, Weight, own
from dmuon.kernels import streams_of
from dmuon.layout.buffer import make_layout
from dmuon.platform.host import logger
from dmuon.platform.streams import Origin
from dmuon.platform.torch_private import backend_of, count_holders, local_tensor

_log = logger(__name__)

_ALIGN_BYTES = 256  # of each matrix in a flat buffer, so that every view suits vectorized loads


class BufferState(Enum):
    """What a buffer holds. Only ``READY`` may be used; only ``FREED`` may be filled."""

    FREED = "no weights"
    FILLING = "weights under way"
    READY = "whole weights"


class GradState(Enum):
    """Where the gradients of a buffer's matrices are, apart from reductions that are under way.

    Backward makes them ``READY`` block by block, unless it does not synchronize. A reduction takes what is there, from
    earlier backwards too.
    """

    NONE = "nowhere, or with the resting forms"
    READY = "with the whole weights, to be reduced when no block of the buffer awaits backward any more"
    WAITING = "with the whole weights, until a backward synchronizes"


class OwnedBuffer:
    """Owned matrices of one block, or of several small neighbours.

    The buffer is divided by the shard of the owner, and within that by its replica. Publication sends what owners have
    updated along the columns, to the other replicas: into stand-ins, or, where whole weights stay in memory, straight
    into the buffer. Filling gathers the buffer along the rows.

    Both go on after the call that started them: [Note: from a step to the next forward].

    Its views are made once; freeing and allocating resizes the storage beneath them. While it has users, nothing may
    fill or free it.

    Args:
        owned: weights in forward order, with what this rank owns of each.
        comm_dtype: dtype of the buffer, of what travels, and of forward and backward.
        reduce_dtype: dtype of gradient reductions.
        keep: leave whole weights in the buffer after forward and backward.

    Attributes:
        users: blocks that compute with the weights, and for what, as in "… changed or were dropped while …".
        awaited: blocks that a backward has yet to come through: the graph of a forward has saved something.
        gradients: of all matrices.
        placed: of each matrix its parts, and where they lie in the buffer.
        own_spans: of each matrix, where the parts that this rank owns lie in all that it owns.
        params: the resting forms, by ``id``.
        storages: the memory of the whole weights.
    """

    def __init__(
        self,
        owned: Sequence[tuple[Weight, Tensor]],
        comm: Comm,
        *,
        comm_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        keep: bool,
    ) -> None:
        weights = [weight for weight, _ in owned]
        self.comm = comm
        self.reduce_dtype = reduce_dtype
        self.keep = keep or comm.row is None
        self.state = BufferState.FREED
        self.generation = -1  # of the weights in the buffer
        self.published = -1  # generation of the stand-ins, or of this column's segment of the buffer
        self.users: dict[str, str] = {}
        self.awaited: set[str] = set()
        self.gradients = GradState.NONE
        self._publication: Pending | None = None
        self._fill: Pending | None = None
        self._outgoing: Tensor | None = None  # what is being published, until that has ended
        self._origin = self._outgoing_origin = Origin(comm.device)  # of the buffer's memory, and of that
        self.layout = make_layout(
            [(part.at.r, part.at.s, part.numel) for weight in weights for part in weight.parts],
            comm.topology.replicas,
            comm.topology.shards,
            wanted=comm.options.transport,
            backend=backend_of(comm.group, comm.device),
            resident=self.keep,
            align=max(1, _ALIGN_BYTES // comm_dtype.itemsize),
        )
        self._buffer = torch.empty(self.layout.size, dtype=comm_dtype, device=comm.device)
        self._nbytes = self.layout.size * comm_dtype.itemsize
        self._segments = {s: self._buffer[a:b] for s, (a, b) in self.layout.segments.filled.items()}
        column = self.layout.parts(comm.at.s)
        self._column_parts = {r: self._buffer[a:b] for r, (a, b) in column.filled.items()}
        self._column_region = self._buffer[column.start : column.end]  # without the segment's padding
        self._standins = {
            r: torch.empty(b - a, dtype=comm_dtype, device=comm.device)
            for r, (a, b) in ({} if self.keep else column.filled).items()
            if r != comm.at.r
        }
        # Modules compute with a slot itself, if a tensor is one matrix; others are put together of several slots.
        made = sum(local_tensor(weight.route.param).numel() for weight in weights if not weight.parts[0].is_whole)
        self._assembled = torch.empty(made, dtype=comm_dtype, device=comm.device)
        self.matrices: list[OwnedMatrix] = []
        self.placed: list[list[tuple[Part, tuple[int, int]]]] = []
        self._assembly: list[tuple[Tensor, Tensor]] = []  # parts of tensors that are made of several, and their slots
        slots, begin = iter(self.layout.slots), 0
        for weight, master in owned:
            shape, spans = local_tensor(weight.route.param).shape, list(islice(slots, len(weight.parts)))
            placed = list(zip(weight.parts, spans, strict=True))
            if weight.parts[0].is_whole:
                whole = self._buffer[slice(*spans[0])].view(shape)
            else:
                whole = self._assembled[begin : begin + shape.numel()].view(shape)
                begin += shape.numel()
                for part, (a, b) in placed:
                    self._assembly += part.pairs(whole, self._buffer[a:b].view(part.local_shape))
            matrix = own(weight, whole, master, comm)
            self.matrices.append(matrix)
            self.placed.append(placed)
        self.params = frozenset(id(matrix.rest) for matrix in self.matrices)
        # What this rank owns: masters, slots of them, and where these are in the rank's own part of the buffer.
        self._masters: list[Tensor] = []
        self._own_slots: list[Tensor] = []
        self.own_spans: list[tuple[OwnedMatrix, list[tuple[int, int]]]] = []
        start, end = column[comm.at.r]
        self._own_numel = end - start
        for matrix, placed in zip(self.matrices, self.placed, strict=True):
            mine = [span for part, span in placed if part.owner == comm.position]
            self.own_spans.append((matrix, [(a - start, b - start) for a, b in mine]))
            for (part, master), (a, b) in zip(matrix.pieces(matrix.master), mine, strict=True):
                self._masters.append(master)
                self._own_slots.append(self._buffer[a:b].view(part.local_shape))
        self.storages = [tensor.untyped_storage() for tensor in (self._buffer, self._assembled)]
        self._wholes = [matrix.full for matrix in self.matrices]
        self._holders: int | None = None  # of all these, before anything was computed with them
        self._told = False  # a warning said that somebody held the weights
        self.was_read = False  # somebody may hold weights: a forward ran, and they were not freed since
        for storage in self.storages:
            storage.resize_(0)
        first, last = weights[0].route.block, weights[-1].route.block
        self.name = str(first) if first == last else f"{first} to {last}"

    @property
    def whole_nbytes(self) -> int:
        """Bytes that the buffer holds when it is filled."""
        return self._nbytes + self._assembled.nbytes

    # -- weights ---------------------------------------------------------------------------------------------------

    def start_publication(self, generation: int) -> None:
        """Start sending what this rank owns along its column, and receiving what other replicas own."""
        comm = self.comm
        if comm.column is None or self.published == generation:
            return
        if self.users:
            self._refuse_users()
        self._settle()
        if self.keep:
            if self.state is BufferState.FREED:
                self._allocate()
            slots, region, parts = self._own_slots, self._column_region, self._column_parts
        else:
            # The buffer may be freed before this has been sent, so it is sent from memory of its own.
            self._outgoing_origin = Origin(comm.device)
            region = self._outgoing = self._buffer.new_empty(self._own_numel)
            own = {comm.at.r: region} if self._own_numel else {}
            parts = dict(sorted((self._standins | own).items()))
            spans = [span for _, of_matrix in self.own_spans for span in of_matrix]
            slots = [region[slice(*span)].view_as(slot) for span, slot in zip(spans, self._own_slots, strict=True)]
        with record_function(f"dmuon::publish {self.name}"), torch.no_grad(), comm.publish_stream.beside():
            if slots:
                torch._foreach_copy_(slots, self._masters)
            send = partial(gather, self.layout.column, region, parts, comm.column.weights)
            self._publication = comm.monitor.start("publish", f"publish of block {self.name!r}", send)
        self.published = generation
        if self.keep:
            self.state = BufferState.FILLING

    def start_fill(self, generation: int) -> None:
        """Allocate the buffer and start gathering it; returns at once unless it has to wait for a publication."""
        comm = self.comm
        if self.generation == generation and self.state is not BufferState.FREED:
            return
        if self.users:
            self._refuse_users()
        if self.state is BufferState.READY and not self.keep:
            self.free()
        self.start_publication(generation)
        if comm.column is None:
            self._settle()
        if self.state is BufferState.FREED:
            self._allocate()
        # With one rank nothing travels, so nobody would wait for another stream.
        stream = nullcontext() if comm.row is None and comm.column is None else comm.fill_stream.beside()
        with record_function(f"dmuon::fill {self.name}"), torch.no_grad(), stream:
            if comm.row is not None or comm.column is None:
                # The row gets this rank's masters, and its stand-ins for those of other replicas. It is the stream of
                # fills that waits for the publication here; what computes goes on.
                pending, self._publication = self._publication, None
                if pending is not None:
                    pending.wait()
                if self._masters and (not self.keep or comm.column is None):
                    torch._foreach_copy_(self._own_slots, self._masters)
                for r, standin in self._standins.items():
                    self._column_parts[r].copy_(standin)
            if comm.row is not None:
                send = partial(gather, self.layout.row, self._buffer, self._segments, comm.row.weights)
                self._fill = comm.monitor.start("fill", f"fill of block {self.name!r}", send)
        self.state = BufferState.FILLING
        self.generation = generation

    def _allocate(self) -> None:
        if self._holders is None:
            self._holders = count_holders(self.storages, self._wholes)
        self._origin = Origin(self.comm.device)
        self._buffer.untyped_storage().resize_(self._nbytes)
        self._assembled.untyped_storage().resize_(self._assembled.nbytes)

    def finish_fill(self) -> None:
        """Wait for the fill: what is queued from now on may use the weights."""
        if self.state is not BufferState.FILLING:
            raise RuntimeError(f"block {self.name!r} is {self.state.name}, expected FILLING: {self.state.value}")
        with record_function(f"dmuon::wait_fill {self.name}"):
            self._settle()
            if self._assembly:  # what is made of several matrices is put where modules find it
                with torch.no_grad():
                    torch._foreach_copy_([part for part, _ in self._assembly], [slot for _, slot in self._assembly])
        self.state = BufferState.READY

    def free(self) -> None:
        """Give the buffer's memory back, unless somebody else refers to it.

        A graph does whose weights were saved by hooks of others inside the block, and so does a view that a forward
        returned. It may be read at any time, so the weights stay where they are. The buffer counts as freed all the
        same: whether it is filled must not depend on what this rank alone knows, and a fill of the same generation
        writes the same bytes.
        """
        if self.users:
            self._refuse_users()
        try:
            self._settle()
        finally:  # what failed has ended, too
            self._origin.await_users()
            may_be_held = self.was_read and not self.keep  # weights that are kept go only where graphs are void
            if not (
                may_be_held
                and count_holders(self.storages, self._wholes) > (self._holders or 0)
                and self._is_held_by_others()
            ):
                self.was_read = False
                for storage in self.storages:
                    storage.resize_(0)
            self.state, self.generation = BufferState.FREED, -1
            if self.keep:
                self.published = -1

    def _is_held_by_others(self) -> bool:
        """Whether a graph, or anybody else, refers to the weights, and not only garbage does; says so once."""
        if self._told or sys.exc_info()[1] is not None:  # an error refers to what it was raised among
            return True
        gc.collect()  # once: what is garbage would hold them for a while
        if count_holders(self.storages, self._wholes) <= (self._holders or 0):
            return False
        self._told = True
        _log.warning(
            "block %r: something beside dmuon refers to its whole weights (hooks on saved tensors inside the "
            "block, or a weight or a view of one that was kept), so they stay in memory until it lets them go",
            self.name,
        )
        return True

    def _refuse_users(self) -> None:
        for user, purpose in self.users.items():
            raise RuntimeError(f"the weights of block {user!r} changed or were dropped while {purpose}")

    def _settle(self) -> None:
        """Wait for everything under way, whatever of it fails."""
        publication, fill = self._publication, self._fill
        self._publication = self._fill = None
        try:
            if publication is not None:
                publication.wait()
        finally:
            if fill is not None:
                fill.wait()
        if self._outgoing is not None:
            self._outgoing_origin.await_users()
        self._outgoing = None  # not before the stream that allocated it has waited: [Note: who keeps a tensor alive]

    # -- gradients -------------------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop what was on its way; what waits for a backward that synchronizes stays, as of other parameters."""
        if self.gradients is not GradState.WAITING:
            for matrix in self.matrices:
                matrix.full.grad = None
            self.gradients = GradState.NONE


def fills_wait(comm: Comm) -> bool:
    """On the CPU a fill that follows a publication waits for it; the next forward starts it, not the step."""
    return comm.column is not None and comm.row is not None and streams_of(comm.device) is None


class Publications:
    """Starts publications, and the fills that follow them.

    A publication waits for its turn even if it is ready, since its place among the collectives must be the same on all
    ranks. So all of a model wait for those of the models before it in the same optimizer, which may share its groups.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._generation = 0
        self._coming: deque[OwnedBuffer] = deque()  # that this step has yet to publish, in forward order
        self._outdated: set[int] = set()  # ids of resting parameters that this step has yet to update
        self._fills: deque[OwnedBuffer] = deque()  # published, to be filled in this step
        self._fill_budget = 0
        self._fills_wait = fills_wait(comm)
        self._before: Publications | None = None

    def begin(
        self, buffers: Iterable[OwnedBuffer], outdated: set[int], generation: int, before: Publications | None
    ) -> None:
        """Publish what of ``buffers`` holds nothing that is ``outdated``, behind all ``before``; the rest follows."""
        self._generation, self._outdated, self._before = generation, outdated, before
        self._coming = deque(buffers)
        self._fills.clear()
        self._fill_budget = self._comm.options.prefetch
        self.updated(())

    def updated(self, params: Iterable[Tensor]) -> None:
        """The masters of ``params``, of whichever model, have their new values: publish what has waited for them."""
        self._outdated.difference_update(map(id, params))
        if self._before is not None and (self._before._coming or self._before._fills):
            return
        self._before = None
        while self._coming and self._coming[0].params.isdisjoint(self._outdated):
            buffer = self._coming.popleft()
            buffer.start_publication(self._generation)
            if (buffer.keep or self._fill_budget > 0) and not self._fills_wait:
                self._fill_budget -= 1
                self._fills.append(buffer)
        # On an accelerator, whoever waits in a collective takes units from the updates that it has yet to compute.
        if self._fills and (not self._outdated or streams_of(self._comm.device) is None):
            while self._fills:
                self._fills.popleft().start_fill(self._generation)

    def forget_fills(self) -> None:
        """Start no fill that was put off."""
        self._fills.clear()
