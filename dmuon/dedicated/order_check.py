"""Forward passes: ranks that need each other compare in which order they have run blocks."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from dmuon.comm.agreement import Election, Vote, require_same
from dmuon.comm.context import Comm
from dmuon.dedicated.block import Block
from dmuon.platform.torch_private import is_sharded_by_fsdp


class OrderCheck:
    """What backward's vote cannot notice: no backward follows, or nothing of dmuon's travels.

    Ranks that run blocks in different orders take one block's weights, or its part of a sum, for another's. One small
    vote at the end of a pass tells; the end is that of the root's forward, or, where blocks are called without the
    root, the second run of a block.

    - Without gradients the ranks of a row vote, over a group that is idle then (``Lanes.votes``). Where nothing is
      gathered (weights that are kept) they need nothing of each other, and need not evaluate the same. Other rows may
      evaluate more or fewer batches.
    - Tensor-parallel ranks need each other in every pass, and vote among themselves.

    On an accelerator the host does not wait: the next pass looks at the verdict of the last one.

    Args:
        is_list: the blocks are those of a list of modules, whose order ranks compare before the first pass.

    Attributes:
        places: by what begins the names of a module of the list, how a model around them calls it.
    """

    def __init__(self, comm: Comm, blocks: Sequence[Block], is_list: bool) -> None:
        self._comm, self._blocks, self._is_list = comm, blocks, is_list
        self.places: dict[str, str] = {}
        self._sharded: list[weakref.ref[FSDPModule]] | None = None  # of each block one, if there is any
        self._ran: dict[Block, None] = {}  # an ordered set
        self._gathered = False  # by FSDP2 in this pass
        self._compared = 0  # how many fills were
        self._elections: dict[str, Election] = {}  # that are under way

    def compare_places(self) -> None:
        """Where elements of a list are alike, weights would be taken for each other's. Collective of a list, once.

        Raises:
            ValueError: on all ranks, if they have it in other orders.
        """
        comm = self._comm
        if self._is_list and comm.world > 1:
            places = [(f"the name of number {at.rstrip('.')} of a list", name) for at, name in self.places.items()]
            require_same(comm.control, comm.topology.ranks, None, sorted(places), None)
        self._is_list = False

    def restart(self) -> None:
        """Another pass begins at the root."""
        self._ran.clear()

    def run(self, block: Block, *, trains: bool) -> None:
        """``block`` is about to run, with gradients (``trains``) or without."""
        if trains and self._comm.tensor is None:
            return  # the vote of backward will tell
        if block in self._ran:
            self.end(trains=trains)
        if not self._ran:
            self._gathered = not trains and self._comm.row is not None and self._fsdp_gathers()
        self._ran[block] = None

    def _fsdp_gathers(self) -> bool:
        """Whether FSDP2 is about to. Its hooks may have come first at the block that runs, but not at the others."""
        if self._sharded is None:  # it is applied before the first forward
            modules = [block.module for block in self._blocks if block.module is not None]
            below = [[m for m in module.modules() if isinstance(m, FSDPModule)] for module in modules]
            self._sharded = [weakref.ref(of_block[0]) for of_block in below if of_block]
        alive = [module() for module in self._sharded]
        return any(is_sharded_by_fsdp(module) for module in alive if module is not None)

    def end(self, *, trains: bool) -> None:
        """Vote, if there is something to compare. Collective along the row, and over tensor-parallel ranks.

        Raises:
            CollectiveError: the ranks issued different collectives, or ran blocks in different orders.
        """
        ran = " ".join(["blocks", *(repr(block.name) for block in self._ran)]) if self._ran else ""
        by_fsdp = ran if self._gathered else ""
        self._ran.clear()
        self._gathered = False
        comm, fills = self._comm, self._comm.monitor.count("fill")
        if comm.row is not None and not trains and (fills != self._compared or by_fsdp):
            self._compared = fills
            self._elect("row", comm.row.votes, comm.monitor.digest, by_fsdp)
        if comm.tensor is not None and ran:
            self._elect("tensor", comm.tensor.group, 0, ran)

    def _elect(self, line: str, group: dist.ProcessGroup, digest: int, compared: str) -> None:
        self._conclude(line)
        comm = self._comm
        what = "comparison of blocks that ran"
        digest = zlib.crc32(compared.encode(), digest) & 0x7FFFFFFF
        vote = Vote((), digest)
        election = Election(vote, group, comm.monitor, comm.device, what, compared)
        self._elections[line] = election
        if election.immediate:
            self._conclude(line)

    def _conclude(self, line: str) -> None:
        election = self._elections.pop(line, None)
        if election is not None:
            election.verdict()
