"""The blocks of a model: when their modules hold whole weights, in which order they run, where a backward enters them.

[Note: how backward enters a block]
After its forward a block gives the memory of its whole weights back, while the graph still needs them. Hooks on what
the block returned unshard the weights again before backward comes in that way. Backward may also come by a tensor that
no output shows: keys and values in a cache that later blocks read, an auxiliary loss on a module, a list of the
program's. So a pair of saved-tensor hooks is around the forward. Of a weight, or a view of one, the graph gets its
place in the buffer instead of the tensor. Whatever the graph asks back of this forward, weight or not, backward has
come: the block is entered first, which unshards the weights and waits for them.

Both ways in are needed. Where the last thing that a block does is checkpointed, nothing that is asked back first is of
the block's own pair: only the hooks on its outputs put whole weights into the modules before it is computed again.
Whichever way comes first enters the block, and the others find it at work. It is left when the gradients of its inputs
are there, which a function around these tells; where no input needs a gradient, at the end of the backward.

Torch calls the innermost pair only. What is no weight goes on to the pair that was outside, or checkpointing around
the block would recompute nothing. Hooks of others inside the block are asked in place of these, and a graph then holds
the weights themselves: ``OwnedBuffer.free`` sees that somebody does, and leaves the memory as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dmuon.comm.agreement import Vote
from dmuon.comm.context import Comm
from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.platform.torch_private import (
    DTensorSpec,
    SavedTensorHooks,
    current_transformation,
    local_tensor,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
    spec_of_dtensor,
    storage_id,
    with_spec,
)


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
        self._versions = [-1] * len(self.matrices)  # of whole weights when they were put into the modules
        self._storages = {storage_id(storage) for storage in buffer.storages}

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
        for number, matrix in enumerate(self.matrices):
            full = matrix.full
            self._versions[number] = full._version
            if full.requires_grad != matrix.rest.requires_grad:
                full.requires_grad_(matrix.rest.requires_grad)
            for held, name in matrix.places:
                held[name] = full
        self.buffer.users[self.name] = phase.value
        self.phase = phase

    def rest(self) -> OwnedMatrix | None:
        """Put the resting form back into the modules, whatever they hold; nobody uses the buffer for this block then.

        Returns:
            A matrix whose whole weight was edited since :meth:`enter`, which is lost now; None if there is none.
        """
        edited = None
        for matrix, version in zip(self.matrices, self._versions, strict=True):
            # Whoever sets its `.data` lets it view other memory from then on.
            is_moved = storage_id(local_tensor(matrix.full).untyped_storage()) not in self._storages
            if is_moved or matrix.full._version != version:
                edited = matrix
            for held, name in matrix.places:
                held[name] = matrix.rest
        self.buffer.users.pop(self.name, None)
        self.phase = Phase.REST
        return edited

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


def buffers_along(links: Mapping[Block, Block], block: Block | None) -> Iterator[OwnedBuffer]:
    """The buffers of ``block`` and of what ``links`` lead to from it, each once."""
    visited: set[Block | OwnedBuffer] = set()
    while block is not None and block not in visited:
        visited.add(block)
        if block.buffer not in visited:
            visited.add(block.buffer)
            yield block.buffer
        block = links.get(block)


class OrderCheck:
    """Ranks of a row compare in which order they ran blocks without gradients, where no vote of a backward follows.

    Ranks that run blocks in different orders take one block's weights for another's. One small vote at the end of a
    pass tells, over the group of gradients, which is idle then; the end is that of the root's forward, or, where
    blocks are called without the root, the second run of a block. Where nothing was gathered (weights that are kept)
    ranks need nothing of each other, and need not evaluate the same. Other rows may evaluate more or fewer batches.

    On an accelerator the host does not wait: the next pass looks at the result of the last one.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._ran: set[Block] = set()
        self._compared = 0  # how many fills were
        self._vote: Vote | None = None  # the last one

    def restart(self) -> None:
        """Another pass begins at the root."""
        self._ran.clear()

    def run(self, block: Block) -> None:
        """``block`` is about to run without gradients."""
        if block in self._ran:
            self.end()
        self._ran.add(block)

    def end(self) -> None:
        """Vote, if there is something to compare. Collective along the row.

        Raises:
            CollectiveError: the ranks issued different collectives.
        """
        self._ran.clear()
        row, fills = self._comm.row, self._comm.monitor.counts["fill"]
        if row is None or fills == self._compared:
            return
        self._compared = fills
        if self._vote is not None:
            self._vote.result()
        self._vote = Vote((), row.gradients.group, self._comm.monitor, "comparison of blocks that ran")
        if self._vote.immediate:
            self._vote.result()


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
    leaves, structure = tree_flatten(value, is_leaf=lambda v: not isinstance(v, tuple) or type(v) is torch.Size)
    places: list[int] = []
    tensors: list[Tensor] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            places.append(place)
            tensors.append(leaf)
    if not tensors:
        return value, False
    if current_transformation() is not None:
        raise RuntimeError(
            "a block of a dedicated model was called inside torch.func (grad, vjp, jacrev, …), which runs no backward "
            "in which its weights could be fetched again; use torch.autograd.grad or backward(), or transform the "
            "model before dedicate_params"
        )
    passed: Sequence[Tensor] = _Boundary.apply(reached, *tensors)  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, passed, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure), True


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


