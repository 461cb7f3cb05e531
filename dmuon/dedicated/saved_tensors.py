"""What autograd saves of one forward of a block: whole weights as places, by which backward enters the block.

[Note: how backward enters a block]
After its forward a block gives the memory of its whole weights back, while the graph still needs them. Hooks on what
the block returned fill the weights again before backward comes in that way. Backward may also come by a tensor that no
output shows: keys and values in a cache that later blocks read, an auxiliary loss on a module, a list of the program's.
So a pair of saved-tensor hooks is around the forward. Of a weight, or a view of one, the graph gets its place in the
buffer instead of the tensor. Whatever the graph asks back of this forward, weight or not, backward has come: the block
is entered first, which fills the buffer and waits for it.

Torch calls the innermost pair only. What is no weight goes on to the pair that was outside, or checkpointing around
the block would recompute nothing. Hooks of others inside the block are asked in place of these, and a graph then holds
the weights themselves: ``OwnedBuffer.free`` sees that somebody does, and leaves the memory as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.platform.torch_private import (
    DTensorSpec,
    SavedTensorHooks,
    local_tensor,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
    spec_of_dtensor,
    storage_id,
    with_spec,
)


@dataclass(frozen=True, slots=True)
class _Weight:
    """Where a weight, or a view of one, lies. It holds the storage, which has no memory once the block is freed."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    spec: DTensorSpec | None  # of tensor parallelism


@dataclass(frozen=True, slots=True)
class _PackedOutside:
    """What the pair of hooks outside has made of a tensor."""

    packed: Any


Storages = dict[int, torch.UntypedStorage]


def storages_of(buffers: Iterable[OwnedBuffer]) -> Storages:
    """The memory of whole weights, as :class:`SavedTensors` knows it again."""
    return {storage_id(storage): storage for buffer in buffers for storage in buffer.storages}


class SavedTensors:
    """The pair of hooks of one forward of a block, around what this thread computes until :meth:`end`.

    Args:
        storages: the memory of the block's whole weights.
        enter: called before anything is handed back; fills the weights and waits for them.

    Attributes:
        any: whether the graph has saved something.
    """

    __slots__ = ("_enter", "_outside", "_storages", "any")

    def __init__(self, storages: Storages, enter: Callable[[], None]) -> None:
        self._storages = storages
        self._enter = enter
        self._outside: SavedTensorHooks | None = saved_tensor_hooks()
        self.any = False
        push_saved_tensor_hooks((self._pack, self._unpack))  # not kept: a cycle would outlive the model

    def end(self) -> None:
        """Take the pair off.

        After a Ctrl-C, of which torch tells no forward hook, this comes late. Contexts that the program has left since
        have taken off one pair each, the innermost: if the pair that was outside is left in their place, that goes.
        """
        top = saved_tensor_hooks()
        if top is not None and top[0] in (self._pack, None if self._outside is None else self._outside[0]):
            pop_saved_tensor_hooks()
        else:  # below others for good: from now on it only passes on
            self._storages, self._enter = {}, _nothing

    def _pack(self, tensor: Tensor) -> Any:
        self.any = True
        local = local_tensor(tensor)
        if local.layout is torch.strided and not (local.is_conj() or local.is_neg()):  # a place does not say that
            storage = self._storages.get(storage_id(local.untyped_storage()))
            if storage is not None:
                offset, size, stride = int(local.storage_offset()), local.size(), local.stride()
                return _Weight(storage, local.dtype, offset, size, stride, spec_of_dtensor(tensor))
        if self._outside is not None:
            return _PackedOutside(self._outside[0](tensor))
        # With hooks torch does not look whether what was saved has changed, so this does. A result that is kept with
        # its graph would hold the node that holds it; what is detached has the same version counter.
        return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        self._enter()
        if isinstance(packed, _Weight):
            local = torch.empty(0, dtype=packed.dtype, device=packed.storage.device)
            local.set_(packed.storage, packed.offset, packed.size, packed.stride)
            return local if packed.spec is None else with_spec(local, packed.spec)
        if isinstance(packed, _PackedOutside):
            assert self._outside is not None, "it has packed this"
            unpacked: Tensor = self._outside[1](packed.packed)
            return unpacked
        tensor: Tensor
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place: it is at version "
                f"{tensor._version}, and was saved at version {version}; change a copy of it in forward"
            )
        return tensor


def _nothing() -> None:
    pass


def tell_of_hooks(error: BaseException, block: str) -> None:
    """Add the remedy to what ``torch.func`` says, which does not run inside saved-tensor hooks."""
    if error.args and "saved tensor hooks" in str(error.args[0]):
        error.args = (
            f"{error.args[0]} The hooks are those of block {block!r}, whose weights are freed after its forward: pass "
            "reshard_after_forward=False to dedicate_params, which needs none",
        )
