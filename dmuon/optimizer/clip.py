"""Gradient clipping that is exact wherever a gradient lives."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon.comm.norm import absent_term, by_kind, join_terms, norms_of, reduce_terms, split_over, whole_terms
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
    meshes of the sharded and owned ones, so all their ranks pass the same parameters in the same order, whichever of
    them have gradients. The host does not wait for a device unless ``error_if_nonfinite`` is set.

    Args:
        parameters: a rank that has no gradient of one adds nothing to the norm.
        max_norm: the norm that the gradients have at most afterwards.
        norm_type: order of the norm: any number, ``inf``, ``-inf``, or 0, which counts, as torch's does, the tensors
            with an element that is not zero.
        error_if_nonfinite: raise, and change no gradient, when the total is infinite or NaN.
        foreach: False: one kernel per tensor; True: torch's foreach kernels, or an error on a device without;
            None: these kernels if the device has them.
        pp_mesh: 1-D mesh over pipeline stages, whose gradients then count together. Each rank passes the parameters of
            its own stage, and takes part also when they have no gradients; one that two stages share counts in both.

    Returns:
        The total norm before clipping, ``()``, the same on all ranks; fp64 if a gradient that this rank passed is,
        else fp32, in which half-precision gradients are summed too.

    Raises:
        ValueError: a NaN or negative ``max_norm``, a NaN ``norm_type``, a ``pp_mesh`` of several dimensions, a gradient
            that is Partial, one on a mesh without this rank, or one that other ranks hold others like, such as plain
            parts of experts; a parameter from before ``dedicate_params``.
        RuntimeError: the total is not finite and ``error_if_nonfinite`` is set; a gradient without elements, whose norm
            of a negative or infinite order does not exist; no foreach kernels.
    """
    limit, order = float(max_norm), float(norm_type)
    if not limit >= 0:
        raise ValueError(f"max_norm must be at least 0, got {limit}")
    if math.isnan(order):
        raise ValueError(f"norm_type must be a number or an infinity, got {order}")
    if pp_mesh is not None and pp_mesh.ndim != 1:
        raise ValueError(f"pp_mesh must have one dimension, that of the pipeline stages, got {pp_mesh}")
    tensors = _listed(parameters)
    require_resting(tensors)
    _require_alike(tensors)
    grads = _gradients(tensors, foreach)
    for number, grad in enumerate(() if 0 <= order < math.inf else grads):
        if not grad.numel():
            raise RuntimeError(f"{_name(number, grad)} has no elements, and so no norm of order {order}")
    counted = [p for p in tensors if p.grad is not None or _is_shared(p)]
    if not counted and pp_mesh is None:
        return torch.zeros(())
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
            raise ValueError(f"{_name(number, grad)} is {grad.placements}: reduce what is Partial before clipping")
    if foreach:
        for device in {local_tensor(grad).device for grad in grads}:
            torch.nn.utils.get_total_norm(torch.empty(0, device=device), foreach=True)  # raises where torch has none
    return grads


def _name(number: int, grad: Tensor) -> str:
    named = repr(grad.fqn) if isinstance(grad, OwnedTensor) else f"number {number}"
    return f"gradient {named} of shape {tuple(grad.shape)}"


def _is_shared(param: Tensor) -> bool:
    """Whether other ranks may have a gradient of a parameter of which this one has none."""
    is_here = isinstance(param, DTensor) and param.device_mesh.get_coordinate() is not None
    return is_here and param.requires_grad and bool(split_over(param))


def _total_norm(params: Sequence[Tensor], order: float, foreach: bool | None, pp_mesh: DeviceMesh | None) -> Tensor:
    """The norm of the norms of gradients, ``()``."""
    wide = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    if pp_mesh is not None and not params:
        device = mesh_device(pp_mesh.device_type)
    else:
        device = local_tensor(params[0]).device
    terms = torch.full((1,), absent_term(order), dtype=torch.float64, device=device)
    if params:
        likes = [param if param.grad is None else param.grad for param in params]
        absent = {number for number, param in enumerate(params) if param.grad is None}
        terms = torch.cat([terms, whole_terms(likes, order, foreach, device, absent)])
    total, present = join_terms(terms, order), any(param.grad is not None for param in params)
    if pp_mesh is not None:
        total = _over_stages(total, order, present, pp_mesh)
    elif order < 0 and not present:  # nor on other ranks, if they add nothing
        total = torch.where(total == absent_term(order), _nothing(order), total)
    return norms_of(total, order).to(torch.float64 if wide else torch.float32)


def _over_stages(total: Tensor, order: float, present: bool, pp_mesh: DeviceMesh) -> Tensor:
    """The term of all stages together, ``()``. Stages without gradients add nothing."""
    group = pp_mesh.get_group()
    terms = total.reshape(1)
    reduce_terms(terms, order, group)
    if order < 0:  # the term of no elements would become an infinite norm, and no gradients at all have the norm 0
        stages = torch.full_like(terms, float(present))
        dist.all_reduce(stages, group=group)
        terms = torch.where(stages > 0, terms, _nothing(order))
    return terms[0]


def _nothing(order: float) -> float:
    """The term whose norm of a negative order is zero."""
    return 0.0 if math.isinf(order) else math.inf
