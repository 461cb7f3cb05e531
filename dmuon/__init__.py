"""Owner-centric distributed Muon for PyTorch."""

from dmuon import kernels, solver
from dmuon.clip import clip_grad_norm_, clip_grad_value_
from dmuon.comm_options import CommOptions
from dmuon.config_generators import (
    create_auto_config,
    create_devicemesh_config,
    create_dtensor_config,
    create_processgroup_config,
)
from dmuon.dedicate import dedicate_params, fully_shard, owned_parameters
from dmuon.distributed_config import DistributedConfig
from dmuon.explain import explain
from dmuon.monitor import CollectiveError
from dmuon.muon import Muon, StepStats
from dmuon.param_groups import param_groups
from dmuon.plan import OwnerPlan
from dmuon.summon import summon_full_params
from dmuon.sync import no_sync, set_requires_all_reduce, set_requires_gradient_sync

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "CommOptions",
    "DistributedConfig",
    "Muon",
    "OwnerPlan",
    "StepStats",
    "clip_grad_norm_",
    "clip_grad_value_",
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
