"""The toy model, dedicated at costs that nobody measures, and refusals that must leave a model as it was."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon
from harness.network import Network
from harness.toy import build


def default_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def dedicate(model: Any, mesh: Any = None, **options: Any) -> Any:
    """The model, of which dmuon owns the matrices."""
    dmuon.dedicate_params(model, default_mesh() if mesh is None else mesh, **{"costs": "flops", **options})
    return model


def dedicated(**options: Any) -> Network:
    model: Network = dedicate(build(), **options)
    return model


def refused(model: nn.Module, mesh: Any = None, **options: Any) -> None:
    """``dedicate_params`` must raise; then the model is untouched."""
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters() if not p.is_meta}
    try:
        dedicate(model, mesh, **options)
    except Exception:
        after = dict(model.named_parameters())
        assert all(after[n] is p and torch.equal(p, value) for n, (p, value) in before.items()), "data moved"
        assert not model._forward_pre_hooks and not dmuon.owned_parameters(model)
        raise
