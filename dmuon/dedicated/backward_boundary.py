"""Where the backward of a block ends: once all gradients of its inputs are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["mark_boundary"]


def mark_boundary(
    args: tuple[Any, ...], kwargs: dict[str, Any], reached: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass all inputs of a module that need gradients through one function, whose backward runs after the module's.

    Args:
        reached: called by that backward.

    Returns:
        The arguments to call the module with; None if no input needs a gradient.
    """
    leaves, spec = tree_flatten((args, kwargs))
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not indices:
        return None
    outputs = _Boundary.apply(reached, *(leaves[i] for i in indices))  # type: ignore[no-untyped-call]
    for i, tensor in zip(indices, outputs, strict=True):
        leaves[i] = tensor
    new_args, new_kwargs = tree_unflatten(leaves, spec)
    return new_args, new_kwargs


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
