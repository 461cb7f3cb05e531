"""Foreach operations on lists in which owned tensors stand beside others: on what this rank holds of each tensor.

Elementwise, the parts of the results are the results of the parts, whatever else is in the list. Nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.platform.torch_private import local_tensor


def run_on_parts(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    like: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """What ``func`` returns, an elementwise foreach operation.

    Args:
        args: beginning with a list of tensors; further lists have one tensor for each of these.
        like: ``like(tensor, local)`` wraps a result, laid out as ``tensor``.

    Raises:
        RuntimeError: tensors that meet in the lists are laid out differently, or not summed yet.
    """
    first = args[0]
    require_summed(first, str(func))
    for argument in (*args[1:], *kwargs.values()):
        for tensor, other in _beside(first, argument):
            if other.ndim and _layout(tensor) != _layout(other):
                raise RuntimeError(
                    f"{func} mixes {named(tensor)} with {named(other)}, which is laid out otherwise; lay both out "
                    "alike, or do it on whole weights under `with dmuon.summon_full_params(model):`"
                )
    out = func(*map(_parts, args), **{name: _parts(value) for name, value in kwargs.items()})
    if isinstance(out, (list, tuple)):
        return [like(tensor, local) for tensor, local in zip(first, out, strict=True)]
    return out


def require_summed(tensors: Sequence[Tensor], what: str) -> None:
    """Raise RuntimeError for a tensor of which ranks hold addends."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise RuntimeError(f"{what}: {named(tensor)} is {tensor.placements}: reduce what is Partial before it")


def named(tensor: Tensor) -> str:
    """A tensor, for messages."""
    fqn = getattr(tensor, "fqn", None)
    return f"{'a tensor' if fqn is None else repr(fqn)} of shape {tuple(tensor.shape)}"


def number_of(tensor: Tensor) -> Tensor:
    """A number that is perhaps spread over ranks, as a plain tensor. Collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _layout(tensor: Tensor) -> Hashable:
    """Equal for tensors whose local parts belong together element by element."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor.shape, tensor.device_mesh, tensor.placements, getattr(tensor, "layout_key", None)


def _parts(value: Any) -> Any:
    """What this rank holds of the tensors of a list; of a single tensor, the number."""
    if isinstance(value, (list, tuple)):
        return [local_tensor(item) if isinstance(item, Tensor) else item for item in value]
    return number_of(value) if isinstance(value, Tensor) else value


def _beside(first: Sequence[Tensor], argument: Any) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of ``first`` with that of ``argument`` which meets it; all of them with a single one."""
    if isinstance(argument, Tensor):
        return [(tensor, argument) for tensor in first]
    if isinstance(argument, (list, tuple)):
        pairs = zip(first, argument, strict=False)
        return [(tensor, other) for tensor, other in pairs if isinstance(other, Tensor)]
    return []
