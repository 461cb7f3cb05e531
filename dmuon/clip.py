"""Gradient clipping that is exact wherever a gradient lives."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon._torch import local_tensor
from dmuon.owned_tensor import OwnedTensor

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does.

    Owned, sharded and replicated gradients may be mixed: each element counts once. Collective over the meshes of the
    sharded and owned ones.

    Args:
        norm_type: order of the norm, positive or ``inf``.

    Returns:
        The total norm before clipping, 0-D fp32 (or wider), the same on all ranks.

    Raises:
        ValueError: a norm that is not positive, or a placement that is neither sharded nor replicated.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in tensors if p.grad is not None]
    if not grads:
        return torch.zeros(())
    largest = math.isinf(norm_type)
    parts: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        parts.setdefault(_sharded_over(grad), []).append(local_tensor(grad))
    device = local_tensor(grads[0]).device
    dtype = torch.promote_types(local_tensor(grads[0]).dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=device)
    for where, locals_ in parts.items():
        held = [t for t in locals_ if t.numel()]
        norms = torch._foreach_norm(held, norm_type, dtype=dtype) if held else []
        stacked = torch.stack([n.to(device) for n in norms]) if norms else total.new_zeros(1)
        part = stacked.max() if largest else stacked.pow(norm_type).sum()
        if where is not None:
            mesh, dims = where
            for dim in dims:
                if largest:
                    _reduce_max(part, mesh.get_group(dim))
                else:
                    dist.all_reduce(part, group=mesh.get_group(dim))
        total = torch.maximum(total, part) if largest else total + part
    if not largest:
        total = total.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}, so it cannot be clipped"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        local = local_tensor(grad)
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (grad_device, _), locals_ in by_kind.items():
        torch._foreach_mul_(locals_, coefficient.to(grad_device))
    return total


def _reduce_max(norm: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce a 0-D norm by MAX in place; NaN wins.

    A backend's MAX of floats may drop NaN, as gloo's does. The bits of positive floats order as they do, NaN last.
    """
    bits = norm.abs_().view(torch.int64 if norm.dtype == torch.float64 else torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)


def _sharded_over(grad: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Mesh and the dimensions over which the local tensors are parts of a whole; None for a plain tensor."""
    if not isinstance(grad, DTensor):
        return None
    for placement in grad.placements:
        if not isinstance(grad, OwnedTensor) and placement.is_partial():
            raise ValueError(f"a gradient of shape {tuple(grad.shape)} is Partial; reduce it before clipping")
    dims = tuple(i for i, placement in enumerate(grad.placements) if not placement.is_replicate())
    return (grad.device_mesh, dims) if dims else None
