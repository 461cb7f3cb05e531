"""When gradients are reduced: for gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon.dedicated.dedication import require_dedicated

__all__ = ["no_sync", "set_requires_all_reduce", "set_requires_gradient_sync"]


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Reduce gradients in backward (True, the default) or accumulate them locally (False).

    Covers owned matrices, replicated parameters and every FSDP2 module of ``model``. The last backward before
    ``step()`` must synchronize; it reduces what was accumulated.

    Raises:
        ValueError: the model was not dedicated.
    """
    for dedication in require_dedicated(model):
        dedication.runtime.sync = requires_gradient_sync
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)


def set_requires_all_reduce(model: nn.Module, requires_all_reduce: bool) -> None:
    """With several replicas, reduce gradients across them (True, the default) or only within each (False).

    Between micro-batches this keeps gradients sharded without crossing replicas. Covers owned matrices, replicated
    parameters and every FSDP2 module of ``model``. The last backward before ``step()`` must do both. Without replicas
    it changes nothing; where every rank is a replica it is :func:`set_requires_gradient_sync`.

    Raises:
        ValueError: the model was not dedicated.
    """
    for dedication in require_dedicated(model):
        dedication.runtime.all_reduce = requires_all_reduce
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(requires_all_reduce, recurse=False)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside the context, backward accumulates gradients without communication.

    Raises:
        ValueError: the model was not dedicated.
    """
    set_requires_gradient_sync(model, False)
    try:
        yield
    finally:
        set_requires_gradient_sync(model, True)
