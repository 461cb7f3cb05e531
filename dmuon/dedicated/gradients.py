"""The gradients of one backward: reductions to owners, averages of what is replicated, and what nobody used.

Every rank takes part in every reduction, with zeros where it has no gradient ([Note: one order of collectives]). What
it receives for a parameter that it did not use is *undecided* until a vote has told whether any rank used it: then it
is the gradient, otherwise ``grad`` stays None, as it would in one process.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor
from torch.profiler import record_function

from dmuon.comm.agreement import Election, Verdict, Vote
from dmuon.comm.context import Comm, Lanes
from dmuon.comm.lines import Parts, Works, reduce, scratch
from dmuon.comm.monitor import Pending, run_all
from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.part import Part
from dmuon.dedicated.replicated import GradAverager
from dmuon.kernels import streams_of
from dmuon.layout.buffer import Transport
from dmuon.platform.streams import Origin
from dmuon.step.residency import Options, like_param

Landed = Callable[[Sequence[Tensor]], None]


class GradReduction:
    """Averages the gradients of one buffer to their owners; a rank without a gradient contributes zeros.

    What an owner receives becomes the gradient, without a copy where the dtypes agree.

    Args:
        along_column: ``False`` stops behind the row; what arrives there is added to ``partial`` of each matrix, and
            becomes part of the next reduction that goes on.
        origins: by ``id`` of matrices, the streams on which their gradients came; those of this buffer are taken out.

    Attributes:
        used: by ``id``, the matrices that this rank has a gradient for.
        whole: it ends at the owners.
    """

    def __init__(
        self, buffer: OwnedBuffer, *, along_column: bool = True, origins: dict[int, Origin] | None = None
    ) -> None:
        self.buffer = buffer
        self._comm = comm = buffer.comm
        self.whole = along_column or comm.column is None
        self._stage_two = comm.column if along_column else None
        self._pending: Pending | None = None
        self._stage_one_ended: torch.Event | None = None  # and what it brought was passed on
        self._origin = Origin(comm.device)
        self._in_flight: list[Tensor] = []  # until the collectives have ended: [Note: who keeps a tensor alive]
        layout = buffer.layout
        with record_function(f"dmuon::reduce {buffer.name}"), torch.no_grad():
            region, parts = scratch(layout.row, layout.segments, buffer.reduce_dtype, comm.device)
            self.used = self._pack(parts, {} if origins is None else origins)
            self._in_flight += [region, *parts.values()]
            self._result = parts.get(comm.at.s, region[:0])  # of the last stage that was started
            if comm.row is not None:
                with comm.reduce_stream.beside():
                    self._result = self._start(comm.row, "along the row", layout.row, region, parts)
            if comm.row is None or streams_of(comm.device) is not None:
                self.advance()  # on the CPU this would wait: the next buffer or the end of backward advances it

    def _pack(self, parts: Parts, origins: dict[int, Origin]) -> set[int]:
        """Move the gradients of this rank into ``parts``, one per shard; tells which matrices had one.

        A user may run a part of a block on a stream of his own. Autograd accumulates gradients there, and lets the
        stream that called backward wait for them only at the end. So this stream waits before it reads them; and those
        wait for it before the gradients are freed, whose memory goes back to them.
        """
        made = [origins.pop(key) for key in map(id, self.buffer.matrices) if key in origins]
        for origin in made:
            origin.join()
        used: set[int] = set()
        pairs: list[tuple[Tensor, Tensor]] = []
        grads = {id(matrix): matrix.full_grad() for matrix in self.buffer.matrices}
        for matrix, part, (start, end) in self.buffer.spans:
            grad = grads[id(matrix)]
            if grad is not None or matrix.has_partial:
                used.add(id(matrix))
            if start == end:  # another tensor-parallel rank has it, and perhaps nothing goes to that owner
                continue
            first = self.buffer.layout.segments[part.at.s][0]
            slot = parts[part.at.s][start - first : end - first].view(part.local_shape)
            if grad is None:
                slot.zero_()
            else:
                pairs.append((slot, part.take(grad)))
        for matrix in self.buffer.matrices:
            matrix.full.grad = None
            matrix.unreduced = False
            for part in matrix.parts:
                if part.at.s != self._comm.at.s:
                    part.partial = None  # another rank of the row has it
        if pairs:
            torch._foreach_copy_([slot for slot, _ in pairs], [grad for _, grad in pairs])
        for origin in made:
            origin.await_users()
        return used

    def _start(self, lanes: Lanes, direction: str, transport: Transport, region: Tensor, parts: Parts) -> Tensor:
        """Start one stage.

        Returns:
            The tensor in which its result arrives.
        """
        results: list[Tensor] = []

        def launch() -> Works:
            result, works = reduce(transport, region, parts, lanes.gradients)
            results.append(result)
            return works

        what = f"reduce of block {self.buffer.name!r} {direction}"
        self._pending = self._comm.monitor.start("reduce", what, launch)
        return results[0]

    def advance(self) -> None:
        """Start the second stage, if there is one, behind the first. On the CPU this waits for the first."""
        lanes, self._stage_two = self._stage_two, None
        if lanes is None:
            return
        layout, at = self.buffer.layout, self._comm.at
        with torch.no_grad(), self._comm.reduce_stream.beside():
            self._wait()
            column = layout.parts(at.s)
            first = column.start
            for part, (start, end) in self._in_segment():
                if part.partial is not None:
                    self._result[start - first : end - first].view(part.local_shape).add_(part.partial)
                    self._in_flight.append(part.partial)
                    part.partial = None
            segment = self._result[: column.size]  # without its padding
            parts = {r: segment[start - first : end - first] for r, (start, end) in column.filled.items()}
            self._in_flight.append(segment)
            self._result = self._start(lanes, "along the column", layout.column, segment, parts)
            self._stage_one_ended = self._comm.reduce_stream.mark()

    def _in_segment(self) -> list[tuple[Part, tuple[int, int]]]:
        """The matrices that this rank's column owns, and where they lie in the buffer."""
        return [(part, span) for _, part, span in self.buffer.spans if part.at.s == self._comm.at.s]

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _wait_for_all(self) -> None:
        """Wait for both stages, and for no later reduction.

        A rank that takes no part in the second stage has nothing pending then.
        """
        self._wait()
        self._comm.reduce_stream.join_up_to(self._stage_one_ended)
        self._origin.await_users()
        self._in_flight = []

    def discard(self) -> None:
        """Wait, and forget the result."""
        self._stage_two = None
        self._wait_for_all()

    def finish(self) -> list[tuple[OwnedMatrix, Tensor]]:
        """Wait, and set ``rest.grad`` of the matrices that this rank has used.

        Returns:
            ``(matrix, local gradient)`` of the others: whether another rank has used them is not known yet. Of those
            with hooks too, so that all ranks run them in one order.
        """
        self.advance()
        with record_function(f"dmuon::wait_reduce {self.buffer.name}"):
            self._wait_for_all()
        undecided = self._hand_over() if self.whole else self._keep_partial()
        self._origin.await_users()  # which have just read what arrived
        return undecided

    def _hand_over(self) -> list[tuple[OwnedMatrix, Tensor]]:
        if self._result.untyped_storage().nbytes() > self._result.nbytes:
            self._result = self._result.clone()  # a view of what others own would keep that alive with the gradients
        undecided = []
        first = self.buffer.layout.parts(self._comm.at.s)[self._comm.at.r][0]
        slots: dict[int, list[Tensor]] = {id(matrix): [] for matrix in self.buffer.matrices}
        for matrix, part, (start, end) in self.buffer.spans:
            if part.owner == self._comm.position:
                slots[id(matrix)].append(self._result[start - first : end - first])
        for matrix in self.buffer.matrices:
            master, arrived = matrix.master, slots[id(matrix)]
            if len(arrived) > 1:
                local = torch.cat(arrived).to(master.dtype)
            elif arrived:
                local = arrived[0].view(master.shape).to(master.dtype)
            else:
                local = master.new_empty(master.shape)
            if id(matrix) in self.used and not matrix.has_hooks:
                matrix.set_grad(local)
            elif matrix.full.requires_grad:
                undecided.append((matrix, local))
        return undecided

    def _keep_partial(self) -> list[tuple[OwnedMatrix, Tensor]]:
        first = self.buffer.layout.segments[self._comm.at.s][0]
        for matrix, part, (start, end) in self.buffer.spans:
            is_here = part.at.s == self._comm.at.s
            average = self._result[start - first : end - first] if is_here else self._result[:0]
            # What only others on the row have used must not be lost. Looking at the values can stall an accelerator.
            if id(matrix) not in self.used and not (is_here and bool(average.any())):
                continue
            slot = average.view(part.local_shape if is_here else (0, part.local_shape[1]))
            part.partial = slot if part.partial is None else part.partial.add_(slot)
        return []


