"""Weights in half precision: what is updated in their place in fp32, and how they get it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels import HALF
from dmuon.platform.torch_private import local_tensor

MASTER = "master_weight"  # in the optimizer's state


def has_master(group: Mapping[str, Any], param: Tensor) -> bool:
    """Whether the optimizer keeps a master of ``param``: wider weights are their own."""
    return bool(group.get("master_weights")) and param.dtype in HALF


def new_master(param: Tensor) -> Tensor:
    """This rank's part of a master as ``param`` is now."""
    local = local_tensor(param).detach()
    return torch.empty_like(local, dtype=torch.float32).copy_(local)


def new_masters(groups: Iterable[Mapping[str, Any]]) -> dict[int, Tensor]:
    """This rank's parts of the masters of Muon's matrices, by ``id``; of frozen ones without memory."""
    masters: dict[int, Tensor] = {}
    for group in groups:
        for param in group["params"] if group["use_muon"] else ():
            if has_master(group, param):
                local = local_tensor(param).detach()
                masters[id(param)] = new_master(local if param.requires_grad else local.to("meta"))
    return masters


def take_edits(masters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Let each master have what ``weights`` are, wherever they are not that master, rounded.

    Somebody has changed them there: a load of the model, a clip, an average that was put in their place.
    """
    for master, weight in zip(masters, weights, strict=True):
        torch.where(master.to(weight.dtype) == weight, master, weight, out=master)
