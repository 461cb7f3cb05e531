"""The blocks of a model: when their modules hold whole weights, in which order they run, where a backward ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.saved_tensors import SavedTensors
from dmuon.platform.torch_private import inside_transformation


class Phase(Enum):
    """What the modules of a block hold, and why. Only a block at rest may be entered."""

    REST = "modules hold the resting form"
    FORWARD = "modules hold whole weights for a forward"
    BACKWARD = "modules hold whole weights for a backward"
    SUMMONED = "modules hold whole weights for the user, inside summon_full_params()"


class Block:
    """Owned matrices of one block that have one communication dtype.

    Attributes:
        buffer: holds the whole weights, possibly beside those of neighbours.
        backward: the backward pass that entered this block.
        calls: forwards whose backward boundary has not been reached.
        awaits_backward: the graph of a forward has saved something.
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
        self.awaits_backward = False
        self.saving: list[SavedTensors] = []
        self.generation = -1
        self._versions: list[int] = []  # of whole weights when they were put into the modules

    @property
    def module(self) -> nn.Module | None:
        """None if it was deleted."""
        return self._module()

    @property
    def at_work(self) -> bool:
        """Whether the modules compute with the buffer."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD)

    @property
    def trains(self) -> bool:
        """Whether any of its matrices wants a gradient."""
        return any(matrix.rest.requires_grad for matrix in self.matrices)

    def enter(self, phase: Phase) -> None:
        """Put whole weights into the modules."""
        self._require(Phase.REST)
        for matrix in self.matrices:
            if not all(matrix.is_rest(module._parameters.get(name)) for module, name in matrix.sites):
                raise RuntimeError(
                    f"parameter {matrix.fqn!r} was replaced in its module after dedicate_params; edit it under "
                    "dmuon.summon_full_params(model) instead"
                )
        self.buffer.acquire(self.name, phase.value)
        self._versions = [matrix.full._version for matrix in self.matrices]
        for matrix in self.matrices:
            if matrix.full.requires_grad != matrix.rest.requires_grad:
                matrix.full.requires_grad_(matrix.rest.requires_grad)
            matrix.place(matrix.full)
        self.phase = phase

    def leave(self) -> None:
        """Put the resting form back into the modules.

        Raises:
            RuntimeError: a whole weight was edited, which would be lost.
        """
        self._require(Phase.FORWARD, Phase.BACKWARD)
        self._give_up()
        for matrix, version in zip(self.matrices, self._versions, strict=True):
            if matrix.full._version != version:
                raise RuntimeError(
                    f"parameter {matrix.fqn!r} was changed in place inside the forward or backward of block "
                    f"{self.name!r}, where it is a copy of its owner's; edit it under dmuon.summon_full_params(model)"
                )

    def summon(self, wholes: Sequence[nn.Parameter]) -> None:
        """Put ``wholes``, one per matrix, into the modules for the user."""
        self._require(Phase.REST)
        for matrix, whole in zip(self.matrices, wholes, strict=True):
            matrix.place(whole)
        self.phase = Phase.SUMMONED

    def dismiss(self) -> None:
        """End :meth:`summon`."""
        self._require(Phase.SUMMONED)
        self._rest()

    def forget_graph(self) -> None:
        """No backward will come any more."""
        self.backward, self.calls, self.awaits_backward = None, 0, False

    def abandon(self) -> None:
        """Back to rest from a forward or backward that did not finish."""
        while self.saving:
            self.saving.pop().end()
        if self.at_work:
            self._give_up()

    def reset(self) -> None:
        """Back to rest, without gradients that were not reduced."""
        self.abandon()
        for matrix in self.matrices:
            matrix.drop_unreduced()
        self.forget_graph()

    def _give_up(self) -> None:
        self._rest()
        self.buffer.release(self.name)

    def _rest(self) -> None:
        for matrix in self.matrices:
            matrix.place(matrix.rest)
        self.phase = Phase.REST

    def _require(self, *phases: Phase) -> None:
        if self.phase not in phases:
            expected = " or ".join(p.name for p in phases)
            raise RuntimeError(f"block {self.name!r} is {self.phase.name}, expected {expected}: {self.phase.value}")


class ExecutionOrder:
    """In which order blocks run, as the last forward showed it: what to fetch next, and what to publish first.

    Successors and predecessors of blocks; the order of the model until a forward has run.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._first = blocks[0] if blocks else None
        self._following = dict(pairwise(blocks))
        self._preceding: dict[Block, Block] = {}
        self._last: Block | None = None

    def restart(self) -> None:
        """The next block that runs does not follow the last one."""
        self._last = None

    def begins_with(self, block: Block) -> bool:
        """Whether ``block`` is the first one."""
        return block is self._first

    def record(self, block: Block, *, first: bool) -> None:
        """``block`` runs forward now.

        Args:
            first: without a block before it, it is the first of the model.
        """
        if self._last is None:
            if first:
                self._first = block
        elif self._last is not block:
            self._following[self._last] = block
            self._preceding[block] = self._last
        self._last = block

    def after(self, block: Block) -> Block | None:
        """What ran after ``block`` in forward."""
        return self._following.get(block)

    def before(self, block: Block) -> Block | None:
        """What ran before ``block`` in forward, and comes after it in backward."""
        return self._preceding.get(block)

    def walk(self, block: Block | None = None, *, backward: bool = False) -> Iterator[Block]:
        """``block`` (by default the first one) and what comes after it in forward or backward, each once."""
        links = self._preceding if backward else self._following
        block = self._first if block is None else block
        visited: set[Block] = set()
        while block is not None and block not in visited:
            visited.add(block)
            yield block
            block = links.get(block)


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
    tensors = list(_in_tuples(value))
    if not tensors:
        return value, False
    if inside_transformation():
        raise RuntimeError(
            "a block of a dedicated model was called inside torch.func (grad, vjp, jacrev, …), which runs no backward "
            "in which its weights could be fetched again; use torch.autograd.grad or backward(), or transform the "
            "model before dedicate_params"
        )
    passed = iter(_Boundary.apply(reached, *tensors))  # type: ignore[no-untyped-call]
    return _replaced(value, passed), True


def _in_tuples(value: Any) -> Iterator[Tensor]:
    if isinstance(value, tuple):
        for item in value:
            yield from _in_tuples(item)
    elif isinstance(value, Tensor) and value.requires_grad:
        yield value


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, tuple):
        if next(_in_tuples(value), None) is None:
            return value  # it may be a ``torch.Size``
        items = [_replaced(item, tensors) for item in value]
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
