"""The gradients of one backward: reductions to owners, averages of what is replicated, and what nobody used.

Every rank takes part in every reduction, with zeros where it has no gradient ([Note: one order of collectives]). What
it receives for a parameter that it did not use is *undecided* until a vote has told whether any rank used it: then it
is the gradient, otherwise ``grad`` stays None, as it would in one process.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from dmuon.comm.agreement import Vote
from dmuon.comm.context import Comm
from dmuon.comm.monitor import run_all
from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.reduction import GradReduction
from dmuon.dedicated.replicated import GradAverager
from dmuon.platform.streams import HostCopy

__all__ = ["Gradients", "Landed"]

Landed = Callable[[Sequence[Tensor]], None]


class Gradients:
    """Gradients on their way; at most ``comm.options.outstanding_reductions`` buffers at once.

    Attributes:
        averager: of parameters that nobody shards; None until a forward has shown which these are.
        listeners: called with the parameters of this owner whose gradients have just arrived, as long as they live.
    """

    def __init__(self, comm: Comm, entries: Sequence[OwnedMatrix]) -> None:
        self._comm = comm
        self._entries = list(entries)
        self.averager: GradAverager | None = None
        self.listeners: list[weakref.WeakMethod[Landed]] = []
        self._reductions: deque[GradReduction] = deque()
        self._undecided: list[tuple[OwnedMatrix, Tensor]] = []
        self._used: set[int] = set()  # entries that got a gradient on this rank in this backward
        self._votes: HostCopy | None = None

    def reduce(self, buffer: OwnedBuffer, *, along_column: bool) -> None:
        """Start reducing the gradients of a buffer; waits for the oldest reduction if too many are under way."""
        while len(self._reductions) >= self._comm.options.outstanding_reductions:
            self._finish_oldest()
        for earlier in self._reductions:
            earlier.advance()
        reduction = GradReduction(buffer, along_column=along_column)
        self._used.update(key for key, used in reduction.used.items() if used)
        self._reductions.append(reduction)

    def _finish_oldest(self) -> None:
        reduction = self._reductions.popleft()
        self._undecided += reduction.finish()
        if self.listeners and reduction.whole:
            entries = [e for e in reduction.buffer.entries if e.owner == self._comm.position and reduction.used[id(e)]]
            owned = [entry.rest for entry in entries]
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
            self._settle(self.averager.finish() if self.averager is not None else [])
        else:
            self._used.clear()  # what waits for the next backward is marked as unreduced

    def discard(self) -> None:
        """Forget a backward that did not finish; waits for everything under way, whatever fails."""
        reductions, self._reductions = self._reductions, deque()
        self._undecided.clear()
        self._used.clear()
        run_all([r.discard for r in reductions] + ([self.averager.reset] if self.averager is not None else []))

    def _settle(self, averages: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Give a gradient to every parameter that some rank used, and to no other: the same on all ranks."""
        undecided, self._undecided = self._undecided, []
        replicated = self.averager.params if self.averager is not None else []
        missing = {id(param) for param, _ in averages}
        flags = [id(e) in self._used for e in self._entries]
        flags += [p.grad is not None and id(p) not in missing for p in replicated]
        self._used.clear()
        if len(self._comm.topology.ranks) > 1:
            votes = self._vote(flags)
            if not undecided and not averages:
                return  # this rank needs no other's vote: do not wait for them on the host
            flags = [*Vote.decode(votes.tolist()).flags]
        keys = [id(e) for e in self._entries] + [id(p) for p in replicated]
        used = {key for key, flag in zip(keys, flags, strict=True) if flag}
        for entry, local in undecided:
            if id(entry) in used:
                entry.set_grad(self._comm, local)
            else:
                entry.drop_unreduced()
        for param, average in averages:
            if id(param) in used and self.averager is not None:
                self.averager.set_grad(param, average)

    def _vote(self, flags: list[bool]) -> HostCopy:
        """Vote on the parameters that any rank used, and on whether all issued the same collectives so far.

        The second is checked at once if the host need not wait for it, otherwise in the next backward.
        """
        self.verify()
        votes = Vote(flags, self._comm.monitor.digest).encode()
        if self._comm.device.type != "cpu":
            votes = votes.pin_memory().to(self._comm.device, non_blocking=True)
        with self._comm.monitor.watch("vote on unused parameters"):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._comm.control)
        copy = HostCopy(votes)
        if copy.immediate:
            self._check(copy)
        else:
            self._votes = copy
        return copy

    def verify(self) -> None:
        """Raise if, by the last vote, ranks had issued different collectives; the host waits for that vote."""
        votes, self._votes = self._votes, None
        if votes is not None:
            self._check(votes)

    def _check(self, votes: HostCopy) -> None:
        if not Vote.decode(votes.tolist()).same_collectives:
            self._comm.monitor.disagree()
