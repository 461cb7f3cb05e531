"""The gradients of one backward: reductions to owners, averages of what is replicated, and what nobody used.

Every rank takes part in every reduction, with zeros where it has no gradient ([Note: one order of collectives]). What
it receives for a parameter that it did not use is *undecided* until a vote has told whether any rank used it: then it
is the gradient, otherwise ``grad`` stays None, as it would in one process.

[Note: a backward on its streams]
Of three blocks, of which the last one comes first. ``f`` is a fill, ``r`` a reduction along the row, ``c`` along the
column of replicas, ``a`` the averages of what nobody shards, ``v`` the vote::

    computes        | block 3 | pack 3, block 2 | pack 2, block 1 | pack 1 |         | hand over
    fill_stream     | f2      | f1              |                 |        |         |
    reduce_stream   |         | r3  c3          | r2  c2          | r1  c1 | a       |
    votes                                                                  |       v |

The stream that computes packs the gradients of a block and frees the whole ones; from then on the reduction has memory
of its own. ``reduce_stream`` waits for the packing, then runs ``r`` and, behind it, ``c``, which reads what ``r`` has
brought. Nobody waits for a reduction while blocks are left, unless two are under way: then the computing stream waits
for the oldest, up to the event behind its ``c``, and not for those that were queued later. When autograd has no work
left, all reductions are waited for in the order in which they started; the averages start, and then the vote. So on
every rank the order is that of the blocks, then the averages, then the vote, however long anything has taken. The
computing stream alone puts a gradient on its parameter, after it has waited for the reduction: hooks, clipping and the
step have nothing to wait for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from dmuon.comm.agreement import Vote
from dmuon.comm.context import Comm
from dmuon.comm.monitor import Parts, Pending, Works, reduce, run_all, scratch
from dmuon.dedicated.buffer import GradState, OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.replicated import GradAverager
from dmuon.kernels import streams_of
from dmuon.platform.streams import Origin
from dmuon.platform.torch_private import accumulation_hooks, local_tensor
from dmuon.step.residency import Options, like_param

Landed = Callable[[Sequence[Tensor]], None]
_MAX_REDUCTIONS = 2  # under way at once: a third would keep one more buffer of gradients


class GradReduction:
    """Averages the gradients of one buffer to their owners; a rank without a gradient contributes zeros.

    What an owner receives becomes the gradient, without a copy where the dtypes agree. There are up to two stages,
    along the row and along the column ([Note: a backward on its streams]). On the CPU, queuing the second one waits for
    the first. So the next buffer, or the end of backward, advances it.

    Args:
        origins: by ``id`` of whole weights, the streams on which their gradients came; those of this buffer are taken
            out.

    Attributes:
        used: the matrices that this rank has a gradient for.
        landed: the parameters of this owner whose gradients are there, once it has finished.
    """

    def __init__(self, buffer: OwnedBuffer, origins: dict[int, Origin]) -> None:
        self.buffer = buffer
        self._comm = comm = buffer.comm
        self.landed: list[Tensor] = []
        self._stages = deque(filter(None, (comm.row, comm.column)))
        self._pending: Pending | None = None
        self._queued: torch.Event | None = None  # behind what passes from the first stage to the second
        self._origin = Origin(comm.device)
        self._in_flight: list[Tensor] = []  # until the collectives have ended: [Note: who keeps a tensor alive]
        layout = buffer.layout
        with record_function(f"dmuon::reduce {buffer.name}"), torch.no_grad():
            self._region, self._parts = scratch(layout.row, layout.segments, buffer.reduce_dtype, comm.device)
            self.used = self._pack(self._parts, origins)
            self._in_flight += [self._region, *self._parts.values()]
            self._result = self._parts.get(comm.at.s, self._region[:0])  # of the last stage that was started
            self.advance()
            if streams_of(comm.device) is not None:
                self.advance()

    def _pack(self, parts: Parts, origins: dict[int, Origin]) -> set[OwnedMatrix]:
        """Move the gradients of this rank into ``parts``, one per shard; tells which matrices had one.

        A user may run a part of a block on a stream of his own. Autograd accumulates gradients there, and lets the
        stream that called backward wait for them only at the end. So this stream waits before it reads them; and those
        wait for it before the gradients are freed, whose memory goes back to them.
        """
        made: list[Origin] = []
        for matrix in self.buffer.matrices if origins else ():
            origin = origins.pop(id(matrix.full), None)
            if origin is not None:
                origin.join()
                made.append(origin)
        used: set[OwnedMatrix] = set()
        slots: list[Tensor] = []
        grads: list[Tensor] = []
        starts = self.buffer.layout.segments.filled
        for matrix, placed in zip(self.buffer.matrices, self.buffer.placed, strict=True):
            grad, matrix.full.grad = matrix.full.grad, None
            if isinstance(grad, DTensor) and isinstance(matrix.full, DTensor):
                if grad.placements != matrix.full.placements:  # as autograd has left it; collective then
                    grad = grad.redistribute(placements=matrix.full.placements)
                grad = local_tensor(grad)
            if grad is not None:
                used.add(matrix)
            for part, (start, end) in placed:
                if start == end:  # another tensor-parallel rank has it, and perhaps nothing goes to that owner
                    continue
                first = starts[part.at.s][0]
                slot = parts[part.at.s][start - first : end - first].view(part.local_shape)
                if grad is None:
                    slot.zero_()
                else:
                    slots.append(slot)
                    grads.append(grad if part.is_whole else part.take(grad))
        if slots:
            torch._foreach_copy_(slots, grads)
        for origin in made:
            origin.await_users()
        return used

    def advance(self) -> None:
        """Start the next stage, if there is one, behind the one before."""
        if not self._stages:
            return
        comm, layout = self._comm, self.buffer.layout
        lanes = self._stages.popleft()
        with torch.no_grad(), comm.reduce_stream.beside():
            transport, direction = layout.row, "along the row"
            if lanes is comm.column:
                transport, direction = layout.column, "along the column"
                self._turn_into_column()

            def launch() -> Works:
                self._result, works = reduce(transport, self._region, self._parts, lanes.gradients)
                return works

            what = f"reduce of block {self.buffer.name!r} {direction}"
            self._pending = comm.monitor.start("reduce", what, launch)
            if lanes is comm.column:
                self._queued = comm.reduce_stream.mark()

    def _turn_into_column(self) -> None:
        """Wait for the first stage, and make what it brought parts of the column."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        column = self.buffer.layout.parts(self._comm.at.s)
        first = column.start
        self._region = self._result[: column.size]  # without its padding
        self._parts = {r: self._region[start - first : end - first] for r, (start, end) in column.filled.items()}
        self._in_flight.append(self._region)

    def _wait_for_all(self) -> None:
        """Wait for both stages, and for no later reduction.

        A rank that takes no part in the second stage has nothing pending then.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        if self._queued is not None:
            self._comm.reduce_stream.join_up_to(self._queued)
        self._origin.await_users()
        self._in_flight, self._parts, self._region = [], {}, self._result

    def discard(self) -> None:
        """Wait, and forget the result."""
        self._stages.clear()
        self._wait_for_all()

    def finish(self) -> list[tuple[OwnedMatrix, Tensor]]:
        """Wait, and set ``rest.grad`` of the matrices that this rank has used.

        Returns:
            ``(matrix, local gradient)`` of the others: whether another rank has used them is not known yet. Of those
            with hooks too, so that all ranks run them in one order.
        """
        while self._stages:
            self.advance()
        with record_function(f"dmuon::wait_reduce {self.buffer.name}"):
            self._wait_for_all()
        undecided: list[tuple[OwnedMatrix, Tensor]] = []
        if self._result.untyped_storage().nbytes() > self._result.nbytes:
            self._result = self._result.clone()  # a view of what others own would keep that alive with the gradients
        for matrix, spans in self.buffer.own_spans:
            master = matrix.master
            if not spans:
                local = master.new_empty(master.shape)
            elif len(spans) == 1:
                local = self._result[slice(*spans[0])].view(master.shape).to(master.dtype)
            else:
                local = torch.cat([self._result[slice(*span)] for span in spans]).to(master.dtype)
            if matrix in self.used and not (matrix.rest._backward_hooks or accumulation_hooks(matrix.rest)):
                matrix.set_grad(local)
                if matrix.mine:
                    self.landed.append(matrix.rest)
            elif matrix.full.requires_grad:
                undecided.append((matrix, local))
        self._origin.await_users()  # which have just read what arrived
        return undecided


class Gradients:
    """Gradients on their way; those of at most two buffers at once.

    Attributes:
        averager: of parameters that nobody shards.
        origins: by ``id`` of whole weights, the streams on which gradients came that no reduction has taken yet.
        listeners: called with the parameters of this owner whose gradients have just arrived, as long as they live.
    """

    def __init__(self, comm: Comm, matrices: Sequence[OwnedMatrix], averager: GradAverager) -> None:
        self._comm = comm
        self._matrices = list(matrices)
        self.averager = averager
        self.listeners: list[weakref.WeakMethod[Landed]] = []
        self._reductions: deque[GradReduction] = deque()
        self._undecided: list[tuple[OwnedMatrix, Tensor]] = []
        self._used: set[OwnedMatrix] = set()  # that got a gradient on this rank in this backward
        self._last_vote: Vote | None = None
        self._trains: list[bool] = []  # of each matrix, whether it was trained in the last vote
        self._trained: dict[str, str] = {}  # by name, the same of whatever was there
        self._options: dict[weakref.WeakMethod[Options], Sequence[int]] = {}  # and groups of its optimizer
        self.origins: dict[int, Origin] = {}

    def join(self, matrices: Sequence[OwnedMatrix]) -> None:
        """What is queued from now on runs after the gradients of ``matrices`` were accumulated, on whatever stream."""
        origins = self.origins
        for matrix in matrices:
            if id(matrix.full) in origins:
                origins[id(matrix.full)].join()

    def reduce(self, buffer: OwnedBuffer) -> None:
        """Start reducing the gradients of a buffer; waits for the oldest reduction if too many are under way."""
        while len(self._reductions) >= _MAX_REDUCTIONS:
            self._finish_oldest()
        for earlier in self._reductions:
            earlier.advance()
        if self._comm.row is None and self._comm.column is None:
            # Nothing travels, but the ranks of tensor parallelism alone must have run the blocks in one order too.
            self._comm.monitor.note("reduce", f"gradients of block {buffer.name!r}")
        reduction = GradReduction(buffer, self.origins)
        self._used |= reduction.used
        self._reductions.append(reduction)
        buffer.gradients = GradState.NONE

    def _finish_oldest(self) -> None:
        reduction = self._reductions.popleft()
        self._undecided += reduction.finish()
        for listener in self.listeners if reduction.landed else ():
            landed = listener()
            if landed is not None:
                landed(reduction.landed)

    def finish(self) -> None:
        """Wait for everything under way, agree on what is unused, and average what is replicated."""
        while self._reductions:
            self._finish_oldest()
        self.averager.waiting.clear()
        self._settle(self.averager.finish() if self.averager.params else [])

    def discard(self) -> None:
        """Forget a backward that did not finish; waits for everything under way, whatever fails."""
        reductions, self._reductions = self._reductions, deque()
        self._undecided.clear()
        self._used.clear()
        run_all(reduction.discard for reduction in reductions)

    def _settle(self, averages: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Give a gradient to every parameter that some rank used, and to no other: the same on all ranks."""
        undecided, self._undecided = self._undecided, []
        replicated, changed = self.averager.params, self.averager.changed
        flags: list[bool] = []
        trains: list[bool] = []
        for matrix in self._matrices:
            flags.append(matrix in self._used)
            trains.append(matrix.rest.requires_grad)
        for param in replicated:  # of ``averages`` this rank has no gradient yet
            flags.append(param.grad is not None)
        self._used.clear()
        comm = self._comm
        if len(comm.topology.ranks) > 1:
            if trains != self._trains or changed:  # most often they are as before
                self._note_trained(trains)
            self.verify()
            for number, (told, groups) in enumerate(self._options.items()):
                options = told()
                if options is not None:
                    described = options(groups)
                    if number:
                        described = [(f"{name} of optimizer {number}", value) for name, value in described]
                    comm.monitor.note_options(described)
            vote = Vote(flags, comm.control, comm.monitor, "vote on unused parameters")
            # All ranks look at the result at one place: here, if the host need not wait for it, otherwise in the next
            # vote. Before that, only those do that need it.
            is_needed = bool(undecided or averages or changed)
            is_seen = is_needed or vote.immediate
            if is_seen:
                flags = list(map(bool, vote.result().flags))
            self._last_vote = None if is_seen else vote
            if not is_needed:
                return
        keys = [id(m) for m in self._matrices] + [id(p) for p in replicated]
        used = {key for key, flag in zip(keys, flags, strict=True) if flag}
        for matrix, local in undecided:
            if id(matrix) in used:
                matrix.set_hooked_grad(local)
        for param, average in averages:
            if id(param) in used:
                param.grad = like_param(param, average)
        if changed:  # as on all other ranks, by that vote
            self._settle(self.averager.adopt())

    def compare(self, options: Options, groups: Sequence[int]) -> None:
        """With every vote compare what the method ``options`` says of an optimizer's ``groups``, while that lives."""
        self._options[weakref.WeakMethod(options)] = groups

    def _note_trained(self, trains: list[bool]) -> None:
        """Let the next vote compare which parameters are trained."""
        owned = {matrix.fqn: str(flag) for matrix, flag in zip(self._matrices, trains, strict=True)}
        trained = owned | self.averager.described()
        told = trained | {name: "False" for name in self._trained if name not in trained}
        self._comm.monitor.note_options((f"requires_grad of {name!r}", value) for name, value in told.items())
        if self.averager.changed:  # perhaps by one that has the same name, on all ranks or on none
            self._comm.monitor.note("parameters", "other parameters in the model, whose gradients dmuon averages")
        self._trains, self._trained = trains, trained

    def verify(self) -> None:
        """The last vote, if no conclusions were drawn yet; the host waits for it.

        Any rank may ask, perhaps alone: nothing follows from it.

        Raises:
            CollectiveError: by that vote, ranks had issued different collectives.
        """
        if self._last_vote is not None:
            self._last_vote.result()
