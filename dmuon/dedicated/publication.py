"""What one step publishes: each buffer as soon as its masters are up to date, in the order of the next forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dmuon.comm.context import Comm
from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.kernels import streams_of


def fills_wait(comm: Comm) -> bool:
    """On the CPU a fill that follows a publication waits for it; the next forward starts it, not the step."""
    return comm.column is not None and comm.row is not None and streams_of(comm.device) is None


class Publications:
    """Starts publications, and the fills that follow them.

    A publication waits for its turn even if it is ready, since its place among the collectives must be the same on all
    ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._generation = 0
        self._coming: deque[OwnedBuffer] = deque()  # that this step has yet to publish, in forward order
        self._outdated: set[int] = set()  # ids of resting parameters that this step has yet to update
        self._fills: deque[OwnedBuffer] = deque()  # published, to be filled in this step
        self._fill_budget = 0

    @property
    def awaited(self) -> bool:
        """Whether the step has masters yet to update."""
        return bool(self._outdated)

    def begin(self, buffers: Iterable[OwnedBuffer], outdated: set[int], generation: int) -> None:
        """Publish what of ``buffers`` holds nothing that is ``outdated``; the rest follows."""
        self._generation, self._outdated = generation, outdated
        self._coming = deque(buffers)
        self._fills.clear()
        self._fill_budget = self._comm.options.prefetch
        self._proceed()

    def updated(self, ids: Iterable[int]) -> None:
        """The masters of these resting parameters have their new values."""
        self._outdated.difference_update(ids)
        self._proceed()

    def end(self) -> None:
        """All masters have their new values."""
        self._outdated.clear()
        self._proceed()

    def forget_fills(self) -> None:
        """Start no fill that was put off."""
        self._fills.clear()

    def _proceed(self) -> None:
        while self._coming and not any(id(e.rest) in self._outdated for e in self._coming[0].matrices):
            buffer = self._coming.popleft()
            buffer.start_publication(self._generation)
            if (buffer.keep or self._fill_budget > 0) and not fills_wait(self._comm):
                self._fill_budget -= 1
                self._fills.append(buffer)
        # On an accelerator, whoever waits in a collective takes units from the updates that it has yet to compute.
        if not self._outdated or streams_of(self._comm.device) is None:
            while self._fills:
                self._fills.popleft().start_fill(self._generation)
