"""What ``dedicate_params`` leaves on a model, and how to find it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn

from dmuon.dedicated.runtime import Runtime
from dmuon.model.routing import Route
from dmuon.planning.owner_plan import OwnerPlan

__all__ = ["Dedication", "dedication_of", "dedications", "require_dedicated"]

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
