"""Gradient synchronization of dmuon and FSDP2 with one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon.dedicate import dedications

__all__ = ["no_sync", "set_requires_gradient_sync"]


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Reduce gradients in backward (True, the default) or accumulate them locally (False).

    Covers owned matrices, replicated parameters and every FSDP2 module of ``model``. The last backward before
    ``step()`` must synchronize; it reduces what was accumulated.

    Raises:
        ValueError: the model was not dedicated.
    """
    found = dedications(model)
    if not found:
        raise ValueError("model was not dedicated: call dmuon.dedicate_params(model, mesh) first")
    for dedication in found:
        dedication.runtime.sync = requires_gradient_sync
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within, backward accumulates gradients without communication.

    Raises:
        ValueError: the model was not dedicated.
    """
    set_requires_gradient_sync(model, False)
    try:
        yield
    finally:
        set_requires_gradient_sync(model, True)
