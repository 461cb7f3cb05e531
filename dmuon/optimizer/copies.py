"""What an optimizer was built with, and copies of optimizers whose parameters one process has to itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.exchanged.config import DistributedConfig
from dmuon.model.matrix_spec import remember_spec, spec_of
from dmuon.step.residency import MOMENTUM


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What an optimizer was built with, as far as its groups and its state do not tell.

    Attributes:
        muon, adamw: options of groups that give none.
        names: of parameters, by ``id``, as far as they are known.
        copies: over which group DDP copies a parameter, by ``id``.
        config: as given.
        overlap: updates start during backward.
    """

    muon: dict[str, Any]
    adamw: dict[str, Any]
    names: dict[int, str]
    copies: dict[int, dist.ProcessGroup]
    config: DistributedConfig | None
    overlap: bool


def copyable_origin(origin: Origin, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``origin`` without ids, which no copy shares.

    Raises:
        RuntimeError: the optimizer communicates, and process groups live in one process.
    """
    params: list[Tensor] = [param for group in groups for param in group["params"]]
    for param in params:
        if isinstance(param, (OwnedTensor, DTensor)) or id(param) in origin.copies or origin.config is not None:
            name = param.fqn if isinstance(param, OwnedTensor) else origin.names.get(id(param), "its first one")
            raise RuntimeError(
                f"an optimizer of parameters that ranks share, such as {name!r}, cannot be copied or pickled: save "
                "optimizer.state_dict(), and load it into an optimizer that was built as this one was, over a model of "
                "its own"
            )
    return {
        "muon": origin.muon,
        "adamw": origin.adamw,
        "names": [(param, origin.names[id(param)]) for param in params if id(param) in origin.names],
        "specs": [(param, spec_of(param)) for group in groups if group["use_muon"] for param in group["params"]],
        "overlap": origin.overlap,
    }


def origin_of_copy(copied: Mapping[str, Any]) -> Origin:
    """What :func:`copyable_origin` made, after it was copied or unpickled."""
    for param, spec in copied["specs"]:
        remember_spec(param, spec)
    names = {id(param): name for param, name in copied["names"]}
    return Origin(copied["muon"], copied["adamw"], names, {}, None, copied["overlap"])


def copyable_state(state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """``state`` with momentum that stands alone: each view would be pickled with the whole stack that it shows."""
    return {
        param: {name: value.clone() if name == MOMENTUM else value for name, value in values.items()}
        for param, values in state.items()
    }