Storages = dict[int, torch.UntypedStorage]


def storages_of(blocks: Sequence[Block]) -> Storages:
    """The memory of whole weights, as :class:`SavedTensors` knows it again."""
    return {storage_id(storage): storage for block in blocks for storage in block.buffer.storages}


class SavedTensors:
    """The pair of hooks of one forward of a block, around what this thread computes until :meth:`end`.

    Args:
        blocks: of the module, one for each dtype.
        generation: of their weights.
        storages: the memory of these.
        enter: called of a block with its generation, before anything is handed back, if it is not at work with these
            weights: unshards them and waits for them.

    Attributes:
        any: whether the graph has saved something.
    """

    __slots__ = ("_blocks", "_enter", "_generation", "_outside", "_storages", "any")

    def __init__(
        self, blocks: Sequence[Block], generation: int, storages: Storages, enter: Callable[[Block, int], None]
    ) -> None:
        self._blocks = blocks
        self._generation = generation
        self._storages = storages
        self._enter = enter
        self._outside: SavedTensorHooks | None = saved_tensor_hooks()
        self.any = False
        push_saved_tensor_hooks(self._pack, self._unpack)  # not kept: a cycle would outlive the model

    def end(self) -> None:
        """Take the pair off.

        After a Ctrl-C, of which torch tells no forward hook, this comes late. Contexts that the program has left since
        have taken off one pair each, the innermost: if the pair that was outside is left in their place, that goes.
        """
        top = saved_tensor_hooks()
        if top is not None and top[0] in (self._pack, None if self._outside is None else self._outside[0]):
            pop_saved_tensor_hooks()
        else:  # below others for good: from now on it only passes on
            self._storages, self._blocks = {}, ()

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What gives ``tensor`` back, once the block is at work."""
        self.any = True
        local = local_tensor(tensor)
        if local.layout is torch.strided and not (local.is_conj() or local.is_neg()):  # a place does not say that
            storage = self._storages.get(storage_id(local.untyped_storage()))
            if storage is not None:
                offset, size, stride = int(local.storage_offset()), local.size(), local.stride()
                spec = None if local is tensor else spec_of_dtensor(tensor)
                return partial(_weight, storage, local.dtype, offset, size, stride, spec)
        if self._outside is not None:
            pack, unpack = self._outside
            return partial(unpack, pack(tensor))
        # With hooks torch does not look whether what was saved has changed, so this does. A result that is kept with
        # its graph would hold the node that holds it; what is detached has the same version counter.
        return partial(_unchanged, tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def _unpack(self, packed: Callable[[], Tensor]) -> Tensor:
        for block in self._blocks:
            if block.phase not in AT_WORK or block.buffer.generation != self._generation:
                self._enter(block, self._generation)
        return packed()


def _weight(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: torch.Size,
    stride: tuple[int, ...],
    spec: DTensorSpec | None,
) -> Tensor:
    """A weight, or a view of one, at its place in a buffer, which has no memory while the block is freed.

    Args:
        spec: of tensor parallelism.
    """
    local = torch.empty(0, dtype=dtype, device=storage.device)
    local.set_(storage, offset, size, stride)
    return local if spec is None else with_spec(local, spec)


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place: it is at version "
            f"{tensor._version}, and was saved at version {version}; change a copy of it in forward"
        )
    return tensor


def tell_of_hooks(error: BaseException, block: str) -> None:
    """Add the remedy to what ``torch.func`` says, which does not run inside saved-tensor hooks."""
    if error.args and "saved tensor hooks" in str(error.args[0]):
        error.args = (
            f"{error.args[0]} The hooks are those of block {block!r}, whose weights are freed after its forward: pass "
            "reshard_after_forward=False to dedicate_params, which needs none",
        )