class Gradients:
    """Gradients on their way; at most ``comm.options.outstanding_reductions`` buffers at once.

    Attributes:
        averager: of parameters that nobody shards.
        listeners: called with the parameters of this owner whose gradients have just arrived, as long as they live.
    """

    def __init__(
        self, comm: Comm, matrices: Sequence[OwnedMatrix], arrived: weakref.WeakMethod[Callable[[], bool]]
    ) -> None:
        self._comm = comm
        self._matrices = list(matrices)
        self.averager = GradAverager(comm, matrices, arrived)
        self.listeners: list[weakref.WeakMethod[Landed]] = []
        self._reductions: deque[GradReduction] = deque()
        self._undecided: list[tuple[OwnedMatrix, Tensor]] = []
        self._used: set[int] = set()  # matrices that got a gradient on this rank in this backward
        self._election: Election | None = None
        self._trained: dict[str, str] = {}  # by name, whether it was trained in the last vote
        self._options: list[tuple[weakref.WeakMethod[Options], Sequence[int]]] = []
        self._origins: dict[int, Origin] = {}  # by ``id``, of gradients that no reduction has taken yet
        if streams_of(comm.device) is not None:
            for matrix in self._matrices:
                # Weak references, since the collector cannot see through such hooks and would never free the model.
                hook = partial(_note_origin, weakref.ref(self), id(matrix))
                matrix.full.register_post_accumulate_grad_hook(hook)

    def note_origin(self, key: int) -> None:
        """The gradient of the matrix with this ``id`` has been accumulated on the current stream."""
        self._origins[key] = Origin(self._comm.device)

    def join(self, matrices: Sequence[OwnedMatrix]) -> None:
        """What is queued from now on runs after the gradients of ``matrices`` were accumulated, on whatever stream."""
        for matrix in matrices if self._origins else ():
            if id(matrix) in self._origins:
                self._origins[id(matrix)].join()

    def reduce(self, buffer: OwnedBuffer, *, along_column: bool) -> None:
        """Start reducing the gradients of a buffer; waits for the oldest reduction if too many are under way."""
        while len(self._reductions) >= self._comm.options.outstanding_reductions:
            self._finish_oldest()
        for earlier in self._reductions:
            earlier.advance()
        reduction = GradReduction(buffer, along_column=along_column, origins=self._origins)
        self._used |= reduction.used
        self._reductions.append(reduction)

    def _finish_oldest(self) -> None:
        reduction = self._reductions.popleft()
        self._undecided += reduction.finish()
        if self.listeners and reduction.whole:
            used = [m for m in reduction.buffer.matrices if id(m) in reduction.used and not m.has_hooks]
            owned = [matrix.rest for matrix in used if matrix.mine]
            self.listeners = [listener for listener in self.listeners if listener() is not None]
            for listener in self.listeners:
                landed = listener()
                if landed is not None and owned:
                    landed(owned)

    def finish(self, *, settle: bool) -> None:
        """Wait for everything under way.

        Args:
            settle: gradients are whole now: agree on what is unused, and average what is replicated.
        """
        while self._reductions:
            self._finish_oldest()
        if settle:
            self._settle(self.averager.finish())
        else:
            self._used.clear()  # what waits for the next backward is marked as unreduced

    def discard(self) -> None:
        """Forget a backward that did not finish; waits for everything under way, whatever fails."""
        reductions, self._reductions = self._reductions, deque()
        self._undecided.clear()
        self._used.clear()
        run_all([*(reduction.discard for reduction in reductions), self.averager.reset])

    def _settle(self, averages: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Give a gradient to every parameter that some rank used, and to no other: the same on all ranks."""
        undecided, self._undecided = self._undecided, []
        replicated, changed = self.averager.params, self.averager.changed
        missing = {id(param) for param, _ in averages}
        flags = [id(m) in self._used for m in self._matrices]
        flags += [p.grad is not None and id(p) not in missing for p in replicated]
        self._used.clear()
        if len(self._comm.topology.ranks) > 1:
            self._note_trained()
            election = self._vote(flags, "vote on unused parameters")
            if not undecided and not averages and not changed:
                return  # this rank needs no other's vote: do not wait for them on the host
            flags = [bool(flag) for flag in election.verdict().flags]
        keys = [id(m) for m in self._matrices] + [id(p) for p in replicated]
        used = {key for key, flag in zip(keys, flags, strict=True) if flag}
        for matrix, local in undecided:
            if id(matrix) in used:
                matrix.set_grad(local)
        for param, average in averages:
            if id(param) in used:
                param.grad = like_param(param, average)
        if changed:  # as on all other ranks, by that vote
            self._settle(self.averager.adopt())

    def _vote(self, flags: Sequence[int], what: str) -> Election:
        """Vote on ``flags``, on options, and on whether all issued the same collectives so far.

        The verdict is looked at once if the host need not wait for it, otherwise in the next vote: on all ranks alike.
        """
        self._conclude()
        self._note_options()
        comm = self._comm
        vote = Vote(flags, comm.monitor.digest)
        self._election = election = Election(vote, comm.control, comm.monitor, comm.device, what)
        if election.immediate:
            self._conclude()
        return election

    def compare(self, options: Options, groups: Sequence[int]) -> None:
        """With every vote compare what the method ``options`` says of an optimizer's ``groups``, while that lives."""
        known = [i for i, (told, _) in enumerate(self._options) if told() == options]
        for i in known:
            self._options[i] = self._options[i][0], groups
        if not known:
            self._options.append((weakref.WeakMethod(options), groups))

    def _note_options(self) -> None:
        for number, (told, groups) in enumerate(self._options):
            options = told()
            if options is not None:
                of_which = f" of optimizer {number}" if number else ""
                self._comm.monitor.note_options((f"{name}{of_which}", value) for name, value in options(groups))

    def _note_trained(self) -> None:
        """Let the next vote compare which parameters are trained; most often they are as before."""
        owned = {matrix.fqn: str(matrix.rest.requires_grad) for matrix in self._matrices}
        if owned.items() <= self._trained.items() and not self.averager.changed:
            return
        trained = owned | self.averager.described()
        told = trained | {name: "False" for name in self._trained if name not in trained}
        self._comm.monitor.note_options((f"requires_grad of {name!r}", value) for name, value in told.items())
        if self.averager.changed:  # perhaps by one that has the same name, on all ranks or on none
            self._comm.monitor.note("parameters", "other parameters in the model, whose gradients dmuon averages")
        self._trained = trained

    def verify(self) -> Verdict | None:
        """The last vote, if no conclusions were drawn yet; the host waits for it.

        Any rank may ask, perhaps alone: nothing follows from it.

        Raises:
            CollectiveError: by that vote, ranks had issued different collectives.
        """
        election, self._election = self._election, None
        if election is None:
            return None
        verdict = election.verdict()
        self._election = election
        return verdict

    def _conclude(self) -> None:
        """Draw the conclusions of the last vote; all ranks do at one place."""
        self.verify()
        self._election = None


def _note_origin(gradients: weakref.ref[Gradients], key: int, _param: Tensor) -> None:
    alive = gradients()
    if alive is not None:
        alive.note_origin(key)
