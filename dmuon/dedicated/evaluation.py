"""Passes without gradients: the ranks of a row compare in which order they have filled blocks."""

from __future__ import annotations

import torch.distributed as dist

from dmuon.comm.agreement import Vote
from dmuon.comm.context import Comm
from dmuon.dedicated.block import Block
from dmuon.platform.streams import HostCopy


class Evaluations:
    """What backward's vote cannot notice, since no backward follows.

    Ranks that run blocks in different orders take one block's weights for another's. One small vote at the end of a
    pass tells; the end is that of the root's forward, or, where blocks are called without the root, the second run of a
    block. It goes along the row, over the group of gradients, which is idle then: other rows share no fill with this
    one, and may evaluate more or fewer batches. Without fills (weights that are kept) there is nothing to compare.

    On an accelerator the host does not wait: the next pass looks at the verdict of the last one.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._ran: set[Block] = set()
        self._compared = 0  # how many fills were
        self._votes: HostCopy | None = None

    def restart(self) -> None:
        """Another pass begins at the root."""
        self._ran.clear()

    def run(self, block: Block) -> None:
        """``block`` is about to run without gradients."""
        if block in self._ran:
            self.end()
        self._ran.add(block)

    def end(self) -> None:
        """Vote, if anything was filled since the last vote. Collective along the row.

        Raises:
            CollectiveError: the ranks issued different collectives.
        """
        self._ran.clear()
        row, monitor = self._comm.row, self._comm.monitor
        fills = monitor.count("fill")
        if row is None or fills == self._compared:
            return
        self._compared = fills
        self._conclude()
        votes = Vote((), monitor.digest).encode().to(self._comm.device)
        with monitor.watch("comparison of a forward without gradients"):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=row.gradients)
        self._votes = HostCopy(votes)
        if self._votes.immediate:
            self._conclude()

    def _conclude(self) -> None:
        votes, self._votes = self._votes, None
        if votes is not None and not Vote.decode(votes.tolist()).same_collectives:
            self._comm.monitor.disagree()
