"""Gradients of one buffer on their way to the owners: averaged along the row, then along the column."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dmuon.comm.monitor import Pending
from dmuon.comm.transport import Line, reduce, scratch
from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.layout.buffer import Transport

__all__ = ["GradReduction"]


class GradReduction:
    """Averages the gradients of one buffer to their owners; a rank without a gradient contributes zeros.

    What an owner receives becomes the gradient, without a copy where the dtypes agree.

    Args:
        along_column: ``False`` stops behind the row; what arrives there is added to ``partial`` of each entry, and
            becomes part of the next reduction that goes on.

    Attributes:
        used: by ``id`` of the entry, whether this rank has a gradient for it.
        whole: it ends at the owners.
    """

    def __init__(self, buffer: OwnedBuffer, *, along_column: bool = True) -> None:
        self.buffer = buffer
        self._comm = comm = buffer.comm
        self.whole = along_column or comm.column is None
        self._stage_two = comm.column if along_column else None
        self._pending: Pending | None = None
        self._in_flight: list[Tensor] = []  # until the collectives have ended: [Note: who keeps a tensor alive]
        layout = buffer.layout
        with record_function(f"dmuon::reduce {buffer.name}"), torch.no_grad():
            sizes = [end - start for start, end in layout.segments]
            region, parts = scratch(layout.row, sizes, buffer.reduce_dtype, comm.device)
            self.used = self._pack(parts)
            self._in_flight += [region, *parts]
            self._result = parts[comm.at.s]  # of the last stage that was started
            if comm.row is not None:
                with comm.reduce_stream.beside():
                    self._result = self._start(comm.row, "along the row", layout.row, region, parts)
            if comm.row is None or comm.device.type != "cpu":
                self.advance()  # on the CPU this would wait: the next buffer or the end of backward advances it

    def _pack(self, parts: list[Tensor]) -> dict[int, bool]:
        """Move the gradients of this rank into ``parts``, one per shard; tells which entries had one."""
        used: dict[int, bool] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for entry, (start, end) in zip(self.buffer.entries, self.buffer.layout.slots, strict=True):
            first = self.buffer.layout.segments[entry.at.s][0]
            slot = parts[entry.at.s][start - first : end - first].view(entry.local_shape)
            grad = entry.full_grad()
            used[id(entry)] = grad is not None or entry.partial is not None
            if grad is None:
                slot.zero_()
            else:
                pairs.append((slot, grad))
            entry.full.grad = None
            entry.unreduced = False
        if pairs:
            torch._foreach_copy_([slot for slot, _ in pairs], [grad for _, grad in pairs])
        return used

    def _start(self, line: Line, direction: str, transport: Transport, region: Tensor, parts: list[Tensor]) -> Tensor:
        """Start one stage.

        Returns:
            The tensor in which its result arrives.
        """
        results: list[Tensor] = []

        def launch() -> list[dist.Work]:
            result, works = reduce(transport, region, parts, line)
            results.append(result)
            return works

        what = f"reduce of block {self.buffer.name!r} {direction}"
        self._pending = self._comm.monitor.start("reduce", what, launch)
        return results[0]

    def advance(self) -> None:
        """Start the second stage, if there is one, behind the first. On the CPU this waits for the first."""
        line, self._stage_two = self._stage_two, None
        if line is None:
            return
        layout, at = self.buffer.layout, self._comm.at
        with torch.no_grad(), self._comm.reduce_stream.beside():
            self._wait()
            first = layout.segments[at.s][0]
            for entry, (start, end) in self._in_segment():
                if entry.partial is not None:
                    self._result[start - first : end - first].view(entry.local_shape).add_(entry.partial)
                    self._in_flight.append(entry.partial)
                    entry.partial = None
            segment = self._result[: layout.parts[at.s][-1][1] - first]  # without its padding
            parts = [segment[start - first : end - first] for start, end in layout.parts[at.s]]
            self._in_flight.append(segment)
            self._result = self._start(line, "along the column", layout.column, segment, parts)

    def _in_segment(self) -> list[tuple[OwnedMatrix, tuple[int, int]]]:
        """The entries that this rank's column owns, and where they lie in the buffer."""
        spans = zip(self.buffer.entries, self.buffer.layout.slots, strict=True)
        return [(entry, span) for entry, span in spans if entry.at.s == self._comm.at.s]

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _wait_for_all(self) -> None:
        """Wait for both stages.

        A rank with nothing to send in the second has nothing pending then, and joins the first by its stream.
        """
        self._wait()
        self._comm.reduce_stream.join()
        self._in_flight = []

    def discard(self) -> None:
        """Wait, and forget the result."""
        self._stage_two = None
        self._wait_for_all()

    def finish(self) -> list[tuple[OwnedMatrix, Tensor]]:
        """Wait, and set ``rest.grad`` of the entries that this rank has used.

        Returns:
            ``(entry, local gradient)`` of the others: whether another rank has used them is not known yet.
        """
        self.advance()
        with record_function(f"dmuon::wait_reduce {self.buffer.name}"):
            self._wait_for_all()
        if not self.whole:
            self._keep_partial()
            return []
        if self._result.untyped_storage().nbytes() > self._result.nbytes:
            self._result = self._result.clone()  # a view of what others own would keep that alive with the gradients
        undecided = []
        first = self.buffer.layout.parts[self._comm.at.s][self._comm.at.r][0]
        for entry, (start, end) in zip(self.buffer.entries, self.buffer.layout.slots, strict=True):
            master = entry.master
            if entry.owner == self._comm.position:
                local = self._result[start - first : end - first].view(master.shape).to(master.dtype)
            else:
                local = master.new_empty(master.shape)
            if not entry.full.requires_grad and not self.used[id(entry)]:
                continue
            if self.used[id(entry)]:
                entry.set_grad(self._comm, local)
            else:
                undecided.append((entry, local))
        return undecided

    def _keep_partial(self) -> None:
        first = self.buffer.layout.segments[self._comm.at.s][0]
        spans = {id(entry): span for entry, span in self._in_segment()}
        for entry in self.buffer.entries:
            start, end = spans.get(id(entry), (first, first))
            average = self._result[start - first : end - first]
            # What only others on the row have used must not be lost. Looking at the values can stall an accelerator.
            if not self.used[id(entry)] and (id(entry) not in spans or not bool(average.any())):
                continue
            entry.hold()
            if id(entry) in spans:
                slot = average.view(entry.local_shape)
                entry.partial = slot if entry.partial is None else entry.partial.add_(slot)
