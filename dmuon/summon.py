"""Whole weights in the modules, outside forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from dmuon.dedicate import dedications
from dmuon.group import OwnedEntry, place
from dmuon.runtime import Runtime

__all__ = ["summon_full_params"]


@contextmanager
def summon_full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Within, modules hold whole owned weights, in the dtype of the masters, on every rank.

    Costs the memory of all owned matrices on every rank. Forward and backward are not available inside. Collective;
    with ``writeback`` edits must be the same on all ranks, the owner's are kept.

    Args:
        model: the model that was dedicated.

    Raises:
        ValueError: the model was not dedicated.
        RuntimeError: inside a forward or backward.
    """
    found = dedications(model)
    if not found:
        raise ValueError("model was not dedicated: call dmuon.dedicate_params(model, mesh) first")
    summoned: list[tuple[Runtime, OwnedEntry, nn.Parameter]] = []
    for dedication in found:
        dedication.runtime.at_rest("summon_full_params()")
    try:
        for dedication in found:
            runtime = dedication.runtime
            for entry in runtime.entries():
                summoned.append((runtime, entry, _whole(runtime, entry)))
        for _, entry, whole in summoned:
            place(entry, whole)
        yield
    finally:
        for _, entry, _ in summoned:
            place(entry, entry.rest)
    if writeback:
        with torch.no_grad():
            for runtime, entry, whole in summoned:
                if entry.owner == runtime.comm.rank:
                    entry.master.copy_(whole)
        for dedication in found:
            dedication.runtime.weights_changed()


def _whole(runtime: Runtime, entry: OwnedEntry) -> nn.Parameter:
    comm = runtime.comm
    with torch.no_grad():
        if entry.owner == comm.rank:
            whole = entry.master.clone()
        else:
            whole = torch.empty(entry.shape, dtype=entry.master.dtype, device=comm.device)
        if comm.world > 1:
            dist.broadcast(whole, src=comm.ranks[entry.owner], group=comm.fill_group)
    return nn.Parameter(whole, requires_grad=entry.rest.requires_grad)
