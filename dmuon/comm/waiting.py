"""Work that other ranks wait for: as long as whoever does it is alive, and not as long as one collective may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from dmuon.comm.lifetime import forget_groups
from dmuon.comm.monitor import CollectiveError
from dmuon.comm.process_groups import named, this_rank

_T = TypeVar("_T")

_TICK_SECONDS = 0.5  # far less than any time limit of a group
_LEAVING_SECONDS = 5.0  # for the others to hear that this rank leaves


def run_awaited(group: dist.ProcessGroup, device: torch.device, what: str, work: Callable[[], _T]) -> _T:
    """What ``work`` returns, once it has ended on all ranks. Collective over ``group``, which ``work`` must not use.

    While it runs, a thread takes part in a small collective twice a second. So a rank that waits sees that another one
    has died, and neither the time limit of the group nor that of its back end limits the work. A rank that is
    interrupted tells the others, and does not wait for them.

    Args:
        what: names the work, for messages.

    Raises:
        CollectiveError: another rank was interrupted or is gone; names it.
    """
    if dist.get_world_size(group) == 1:
        return work()
    ticks = _Ticks(group, device, what)
    ticks.start()
    try:
        result = work()
        ticks.end("done")
        ticks.join()
    except BaseException:  # an interrupt, in the work or while this waited; what else work raises ends this rank, too
        ticks.end("left")
        ticks.join(_LEAVING_SECONDS)
        forget_groups()
        raise
    if ticks.fault is not None:
        forget_groups()  # as the rank that left
        raise ticks.fault
    return result


class _Ticks(threading.Thread):
    """A small collective now and then, until all ranks are done, or one of them has left."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, what: str) -> None:
        super().__init__(name="dmuon-ticks", daemon=True)
        self.fault: Exception | None = None
        self._group, self._device, self._what = group, device, what
        self._working, self._left = True, False
        self._flags: torch.Tensor | None = None  # whoever is interrupted keeps it to the end of the process
        self._ended = threading.Event()

    def end(self, how: str) -> None:
        self._working, self._left = False, how == "left"
        self._ended.set()

    def run(self) -> None:
        try:
            with named(self._what):
                working, leaver = True, 0
                while working and not leaver:
                    self._ended.wait(_TICK_SECONDS)
                    said = [int(self._working), this_rank() + 1 if self._left else 0]
                    self._flags = torch.tensor(said, dtype=torch.int32, device=self._device)
                    dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group)
                    working, leaver = self._flags.tolist()
            if leaver:
                raise CollectiveError(
                    f"rank {this_rank()}: {self._what} was given up, because rank {leaver - 1} was interrupted or "
                    "failed: see its log"
                )
        except Exception as error:  # raised where the work has ended
            self.fault = error
