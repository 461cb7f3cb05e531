"""Whole weights in the modules, outside forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from dmuon.comm.context import Comm
from dmuon.dedicated.buffer import BufferState
from dmuon.dedicated.dedication import require_dedicated
from dmuon.dedicated.matrix import OwnedMatrix, whole_parameter
from dmuon.platform.torch_private import local_tensor

__all__ = ["summon_full_params"]


@contextmanager
def summon_full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside the context, modules hold whole owned weights, in the dtype of the masters, on every rank.

    Under tensor parallelism they hold this rank's parts, as DTensors. Costs the memory of all owned matrices on every
    rank. Forward and backward are not available inside. Collective.

    Args:
        model: the model that was dedicated.
        writeback: make the owners' edits the new weights. Edits must be the same on all ranks; an exception inside
            drops them.

    Raises:
        ValueError: the model was not dedicated.
        RuntimeError: inside a forward or backward, or inside itself; a forward, a step, or a weight of another shape
            inside.
    """
    runtimes = [dedication.runtime for dedication in require_dedicated(model)]
    for runtime in runtimes:
        runtime.at_rest("summon_full_params()")
    blocks = [block for runtime in runtimes for block in runtime.blocks]
    wholes = [[_whole(block.buffer.comm, entry) for entry in block.entries] for block in blocks]
    for block, whole in zip(blocks, wholes, strict=True):
        if block.buffer.state is not BufferState.FREED:
            block.buffer.free()
        block.summon(whole)
    try:
        yield
        edited = [(block.buffer.comm, entry, _edited(entry)) for block in blocks for entry in block.entries]
    finally:
        for block in blocks:
            block.dismiss()
    if writeback:
        with torch.no_grad():
            for comm, entry, param in edited:
                if entry.owner == comm.position:
                    entry.master.copy_(local_tensor(param))
        for runtime in runtimes:
            runtime.weights_changed()


def _edited(entry: OwnedMatrix) -> nn.Parameter:
    """What the module holds now: the parameter that was put there, or one that the user put in its place."""
    module, name = entry.sites[0]
    param = module._parameters[name]
    if param is None or param.shape != entry.shape:
        replacement = "nothing" if param is None else f"shape {tuple(param.shape)}"
        raise RuntimeError(
            f"summon_full_params(): parameter {entry.fqn!r} of shape {tuple(entry.shape)} was replaced by "
            f"{replacement}; keep its shape"
        )
    return param


def _whole(comm: Comm, entry: OwnedMatrix) -> nn.Parameter:
    with torch.no_grad():
        if entry.owner == comm.position:
            whole = entry.master.clone()
        else:
            whole = torch.empty(entry.local_shape, dtype=entry.master.dtype, device=comm.device)
        if comm.world > 1:
            with comm.monitor.watch(f"broadcast of {entry.fqn!r} for summon_full_params"):
                dist.broadcast(whole, src=comm.ranks[entry.owner], group=comm.group)
        if entry.tensor is not None:
            whole = entry.tensor.wrap(whole, entry.shape)
    return whole_parameter(whole, entry.rest)
