"""What frameworks need that neither they nor the optimizer bring; each module imports its framework.

Here is what they share: a dedicated model and its optimizer as who writes one file saves and loads them, whole, on all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dmuon.dedicated.dedication import dedications
from dmuon.layout.topology import listed
from dmuon.model.blocks import canonical_fqn


def require_whole(model: nn.Module) -> None:
    """Raise ValueError for a model in whose place one file cannot stand: groups hold other weights by one name."""
    for dedication in dedications(model):
        runtime = dedication.runtime
        if runtime.strangers:
            raise ValueError(
                f"{next(runtime.matrices()).fqn!r} and its like are other weights on ranks {listed(runtime.strangers)}"
                ", so one file cannot hold the model: make them DTensors over the expert-parallel dimension before "
                "dedicate_params"
            )


class WholeOptimizer:
    """Stands for an optimizer where its state is saved or loaded, on one rank or on all.

    Args:
        options: how its present state is gathered, which it saves then; collective. None saves nothing.
    """

    def __init__(self, model: nn.Module, optimizer: Any, options: StateDictOptions | None = None) -> None:
        self._model, self._optimizer = model, optimizer
        self._state = {} if options is None else get_optimizer_state_dict(model, optimizer, options=options)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state, options=StateDictOptions(full_state_dict=True))


class WholeModel:
    """Stands for a model where whole weights are loaded, from a file in which tied ones have one name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Nothing, since nothing has to be compared: safetensors looks here for tied weights."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        params = self._model.named_parameters(remove_duplicate=False)
        named = [(canonical_fqn(name), param) for name, param in params]
        present = {id(param): state[name] for name, param in named if name in state}
        tied = {name: present[id(param)] for name, param in named if name not in state and id(param) in present}
        options = StateDictOptions(full_state_dict=True, strict=strict)
        return set_model_state_dict(self._model, {**state, **tied}, options=options)
