"""Owned tensors leave and enter state dicts as ordinary even row-sharded DTensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dmuon._torch import local_tensor
from dmuon.comm import Comm, agree
from dmuon.group import OwnedEntry
from dmuon.owned_tensor import OwnedTensor, owned_tensor
from dmuon.runtime import Runtime

__all__ = ["even_to_owned", "hook_state_dicts", "owned_to_even"]


def hook_state_dicts(runtime: Runtime) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of every module that holds an owned matrix convert it.

    Both become collective: call them on all ranks.
    """
    held: dict[int, tuple[nn.Module, dict[str, OwnedEntry]]] = {}
    for entry in runtime.entries():
        for module, name in entry.sites:
            held.setdefault(id(module), (module, {}))[1][name] = entry
    for module, entries in held.values():
        module.register_state_dict_post_hook(partial(_after_state_dict, runtime, entries))
        module.register_load_state_dict_pre_hook(partial(_before_load, runtime, entries))


def owned_to_even(local: Tensor, shape: torch.Size, owner: int, comm: Comm) -> DTensor:
    """Copy an owned tensor into an even row-sharded DTensor. Collective.

    Args:
        local: ``(m, n)`` on the owner, ``(0, n)`` elsewhere.
    """
    rows = _even_rows(shape[0], comm.world)
    mine = local.new_empty((rows[comm.rank], shape[1]))
    if comm.world == 1:
        mine.copy_(local)
    else:
        width = shape[1]
        received = [rows[comm.rank] * width if rank == owner else 0 for rank in range(comm.world)]
        sent = [r * width if comm.rank == owner else 0 for r in rows]
        dist.all_to_all_single(mine.view(-1), local.contiguous().view(-1), received, sent, group=comm.reduce_group)
    return DTensor.from_local(mine, comm.mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))


def even_to_owned(value: Tensor, shape: torch.Size, owner: int, comm: Comm, dtype: torch.dtype) -> Tensor:
    """The owner's whole ``(m, n)`` tensor, ``(0, n)`` elsewhere, from a DTensor or a plain whole tensor.

    Collective when ``value`` is a DTensor; its kind must be the same on all ranks. An owned tensor may have another
    owner.
    """
    width = shape[1]
    if not isinstance(value, DTensor):
        return (value if comm.rank == owner else value[:0]).to(device=comm.device, dtype=dtype, copy=True)
    if value.device_mesh != comm.mesh or tuple(value.placements) != (Shard(0),):
        return even_to_owned(value.full_tensor(), shape, owner, comm, dtype)
    rows = _even_rows(shape[0], comm.world)
    if isinstance(value, OwnedTensor):
        rows = [shape[0] if rank == value.owner else 0 for rank in range(comm.world)]
    local = local_tensor(value).to(device=comm.device, dtype=dtype).contiguous()
    whole = local.new_empty((shape[0] if comm.rank == owner else 0, width))
    if comm.world == 1:
        return whole.copy_(local)
    sent = [local.numel() if rank == owner else 0 for rank in range(comm.world)]
    received = [r * width if comm.rank == owner else 0 for r in rows]
    dist.all_to_all_single(whole.view(-1), local.view(-1), received, sent, group=comm.reduce_group)
    return whole


def describe(value: Any, shape: torch.Size) -> str | None:
    """What kind of value a rank holds, comparable across ranks; None when it cannot be loaded."""
    if not isinstance(value, Tensor) or value.shape != shape:
        return None
    return "sharded" if isinstance(value, DTensor) else "whole"


def _even_rows(rows: int, world: int) -> list[int]:
    """Rows per rank of ``Shard(0)``: ``ceil(rows / world)`` each while they last."""
    size = -(-rows // world)
    return [max(0, min(size, rows - rank * size)) for rank in range(world)]


def _resting(module: nn.Module, entries: dict[str, OwnedEntry]) -> dict[str, OwnedEntry]:
    """The entries that ``module`` holds in their resting form; whole weights (``summon_full_params``) need no help."""
    return {name: entry for name, entry in entries.items() if module._parameters[name] is entry.rest}


def _after_state_dict(
    runtime: Runtime,
    entries: dict[str, OwnedEntry],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
) -> None:
    runtime.at_rest("state_dict()", summoned=True)
    with torch.no_grad():
        for name, entry in _resting(module, entries).items():
            state_dict[prefix + name] = owned_to_even(entry.master, entry.shape, entry.owner, runtime.comm)


def _before_load(
    runtime: Runtime,
    entries: dict[str, OwnedEntry],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    runtime.at_rest("load_state_dict()", summoned=True)
    if metadata.get("assign_to_params_buffers", False):
        raise ValueError("load_state_dict(assign=True) would replace parameters that dmuon owns; use assign=False")
    entries = _resting(module, entries)
    if not entries:
        return
    comm = runtime.comm
    mine = {name: describe(state_dict.get(prefix + name), e.shape) for name, e in entries.items()}
    present = {name: prefix + name in state_dict for name in entries}
    everywhere = agree(comm.reduce_group, None, (mine, present))
    for name, entry in entries.items():
        key = prefix + name
        kinds = [kind[name] for kind, _ in everywhere]
        holders = [has[name] for _, has in everywhere]
        if None not in kinds and len(set(kinds)) == 1:
            with torch.no_grad():
                local = even_to_owned(state_dict[key], entry.shape, entry.owner, comm, entry.master.dtype)
            state_dict[key] = owned_tensor(local, comm.mesh, entry.shape, fqn=entry.fqn, owner=entry.owner)
            continue
        # No rank loads what some rank cannot: torch's own report of a missing key or a size then names the fault here.
        faulty = [r for r, (kind, has) in enumerate(zip(kinds, holders, strict=True)) if kind is None and has]
        if faulty:
            errors.append(f"{key}: rank {faulty[0]} holds a value that is not a tensor of shape {tuple(entry.shape)}")
        elif all(holders):
            errors.append(f"{key}: some ranks hold a sharded tensor and some a whole one")
        elif any(holders):
            errors.append(f"{key}: missing on rank {holders.index(False)} only")
        state_dict.pop(key, None)
