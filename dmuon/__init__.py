"""Owner-centric distributed Muon for PyTorch.

A public name is loaded when it is first used, with what it needs and nothing else: who trains loads no reports, and who
plans on a laptop no runtime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests/test_import.py holds these against _HOMES
    from dmuon import kernels, solver
    from dmuon.comm.context import CommOptions
    from dmuon.comm.monitor import CollectiveError
    from dmuon.dedicated.dedicate import dedicate_params, fully_shard, owned_parameters
    from dmuon.dedicated.dedication import (
        no_sync,
        set_requires_all_reduce,
        set_requires_gradient_sync,
        summon_full_params,
    )
    from dmuon.exchanged.config import DistributedConfig
    from dmuon.exchanged.generators import (
        create_auto_config,
        create_devicemesh_config,
        create_dtensor_config,
        create_processgroup_config,
    )
    from dmuon.model.matrix_spec import MatrixSpec
    from dmuon.optimizer.attention_heads import AttentionHeads
    from dmuon.optimizer.clip import clip_grad_norm_
    from dmuon.optimizer.groups import param_groups
    from dmuon.optimizer.muon import Muon
    from dmuon.optimizer.qk_clip import QKClip
    from dmuon.optimizer.record import MatrixRecord, MatrixStats, StepStats
    from dmuon.planning.owner_plan import OwnerPlan
    from dmuon.report.explain import explain

__version__ = "0.1.0"

__all__ = [
    "AttentionHeads",
    "CollectiveError",
    "CommOptions",
    "DistributedConfig",
    "MatrixRecord",
    "MatrixSpec",
    "MatrixStats",
    "Muon",
    "OwnerPlan",
    "QKClip",
    "StepStats",
    "clip_grad_norm_",
    "create_auto_config",
    "create_devicemesh_config",
    "create_dtensor_config",
    "create_processgroup_config",
    "dedicate_params",
    "explain",
    "fully_shard",
    "kernels",
    "no_sync",
    "owned_parameters",
    "param_groups",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "solver",
    "summon_full_params",
]

_MODULES = {  # where names are defined that are no modules themselves
    "comm.context": "CommOptions",
    "comm.monitor": "CollectiveError",
    "dedicated.dedicate": "dedicate_params fully_shard owned_parameters",
    "dedicated.dedication": "no_sync set_requires_all_reduce set_requires_gradient_sync summon_full_params",
    "exchanged.config": "DistributedConfig",
    "exchanged.generators": (
        "create_auto_config create_devicemesh_config create_dtensor_config create_processgroup_config"
    ),
    "model.matrix_spec": "MatrixSpec",
    "optimizer.attention_heads": "AttentionHeads",
    "optimizer.clip": "clip_grad_norm_",
    "optimizer.groups": "param_groups",
    "optimizer.muon": "Muon",
    "optimizer.qk_clip": "QKClip",
    "optimizer.record": "MatrixRecord MatrixStats StepStats",
    "planning.owner_plan": "OwnerPlan",
    "report.explain": "explain",
}
_REMOVED = {  # and what to write instead
    "clip_grad_value_": "torch.nn.utils.clip_grad_value_(parameters, value, foreach=False) is exact on every topology",
    "rebalanced_plan": "give dedicate_params ranks=[speed, …], as docs/planning.md finds them in a step",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


if not TYPE_CHECKING:  # which would take any name for one that exists

    def __getattr__(name: str) -> Any:
        """PEP 562: Python asks for what is not here yet."""
        if name in _REMOVED:
            raise AttributeError(f"dmuon.{name} was removed: {_REMOVED[name]}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"{__name__}.{_HOMES.get(name, name)}")
        globals()[name] = getattr(home, name) if name in _HOMES else home
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
