"""torchtitan's container of optimizers, of which its trainer, schedulers and checkpointer make use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer

from dmuon.optimizer.groups import names_of, param_groups
from dmuon.optimizer.muon import Muon


class MuonOptimizers(OptimizersContainer):  # type: ignore[misc]
    """A ``dmuon.Muon`` for each part of the model: ``MuonOptimizers.Config(lr=…)`` in the place of ``optimizer``.

    Raises:
        ValueError: ``param_groups`` of the configuration, which dmuon does not read.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """What ``dmuon.Muon`` takes.

        Attributes:
            lr: learning rate of Muon, and of AdamW unless ``options`` have an ``adamw_lr``.
            options: any other arguments, ``select`` and ``exclude`` among them.
        """

        lr: float = 0.01
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups:
            raise ValueError(
                "param_groups of MuonOptimizers.Config are not read: dmuon routes by its own policy; keep parameters "
                "on AdamW by options={'exclude': ['*.name', …]}"
            )
        options = dict(config.options)
        select, exclude = options.pop("select", None), options.pop("exclude", None)
        self.model_parts, self.optimizers = model_parts, []
        for part in model_parts:
            names = names_of(part)
            groups = param_groups(part, select, exclude)
            for group in groups:  # its checkpoints go by names
                group["params"] = [(names[id(p)], p) for p in group["params"]]
            self.optimizers.append(Muon(groups, config.lr, **options))
        self._post_init([p for part in model_parts for p in part.parameters()])
