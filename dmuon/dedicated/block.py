"""The blocks of a model: when their modules hold whole weights, in which order they run, where a backward ends."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dmuon.comm.agreement import Vote, require_same
from dmuon.comm.context import Comm
from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.saved_tensors import SavedTensors
from dmuon.platform.torch_private import inside_transformation, is_sharded_by_fsdp


class Phase(Enum):
    """What the modules of a block hold, and why. Only a block at rest may be entered."""

    REST = "modules hold the resting form"
    FORWARD = "modules hold whole weights for a forward"
    BACKWARD = "modules hold whole weights for a backward"
    SUMMONED = "modules hold whole weights for the user, inside summon_full_params()"


AT_WORK = (Phase.FORWARD, Phase.BACKWARD)  # modules compute with the buffer


class Block:
    """Owned matrices of one block that have one communication dtype.

    Attributes:
        buffer: holds the whole weights, possibly beside those of neighbours.
        backward: the backward pass that has entered this block, or brought it a gradient in another way.
        calls: forwards whose backward boundary has not been reached.
        saving: the hooks around the forwards that run now; a recomputation may run inside another.
        generation: of the weights of the last forward with gradients.
    """

    def __init__(self, name: str, module: nn.Module, matrices: Sequence[OwnedMatrix], buffer: OwnedBuffer) -> None:
        self.name = name
        self._module = weakref.ref(module)  # which owns its hooks, and so this
        self.matrices = list(matrices)
        self.buffer = buffer
        self.phase = Phase.REST
        self.backward: int | None = None
        self.calls = 0
        self.saving: list[SavedTensors] = []
        self.generation = -1
        self._versions: list[int] = []  # of whole weights when they were put into the modules

    @property
    def module(self) -> nn.Module | None:
        """None if it was deleted."""
        return self._module()

    def enter(self, phase: Phase) -> None:
        """Put whole weights, which the buffer has, into the modules of a block at rest."""
        for matrix in self.matrices:
            for held, name in matrix.places:
                if held.get(name) is not matrix.rest:
                    raise RuntimeError(
                        f"parameter {matrix.fqn!r} was replaced in its module after dedicate_params; edit it under "
                        "dmuon.summon_full_params(model) instead"
                    )
        self._versions.clear()
        for matrix in self.matrices:
            full = matrix.full
            self._versions.append(full._version)
            if full.requires_grad != matrix.rest.requires_grad:
                full.requires_grad_(matrix.rest.requires_grad)
            for held, name in matrix.places:
                held[name] = full
        self.buffer.users[self.name] = phase.value
        self.phase = phase

    def leave(self) -> None:
        """Put the resting form back into the modules, behind a forward or backward.

        Raises:
            RuntimeError: a whole weight was edited, which would be lost.
        """
        self.rest()
        for matrix, version in zip(self.matrices, self._versions, strict=True):
            if matrix.full._version != version:
                raise RuntimeError(
                    f"parameter {matrix.fqn!r} was changed in place inside the forward or backward of block "
                    f"{self.name!r}, where it is a copy of its owner's; edit it under dmuon.summon_full_params(model)"
                )

    def rest(self) -> None:
        """Whatever the modules hold, they hold the resting form now, and nobody uses the buffer for this block."""
        for matrix in self.matrices:
            for held, name in matrix.places:
                held[name] = matrix.rest
        self.buffer.users.pop(self.name, None)
        self.phase = Phase.REST

    def summon(self, wholes: Sequence[nn.Parameter]) -> None:
        """Put ``wholes``, one per matrix, into the modules for the user, until :meth:`rest`."""
        for matrix, whole in zip(self.matrices, wholes, strict=True):
            for held, name in matrix.places:
                held[name] = whole
        self.phase = Phase.SUMMONED

    def forget_graph(self) -> None:
        """No backward will come any more."""
        self.backward, self.calls = None, 0
        self.buffer.awaited.discard(self.name)

    def abandon(self) -> None:
        """Back to rest from a forward or backward that did not finish."""
        while self.saving:
            self.saving.pop().end()
        if self.phase in AT_WORK:
            self.rest()


class ExecutionOrder:
    """In which order blocks run, as the last forward showed it: what to fetch next, and what to publish first.

    Attributes:
        first: block of the model.
        following: what ran after a block in forward; until a forward has run, what follows it in the model.
        preceding: what ran before a block in forward, and comes after it in backward.
        last: the block that ran last in the present pass.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.first = blocks[0] if blocks else None
        self.following = dict(pairwise(blocks))
        self.preceding: dict[Block, Block] = {}
        self.last: Block | None = None

    def record(self, block: Block, *, first: bool) -> None:
        """``block`` runs forward now.

        Args:
            first: without a block before it, it is the first of the model.
        """
        if self.last is None:
            if first:
                self.first = block
        elif self.last is not block:
            self.following[self.last] = block
            self.preceding[block] = self.last
        self.last = block

    def buffers(self, block: Block | None = None, *, backward: bool = False) -> Iterator[OwnedBuffer]:
        """The buffers of ``block`` (by default the first one) and of what comes after it, each once.

        Args:
            backward: after it in backward, which is what ran before it in forward.
        """
        links = self.preceding if backward else self.following
        block = self.first if block is None else block
        visited: set[Block | OwnedBuffer] = set()
        while block is not None and block not in visited:
            visited.add(block)
            if block.buffer not in visited:
                visited.add(block.buffer)
                yield block.buffer
            block = links.get(block)


