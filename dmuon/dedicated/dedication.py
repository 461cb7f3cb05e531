"""What ``dedicate_params`` leaves on a model, how to find it again, and when it reduces gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon.dedicated.runtime import Runtime
from dmuon.model.routing import Route
from dmuon.planning.owner_plan import OwnerPlan

_ATTRIBUTE = "_dmuon_dedication"


class Dedication:
    """The plan, the routes, and the runtime that moves the weights of one dedicated model."""

    def __init__(self, plan: OwnerPlan, routes: Sequence[Route], runtime: Runtime) -> None:
        self.plan = plan
        self.reasons = {r.fqn: (r.muon, r.reason) for r in routes}  # routes themselves would keep the parameters alive
        self.adamw_elements = sum(r.param.numel() for r in routes if not r.muon)
        self.runtime = runtime

    def attach(self, model: nn.Module) -> None:
        """Leave this on ``model``."""
        setattr(model, _ATTRIBUTE, self)


def dedication_of(module: nn.Module) -> Dedication | None:
    """What ``dedicate_params(module)`` left; None where it was called on another module, above or below."""
    dedication: Dedication | None = module.__dict__.get(_ATTRIBUTE)
    return dedication


def dedications(module: nn.Module) -> list[Dedication]:
    """What ``dedicate_params`` left in ``module`` or below it, outermost first."""
    return [dedication for dedication in map(dedication_of, module.modules()) if dedication is not None]


def require_dedicated(model: nn.Module) -> list[Dedication]:
    """:func:`dedications`, at least one.

    Raises:
        ValueError: the model was not dedicated.
    """
    dedicated = dedications(model)
    if not dedicated:
        raise ValueError("model was not dedicated: call dmuon.dedicate_params(model, mesh) first")
    return dedicated


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
