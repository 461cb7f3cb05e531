"""Parameter groups of the optimizer: which parameters they hold, under what names, and which route each takes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from dmuon.dedicated.dedication import dedication_of, dedications
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.model.blocks import canonical_fqn
from dmuon.model.routing import Select, route_parameters
from dmuon.optimizer.options import check_names, check_options
from dmuon.platform.torch_private import flattened_by_fsdp1, replicate_group, unwrapped_for_ddp

_FLATTENED = (
    "was flattened by FullyShardedDataParallel (FSDP1), whose shards are no parts of a matrix; use torch's fully_shard "
    "(FSDP2) instead"
)

_log = logging.getLogger("dmuon")


def param_groups(model: nn.Module, select: Select | None = None) -> list[dict[str, Any]]:
    """Groups with ``use_muon`` flags, by the same policy as ``dmuon.Muon(model)``.

    Returns:
        Up to three groups: matrices for Muon; tensors of two or more dimensions for AdamW; the rest for AdamW with
        ``weight_decay=0``.

    Raises:
        ValueError: no matrix was selected; ``select`` beside ``dedicate_params``, which has routed already.
    """
    if dedications(model):
        if select is not None:
            raise ValueError("select: dedicate_params has routed this model already; pass select to dedicate_params")
        if dedication_of(model) is None:
            raise ValueError(
                "dedicate_params was called on a part of this model only; call it on the whole model, or pass groups"
            )
        routed = [(p, isinstance(p, OwnedTensor)) for p in model.parameters()]
    else:
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise ValueError(f"module {name or 'model'!r} {_FLATTENED}")
        routed = [(r.param, r.muon) for r in route_parameters(inside_ddp(model), select)]
    return _groups(routed)


def _groups(routed: Sequence[tuple[Tensor, bool]]) -> list[dict[str, Any]]:
    """Of parameters, and whether Muon takes each."""
    rest = [p for p, muon in routed if not muon]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, muon in routed if muon], "use_muon": True},
        {"params": [p for p in rest if p.ndim >= 2], "use_muon": False},
        {"params": [p for p in rest if p.ndim < 2], "use_muon": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def groups_from(
    params: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]], select: Select | None
) -> list[dict[str, Any]]:
    """What the user passed to ``Muon``, as groups that each have a ``use_muon`` flag."""
    if isinstance(params, nn.Module):
        return param_groups(params, select)
    if select is not None:
        raise ValueError("select needs the model: call Muon(model, select=…), or set use_muon in each group")
    if isinstance(params, Tensor):
        raise TypeError("params must be a module, an iterable of tensors or an iterable of groups, got one tensor")
    if isinstance(params, (set, frozenset)):
        params = _ordered(params)
    items = list(params)
    if not items:
        raise ValueError("params is empty: Muon got no parameters")
    if all(isinstance(item, Mapping) for item in items):
        groups = [dict(item) for item in items if isinstance(item, Mapping)]
        for index, group in enumerate(groups):
            if not isinstance(group.get("use_muon"), bool):
                raise ValueError(f"group {index} lacks use_muon; set it to True (Muon) or False (AdamW)")
        return groups
    tensors = [item for item in items if isinstance(item, Tensor)]
    if len(tensors) < len(items):
        raise TypeError("params mixes tensors, groups or other things; pass tensors only or groups only")
    for param in tensors:
        if flattened_by_fsdp1(param):
            raise ValueError(f"a parameter of shape {tuple(param.shape)} {_FLATTENED}")
    for param in tensors:
        if param.ndim > 2:
            raise ValueError(
                f"a parameter has shape {tuple(param.shape)}: dmuon cannot tell whether that is a stack of matrices; "
                "pass groups, with use_muon=True for stacks (e, m, n) and use_muon=False for anything else"
            )
    vectors = sum(p.ndim < 2 for p in tensors)
    if vectors:
        _log.warning("Muon: %d tensors of fewer than two dimensions go to AdamW", vectors)
    return _groups([(p, p.ndim >= 2) for p in tensors])


def names_of(params: object) -> dict[int, str]:
    """Canonical names of a module's parameters, by ``id``; empty for anything but a module."""
    if not isinstance(params, nn.Module):
        return {}
    return {id(p): canonical_fqn(name) for name, p in inside_ddp(params).named_parameters()}


def names_in(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> dict[int, str]:
    """A name for each parameter of ``groups``, by ``id``.

    Args:
        names: what :func:`names_of` knows.
    """
    named: dict[int, str] = {}
    for g, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            name = param.fqn if isinstance(param, OwnedTensor) else names.get(id(param))
            named[id(param)] = name or f"parameter {i} of group {g}"
    return named


def replicated_by_ddp(params: object) -> dict[int, dist.ProcessGroup]:
    """The group over which ``DistributedDataParallel`` or ``replicate`` copies a parameter, by ``id``."""
    if not isinstance(params, nn.Module):
        return {}
    groups = [(module, replicate_group(module)) for module in params.modules()]
    return {id(p): group for module, group in groups if group is not None for p in module.parameters()}


def inside_ddp(model: nn.Module) -> nn.Module:
    """The module that a ``DistributedDataParallel`` wraps; any other module itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def _ordered(params: set[Any] | frozenset[Any]) -> list[Tensor]:
    """``params`` in an order that all ranks share: a set has none, but owned parameters have names."""
    if not all(isinstance(p, OwnedTensor) for p in params):
        raise TypeError("params is a set, whose order differs between ranks; pass a list, or owned_parameters(model)")
    return sorted(params, key=lambda p: (p.keeper.name, p.fqn))  # several dedicated models may share names


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for an option or a parameter that the group's route cannot take."""
    check_names(group)
    check_options(group)
    for param in group["params"]:
        if not isinstance(param, Tensor):
            raise TypeError(f"params holds {type(param).__name__}; pass tensors")
        _check_param(param, group["use_muon"])


def _check_param(param: Tensor, use_muon: bool) -> None:
    name = param.fqn if isinstance(param, OwnedTensor) else f"of shape {tuple(param.shape)}"
    if use_muon and flattened_by_fsdp1(param):
        raise ValueError(f"parameter {name} {_FLATTENED}")
    if use_muon and unwrapped_for_ddp(param):
        raise ValueError(
            f"parameter {name} is the local part of a DTensor that was unwrapped for DDP over tensor parallelism; use "
            "fully_shard over a mesh with a replicate dimension instead"
        )
    if param.is_meta:
        raise ValueError(
            f"parameter {name} is on the meta device; materialize the model (to_empty and its initialization) before "
            "building the optimizer"
        )
    if param.is_complex() or (use_muon and not param.is_floating_point()):
        raise ValueError(f"parameter {name} is {param.dtype}; Muon and AdamW take floating-point parameters")
    if not use_muon:
        if isinstance(param, OwnedTensor):
            raise ValueError(f"parameter {name!r} is owned by dmuon and cannot be in a group with use_muon=False")
        return
    if param.ndim not in (2, 3):
        raise ValueError(
            f"parameter {name} has {param.ndim} dimensions; Muon takes matrices, and stacks of them (e, m, n): put it "
            "in a group with use_muon=False"
        )
