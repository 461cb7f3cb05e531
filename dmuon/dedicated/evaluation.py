"""Passes without gradients: ranks that need each other compare in which order they have run blocks."""

from __future__ import annotations

import zlib

import torch.distributed as dist

from dmuon.comm.agreement import Election, Vote
from dmuon.comm.context import Comm
from dmuon.dedicated.block import Block


class Evaluations:
    """What backward's vote cannot notice, since no backward follows.

    Ranks that run blocks in different orders take one block's weights, or its part of a sum, for another's. One small
    vote at the end of a pass tells; the end is that of the root's forward, or, where blocks are called without the
    root, the second run of a block. It goes along the row, over the group of gradients, which is idle then, and on what
    was filled: without fills (weights that are kept) the ranks of a row need nothing of each other. Tensor-parallel
    ranks always do, and vote among themselves on the blocks that ran. Others may evaluate more or fewer batches.

    On an accelerator the host does not wait: the next pass looks at the verdict of the last one.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._ran: dict[Block, None] = {}  # an ordered set
        self._compared = 0  # how many fills were
        self._elections: dict[str, Election] = {}  # that are under way

    def restart(self) -> None:
        """Another pass begins at the root."""
        self._ran.clear()

    def run(self, block: Block) -> None:
        """``block`` is about to run without gradients."""
        if block in self._ran:
            self.end()
        self._ran[block] = None

    def end(self) -> None:
        """Vote, if there is something to compare. Collective along the row, and over tensor-parallel ranks.

        Raises:
            CollectiveError: the ranks issued different collectives, or ran blocks in different orders.
        """
        ran = "blocks " + " ".join(repr(block.name) for block in self._ran)
        any_ran = bool(self._ran)
        self._ran.clear()
        comm, fills = self._comm, self._comm.monitor.count("fill")
        if comm.row is not None and fills != self._compared:
            self._compared = fills
            self._elect("row", comm.row.gradients, comm.monitor.digest)
        if comm.tensor is not None and any_ran:
            self._elect("tensor", comm.tensor.group, zlib.crc32(ran.encode()) & 0x7FFFFFFF, ran)

    def _elect(self, line: str, group: dist.ProcessGroup, digest: int, compared: str = "") -> None:
        self._conclude(line)
        comm = self._comm
        what = "comparison of a forward without gradients"
        election = self._elections[line] = Election(Vote((), digest), group, comm.monitor, comm.device, what, compared)
        if election.immediate:
            self._conclude(line)

    def _conclude(self, line: str) -> None:
        election = self._elections.pop(line, None)
        if election is not None:
            election.verdict()
