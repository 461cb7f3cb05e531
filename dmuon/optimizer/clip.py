"""Gradient clipping that is exact wherever a gradient lives."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon.comm.norm import by_kind, join_terms, named_tensor, norms_of, reduce_terms, split_over, whole_terms
from dmuon.dedicated.matrix import require_resting
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import runtime_of
from dmuon.layout.topology import listed
from dmuon.model.matrix_spec import flat_of
from dmuon.platform.streams import mesh_device
from dmuon.platform.torch_private import local_tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does on one process.

    Owned, sharded and replicated gradients on any meshes may be mixed: each element counts once. Collective over the
    meshes of the sharded and owned ones, so all their ranks pass the same parameters, whichever of them have gradients,
    and make such calls in the same order. The host does not wait for a device unless ``error_if_nonfinite`` is set.

    Args:
        parameters: a rank that has no gradient of one adds nothing to the norm.
        max_norm: the norm that the gradients have at most afterwards.
        norm_type: order of the norm: any positive number, or ``inf``.
        error_if_nonfinite: raise, and change no gradient, when the total is infinite or NaN.
        foreach: False: one kernel per tensor; True: torch's foreach kernels, or an error on a device without;
            None: these kernels if the device has them.
        pp_mesh: 1-D mesh over pipeline stages, whose gradients then count together. Each rank passes the parameters of
            its own stage, and takes part also when they have no gradients; one that two stages share counts in both.

    Returns:
        The total norm before clipping, ``()``, the same on all ranks; fp64 if a gradient that this rank passed is,
        else fp32, in which half-precision gradients are summed too.

    Raises:
        ValueError: a NaN or negative ``max_norm``, a ``norm_type`` that is not positive, a ``pp_mesh`` of several
            dimensions, a gradient that is Partial, one on a mesh without this rank, or one that other ranks hold others
            like, such as plain parts of experts; a parameter from before ``dedicate_params``.
        RuntimeError: the total is not finite and ``error_if_nonfinite`` is set; no foreach kernels; ranks that have
            come to it with other parameters, as far as their optimizer's names tell, or shapes without one. On an
            accelerator, which the host does not wait for, the total is NaN then.
    """
    limit, order = float(max_norm), float(norm_type)
    if not limit >= 0:
        raise ValueError(f"max_norm must be at least 0, got {limit}")
    if not order > 0:
        raise ValueError(f"norm_type must be positive, or infinite, got {order}")
    if pp_mesh is not None and pp_mesh.ndim != 1:
        raise ValueError(f"pp_mesh must have one dimension, that of the pipeline stages, got {pp_mesh}")
    tensors = _listed(parameters)
    require_resting(tensors)
    _require_alike(tensors)
    grads = _gradients(tensors, foreach)
    counted = [p for p in tensors if p.grad is not None or _is_shared(p)]
    total = _total_norm(counted, order, foreach, pp_mesh)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is {float(total)}, so it cannot be clipped"
        )
    # Early updates go by versions, which torch does not count for foreach operations under a TorchDispatchMode.
    coefficient = torch.clamp(limit / (total + 1e-6), max=1.0)
    for same in by_kind(grads):
        factor = coefficient.to(same[0].device)
        if foreach is False:
            for local in same:
                local.mul_(factor)
        else:
            torch._foreach_mul_(same, factor)
        increment_version(same)
    return total


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not tensors and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "`parameters` is a generator without elements, perhaps a used one: nothing is clipped", stacklevel=4
        )
    return tensors


def _require_alike(tensors: Sequence[Tensor]) -> None:
    """Raise where ranks would each find another total of what they share."""
    if any(flat_of(tensor) for tensor in tensors):
        raise ValueError(
            "parameters cut by FullyShardedDataParallel (FSDP1) do not say which ranks have the rest of them: call "
            "clip_grad_norm_ of the FSDP1 model itself"
        )
    runtimes = dict.fromkeys(runtime for tensor in tensors if (runtime := runtime_of(tensor)) is not None)
    for runtime in runtimes:
        own = runtime.param_ids() if runtime.strangers else set()
        if own and any(id(tensor) not in own for tensor in tensors):
            raise ValueError(
                f"the norm of parameter {next(runtime.matrices()).fqn!r} and its like is known on ranks "
                f"{listed(runtime.comm.topology.ranks)} only, and ranks {listed(runtime.strangers)} of the model "
                "around it hold others: make it a DTensor over the expert-parallel dimension before dedicate_params, "
                "or clip what each group holds in a call of its own"
            )


def _gradients(tensors: Sequence[Tensor], foreach: bool | None) -> list[Tensor]:
    """The gradients of ``tensors``, in order, after a check that each can be clipped."""
    grads = [p.grad for p in tensors if p.grad is not None]
    for number, grad in enumerate(grads):
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            named = repr(grad.fqn) if isinstance(grad, OwnedTensor) else f"number {number}"
            raise ValueError(
                f"gradient {named} of shape {tuple(grad.shape)} is {grad.placements}: reduce what is Partial before "
                "clipping"
            )
    if foreach:
        for device in {local_tensor(grad).device for grad in grads}:
            torch.nn.utils.get_total_norm(torch.empty(0, device=device), foreach=True)  # raises where torch has none
    return grads


def _is_shared(param: Tensor) -> bool:
    """Whether other ranks may have a gradient of a parameter of which this one has none."""
    is_here = isinstance(param, DTensor) and param.device_mesh.get_coordinate() is not None
    return is_here and param.requires_grad and bool(split_over(param))


def _total_norm(params: Sequence[Tensor], order: float, foreach: bool | None, pp_mesh: DeviceMesh | None) -> Tensor:
    """The norm of the norms of gradients, ``()``."""
    wide = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    where = "cpu" if pp_mesh is None else pp_mesh.device_type  # of who has no gradients
    device = local_tensor(params[0]).device if params else mesh_device(where)
    terms = torch.zeros(1, dtype=torch.float64, device=device)
    if params:
        likes = [param if param.grad is None else param.grad for param in params]
        absent = {number for number, param in enumerate(params) if param.grad is None}
        terms = torch.cat([terms, whole_terms(likes, order, foreach, device, absent, [*map(named_tensor, params)])])
    total = join_terms(terms, order).reshape(1)
    if pp_mesh is not None:
        reduce_terms(total, order, pp_mesh.get_group())
    return norms_of(total[0], order).to(torch.float64 if wide else torch.float32)
