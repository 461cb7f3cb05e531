"""Who averages the gradients of each trained parameter over ranks: exactly one that is known, or the user hears of it.

FSDP2 and autograd do it for DTensors, DDP for what its reducer was given, and dmuon for all that a dedicated model
holds. A rank has a parameter to itself where there is one process, or where the user says so by a configuration. Whole
parameters beside those that tensor parallelism cuts have the same gradients on all of its ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon.dedicated.dedication import averaged_by_dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.optimizer.wrapping import replicated_by_any
from dmuon.platform.log import logger
from dmuon.platform.torch_private import left_by_ddp, managed_by_fsdp

_NAMED = 3
_log = logger(__name__)


class Averagers:
    """What was found out about the parameters of one optimizer as they are laid out."""

    def __init__(self) -> None:
        self._frozen: list[Tensor] | None = None  # those that nobody would average; None before anyone has looked
        self._told: set[int] = set()

    def forget(self) -> None:
        """Parameters are laid out anew."""
        self._frozen = None

    def check(self, groups: Iterable[Mapping[str, Any]], names: Mapping[int, str], *, by_user: bool) -> None:
        """Look once for each layout, and when something is trained that was frozen and that nobody averages.

        Args:
            names: of the parameters, by ``id``.
            by_user: a configuration was given.

        Raises:
            RuntimeError: DistributedDataParallel holds a trained parameter that its reducer does not know.
        """
        if self._frozen is not None:
            for param in self._frozen:
                if param.requires_grad:
                    break
            else:
                return
        params = [param for group in groups for param in group["params"]]
        self._told &= set(map(id, params))  # others may get the ids of those that are gone
        alone = [] if by_user else [param for param in params if not isinstance(param, DTensor)]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            alone = []
        if alone:
            known = replicated_by_any(alone).keys() | averaged_by_dmuon()
            alone = [param for param in alone if id(param) not in known]
        trained = [param for param in alone if param.requires_grad and id(param) not in self._told]
        if trained:
            _tell(trained, {id(p) for p in params if isinstance(p, DTensor) and not isinstance(p, OwnedTensor)}, names)
            self._told.update(map(id, trained))
        self._frozen = [param for param in alone if not param.requires_grad]


def _tell(trained: Sequence[Tensor], dtensors: set[int], names: Mapping[int, str]) -> None:
    gc.collect()
    modules = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    left = {id(param) for module in modules for param in left_by_ddp(module)}
    unknown = [names[id(param)] for param in trained if id(param) in left]
    if unknown:
        raise RuntimeError(
            f"DistributedDataParallel does not average the gradients of {_listed(unknown)}: frozen when it wrapped "
            "the model, or later than that. Wrap it when they are there and trained; if your program averages them "
            "itself, let DDP ignore them (DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)"
        )
    sharded = {id(p) for m in modules if isinstance(m, FSDPModule) for p in managed_by_fsdp(m)}
    if dtensors and not dtensors & sharded:
        return
    _log.warning(
        "Muon: nobody is known to average the gradients of %s over the %d ranks, so that each rank trains them by its "
        "own batch: shard or wrap what holds them (fully_shard, DistributedDataParallel), or call "
        "dmuon.dedicate_params; if your program averages them, or ranks shall differ, say so by "
        "distributed_config=dmuon.create_dtensor_config()",
        _listed([names[id(param)] for param in trained]),
        dist.get_world_size(),
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more parameters" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
