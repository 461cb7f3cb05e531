"""The even shard that torch asks an owned parameter for: write-only, and written by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmuon.platform.torch_private import even_shape

if TYPE_CHECKING:
    from dmuon.dedicated.owned_tensor import OwnedTensor

__all__ = ["EvenShard"]


class EvenShard(Tensor):
    """This rank's even shard of an owned parameter, shaped as its mesh and placements say.

    ``StateDictOptions(broadcast_from_rank0=True)`` copies each rank's slice of the whole matrix into the ``to_local()``
    of what the module holds. That copy, a collective here, sends the slices to the owner. No other operation is
    available: the values of the shard are on the owner only.

    Args:
        write: ``write(param, slice)`` puts the slices of all ranks into the master.
        refusal: the message of every other operation.
    """

    param: OwnedTensor
    write: Callable[[OwnedTensor, Tensor], None]
    refusal: str

    @staticmethod
    def __new__(cls, param: OwnedTensor, write: Callable[[OwnedTensor, Tensor], None], refusal: str) -> EvenShard:
        shape = even_shape(param.shape, param.device_mesh, param.placements)
        shard: EvenShard = Tensor._make_wrapper_subclass(cls, shape, dtype=param.dtype, device=param.device)
        shard.param, shard.write, shard.refusal = param, write, refusal
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = args[0]
        if func is not torch.ops.aten.copy_.default or not isinstance(target, EvenShard):
            raise RuntimeError(next(a.refusal for a in _leaves(args) if isinstance(a, EvenShard)))
        target.write(target.param, args[1])
        return target

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EvenShard({self.param!r}, shape={tuple(self.shape)})"


def _leaves(args: Sequence[Any]) -> list[Any]:
    return [leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else [arg])]