class OrderCheck:
    """Ranks that need each other compare in which order they have run blocks, where the vote of backward cannot tell.

    That is where no backward follows, or nothing of dmuon's travels. Ranks that run blocks in different orders take one
    block's weights, or its part of a sum, for another's. One small vote at the end of a pass tells; the end is that of
    the root's forward, or, where blocks are called without the root, the second run of a block.

    - Without gradients the ranks of a row vote, over a group that is idle then (``Lanes.votes``). Where nothing is
      gathered (weights that are kept) they need nothing of each other, and need not evaluate the same. Other rows may
      evaluate more or fewer batches.
    - Tensor-parallel ranks need each other in every pass, and vote among themselves.

    On an accelerator the host does not wait: the next pass looks at the result of the last one.

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
        self._votes: dict[str, Vote] = {}  # that are under way

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
        comm, fills = self._comm, self._comm.monitor.counts["fill"]
        if comm.row is not None and not trains and (fills != self._compared or by_fsdp):
            self._compared = fills
            self._vote("row", comm.row.votes, by_fsdp)
        if comm.tensor is not None and ran:
            self._vote("tensor", comm.tensor.group, ran, only_compared=True)

    def _vote(self, line: str, group: dist.ProcessGroup, compared: str, *, only_compared: bool = False) -> None:
        self._conclude(line)
        what = "comparison of blocks that ran"
        vote = Vote((), group, self._comm.monitor, what, compared=compared, only_compared=only_compared)
        self._votes[line] = vote
        if vote.immediate:
            self._conclude(line)

    def _conclude(self, line: str) -> None:
        vote = self._votes.pop(line, None)
        if vote is not None:
            vote.result()


def mark_boundary(value: Any, reached: Callable[[], None]) -> tuple[Any, bool]:
    """Pass tensors that need gradients through one function: ``value`` itself, and what lies in tuples.

    Of the inputs of a module its backward runs after the module's, of all outputs before. Lists, dicts and other
    objects stay as they are: a module may add to what it is given, as to a cache, and the caller must see that. What
    comes by them alone may end a block twice, which costs another reduction.

    Args:
        reached: called by that backward.

    Returns:
        ``value`` with what that function returned, and whether any tensor was passed.

    Raises:
        RuntimeError: inside a transformation of ``torch.func``, whose backward is none of autograd's.
    """
    tensors: list[Tensor] = []
    _collect(value, tensors)
    if not tensors:
        return value, False
    if inside_transformation():
        raise RuntimeError(
            "a block of a dedicated model was called inside torch.func (grad, vjp, jacrev, …), which runs no backward "
            "in which its weights could be fetched again; use torch.autograd.grad or backward(), or transform the "
            "model before dedicate_params"
        )
    return _replaced(value, iter(_Boundary.apply(reached, *tensors))), True  # type: ignore[no-untyped-call]


def _collect(value: Any, tensors: list[Tensor]) -> None:
    """Add what needs a gradient in ``value``, and in tuples in it, to ``tensors``."""
    if isinstance(value, tuple):
        for item in value:
            _collect(item, tensors)
    elif isinstance(value, Tensor) and value.requires_grad:
        tensors.append(value)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """``value`` with ``tensors`` in place of those; a tuple without any, perhaps a ``torch.Size``, as it is."""
    if isinstance(value, tuple):
        items = [_replaced(item, tensors) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(tensors) if isinstance(value, Tensor) and value.requires_grad else value


class _Boundary(torch.autograd.Function):
    """Identity on its inputs; its backward tells that everything after them has been differentiated."""

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.reached = reached
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.reached()
        return (None, *grads)
