"""Gradients of one group on their way to the owners: averaged along the row, then along the column."""

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
    """Averages the gradients of one group to their owners, zeros where there is none.

    What an owner receives becomes the gradient, without a copy where the dtypes agree.

    Args:
        along_column: ``False`` stops at the rows; what arrives there is added to ``partial`` of each entry, and joins
            the next reduction that goes on.

    Attributes:
        used: by ``id`` of the entry, whether this rank has a gradient for it.
        whole: it ends at the owners.
    """

    def __init__(self, group: OwnedBuffer, *, along_column: bool = True) -> None:
        self.group = group
        self._comm = group.comm
        self.whole = along_column or group.comm.column is None
        self._stage_two = group.comm.column if along_column else None
        self._pending: Pending | None = None
        self._in_flight: list[Tensor] = []  # until the collectives have finished
        layout = group.layout
        with record_function(f"dmuon::reduce {group.name}"), torch.no_grad():
            sizes = [end - start for start, end in layout.segments]
            region, parts = scratch(layout.row, sizes, group.reduce_dtype, group.comm.device)
            self.used = self._pack(parts)
            self._in_flight += [region, *parts]
            self._mine = parts[group.comm.at.s]
            if group.comm.row is not None:
                with group.comm.reduce_stream.beside():
                    self._mine = self._start(group.comm.row, "along the row", layout.row, region, parts)
            if group.comm.row is None or group.comm.device.type != "cpu":
                self.advance()  # on the CPU this would wait: the next group or the end of backward advances it

    def _pack(self, parts: list[Tensor]) -> dict[int, bool]:
        used: dict[int, bool] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for entry, (start, end) in zip(self.group.entries, self.group.layout.slots, strict=True):
            first = self.group.layout.segments[entry.at.s][0]
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

    def _start(self, lane: Line, where: str, transport: Transport, region: Tensor, parts: list[Tensor]) -> Tensor:
        """Start one stage.

        Returns:
            Where its result arrives.
        """
        arriving: list[Tensor] = []

        def launch() -> list[dist.Work]:
            out, works = reduce(transport, region, parts, lane)
            arriving.append(out)
            return works

        what = f"reduce of block {self.group.name!r} {where}"
        self._pending = self._comm.monitor.start("reduce", what, launch)
        return arriving[0]

    def advance(self) -> None:
        """Let the second stage, if there is one, follow the first. On the CPU this waits for the first."""
        lane, self._stage_two = self._stage_two, None
        if lane is None:
            return
        layout, at = self.group.layout, self._comm.at
        with torch.no_grad(), self._comm.reduce_stream.beside():
            self._wait()
            first = layout.segments[at.s][0]
            for entry, (start, end) in self._in_my_segment():
                if entry.partial is not None:
                    self._mine[start - first : end - first].view(entry.local_shape).add_(entry.partial)
                    self._in_flight.append(entry.partial)
                    entry.partial = None
            segment = self._mine[: layout.parts[at.s][-1][1] - first]  # without its padding
            parts = [segment[start - first : end - first] for start, end in layout.parts[at.s]]
            self._in_flight.append(segment)
            self._mine = self._start(lane, "along the column", layout.column, segment, parts)

    def _in_my_segment(self) -> list[tuple[OwnedMatrix, tuple[int, int]]]:
        spans = zip(self.group.entries, self.group.layout.slots, strict=True)
        return [(entry, span) for entry, span in spans if entry.at.s == self._comm.at.s]

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _wait_for_all(self) -> None:
        """Also for a first stage whose successor had nothing to send here: only its own stream has waited for that."""
        self._wait()
        self._comm.reduce_stream.join()
        self._in_flight = []

    def discard(self) -> None:
        """Wait, and forget the result."""
        self._stage_two = None
        self._wait_for_all()

    def finish(self) -> list[tuple[OwnedMatrix, Tensor]]:
        """Wait, and set ``rest.grad`` of what got a gradient here.

        Returns:
            ``(entry, local gradient)`` of what got none on this rank: whether another rank used it is not known yet.
        """
        self.advance()
        with record_function(f"dmuon::wait_reduce {self.group.name}"):
            self._wait_for_all()
        if not self.whole:
            self._keep_partial()
            return []
        if self._mine.untyped_storage().nbytes() > self._mine.nbytes:
            self._mine = self._mine.clone()  # a view of what others own would keep that alive with the gradients
        undecided = []
        first = self.group.layout.parts[self._comm.at.s][self._comm.at.r][0]
        for entry, (start, end) in zip(self.group.entries, self.group.layout.slots, strict=True):
            master = entry.master
            if entry.owner == self._comm.position:
                local = self._mine[start - first : end - first].view(master.shape).to(master.dtype)
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
        first = self.group.layout.segments[self._comm.at.s][0]
        mine = {id(entry): span for entry, span in self._in_my_segment()}
        for entry in self.group.entries:
            start, end = mine.get(id(entry), (first, first))
            arrived = self._mine[start - first : end - first]
            # What only others on the row have used is not lost; looking at the values can wait on an accelerator.
            if not self.used[id(entry)] and (id(entry) not in mine or not bool(arrived.any())):
                continue
            entry.hold()
            if id(entry) in mine:
                slot = arrived.view(entry.local_shape)
                entry.partial = slot if entry.partial is None else entry.partial.add_(slot)
