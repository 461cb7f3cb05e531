"""Owner-centric distributed Muon for PyTorch."""

from dmuon import kernels, solver
from dmuon.comm.context import CommOptions
from dmuon.comm.monitor import CollectiveError
from dmuon.dedicated.dedicate import dedicate_params, fully_shard, owned_parameters
from dmuon.dedicated.dedication import no_sync, set_requires_all_reduce, set_requires_gradient_sync, summon_full_params
from dmuon.exchanged.config import DistributedConfig
from dmuon.exchanged.generators import (
    create_auto_config,
    create_devicemesh_config,
    create_dtensor_config,
    create_processgroup_config,
)
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.optimizer.clip import clip_grad_norm_, clip_grad_value_
from dmuon.optimizer.groups import param_groups
from dmuon.optimizer.muon import Muon
from dmuon.optimizer.qk_clip import AttentionHeads, QKClip
from dmuon.optimizer.record import MatrixRecord
from dmuon.optimizer.stats import StepStats
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.report.explain import explain
from dmuon.report.stragglers import rebalanced_plan
from dmuon.step.record import MatrixStats

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
    "rebalanced_plan",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "solver",
    "summon_full_params",
]
