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
    wholes = [[_whole(block.buffer.comm, matrix) for matrix in block.matrices] for block in blocks]
    for block, whole in zip(blocks, wholes, strict=True):
        if block.buffer.state is not BufferState.FREED:
            block.buffer.free()
        block.summon(whole)
    try:
        yield
        edited = [(block.buffer.comm, matrix, _edited(matrix)) for block in blocks for matrix in block.matrices]
    finally:
        for block in blocks:
            block.dismiss()
    if writeback:
        with torch.no_grad():
            for comm, matrix, param in edited:
                if matrix.owner == comm.position:
                    matrix.master.copy_(local_tensor(param))
        for runtime in runtimes:
            runtime.weights_changed()


def _edited(matrix: OwnedMatrix) -> nn.Parameter:
    """What the module holds now: the parameter that was put there, or one that the user put in its place."""
    module, name = matrix.sites[0]
    param = module._parameters[name]
    if param is None or param.shape != matrix.shape:
        replacement = "nothing" if param is None else f"shape {tuple(param.shape)}"
        raise RuntimeError(
            f"summon_full_params(): parameter {matrix.fqn!r} of shape {tuple(matrix.shape)} was replaced by "
            f"{replacement}; keep its shape"
        )
    return param


def _whole(comm: Comm, matrix: OwnedMatrix) -> nn.Parameter:
    with torch.no_grad():
        if matrix.owner == comm.position:
            whole = matrix.master.clone()
        else:
            whole = torch.empty(matrix.local_shape, dtype=matrix.master.dtype, device=comm.device)
        if comm.world > 1:
            with comm.monitor.watch(f"broadcast of {matrix.fqn!r} for summon_full_params"):
                dist.broadcast(whole, src=comm.ranks[matrix.owner], group=comm.group)
        if matrix.tensor is not None:
            whole = matrix.tensor.wrap(whole, matrix.shape)
    return whole_parameter(whole, matrix.rest)
