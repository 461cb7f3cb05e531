"""What an optimizer was built with, and how it is copied and pickled: parameters follow, process groups are shared."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.exchanged.config import OWN_ENTRIES, DistributedConfig
from dmuon.model.matrix_spec import remember_spec, spec_of
from dmuon.step.residency import MOMENTUM

_REMEDY = "save optimizer.state_dict(), and load it into an optimizer that was built as this one was"


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
        RuntimeError: dmuon owns some of the parameters, which cannot be copied.
    """
    params: list[Tensor] = [param for group in groups for param in group["params"]]
    owned = next((param for param in params if isinstance(param, OwnedTensor)), None)
    if owned is not None:
        raise RuntimeError(
            f"an optimizer of parameters that dmuon owns, such as {owned.fqn!r}, cannot be copied or pickled: "
            f"{_REMEDY}, over a model that was dedicated anew"
        )
    return {
        "muon": origin.muon,
        "adamw": origin.adamw,
        "names": [(param, origin.names[id(param)]) for param in params if id(param) in origin.names],
        "copies": [(param, _Here(origin.copies[id(param)])) for param in params if id(param) in origin.copies],
        "specs": [(param, spec_of(param)) for group in groups if group["use_muon"] for param in group["params"]],
        "config": _Here(origin.config),
        "overlap": origin.overlap,
    }


def origin_of_copy(copied: Mapping[str, Any]) -> Origin:
    """What :func:`copyable_origin` made, after it was copied or unpickled."""
    for param, spec in copied["specs"]:
        remember_spec(param, spec)
    return Origin(
        muon=copied["muon"],
        adamw=copied["adamw"],
        names={id(param): name for param, name in copied["names"]},
        copies={id(param): here.value for param, here in copied["copies"] if here.value is not None},
        config=copied["config"].value,
        overlap=copied["overlap"],
    )


def copied_gradients(groups: Sequence[Mapping[str, Any]], memo: Mapping[int, Any]) -> dict[int, Any]:
    """For ``memo``, copies of the gradients that are DTensors: torch cannot copy these along with their parameters."""
    grads = [param.grad for group in groups for param in group["params"] if isinstance(param.grad, DTensor)]
    return {id(grad): grad.clone() for grad in grads if id(grad) not in memo}


def copyable_state(state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """``state`` with momentum that stands alone: each view would be pickled with the whole stack that it shows."""
    return {
        param: {name: value.clone() if name == MOMENTUM else value for name, value in values.items()}
        for param, values in state.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Here:
    """A configuration or a process group, which copies in this process share."""

    value: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> _Here:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.value, DistributedConfig):
            state = {key: value for key, value in self.value.state.items() if key not in OWN_ENTRIES}
            bare = replace(self.value, state=state)
            try:
                pickle.dumps(bare)
            except Exception as fault:  # whatever a user's functions and state hold
                raise TypeError(
                    f"an optimizer whose distributed_config holds what cannot be pickled ({fault}) cannot be pickled: "
                    f"{_REMEDY}"
                ) from fault
            return _Here, (bare,)
        if self.value is None:
            return _Here, (None,)
        if self.value is dist.group.WORLD:
            return _world, ()
        raise TypeError(
            "an optimizer of parameters that DistributedDataParallel copies over a process group of its own cannot be "
            f"pickled: {_REMEDY}"
        )


def _world() -> _Here:
    """All ranks of whoever unpickles; nothing where there is one process only."""
    return _Here(dist.group.WORLD if dist.is_initialized() else None)
