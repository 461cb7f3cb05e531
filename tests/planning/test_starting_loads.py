"""Groups of ranks are planned one after the other: what earlier plans left uneven, later ones level."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.on_ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.solver import CostTable

COSTS = CostTable({(8, 8): {1: 10**12}})  # beside which what travels is nothing


class Model(nn.Module):
    """One matrix that two ranks hold, as experts, and two that all four do."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Sequential(nn.Linear(8, 8, bias=False))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(2))


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh, [Shard(0)]))


def owned(model: nn.Module, optimizer: dmuon.Muon, rank: int) -> int:
    """Matrices that this rank orthogonalizes."""
    found = sum(one.owner == rank for one in optimizer.exchanged())
    for one in dedications(model):
        ranks = one.runtime.comm.topology.ranks
        found += sum(ranks[owner] == rank for owner in one.plan.owners.values())
    return found


@pytest.mark.pitfall("P52")
@pytest.mark.parametrize(
    ("experts", "rest"), [("dedicated", "dedicated"), ("exchanged", "exchanged"), ("dedicated", "exchanged")]
)
@on_ranks(4)
def test_four_matrices_of_which_groups_of_two_have_one_each_go_to_four_ranks(
    rank: int, world: int, experts: str, rest: str
) -> None:
    """Of each pair of ranks one owns its expert; that of the rest each other rank owns one, is the only best plan."""
    pair, everybody = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("of", "pair"))["pair"],
        init_device_mesh("cpu", (4,)),
    )
    model = Model()
    if experts == "dedicated":
        dmuon.dedicate_params([model.experts], pair, costs=COSTS, select=lambda *_: True)
    else:
        shard(model.experts, pair)
    if rest == "dedicated":
        plan = dmuon.dedicate_params(model, everybody, costs=COSTS)
        assert sorted(plan.solution.starts_ns) == [0, 0, 10**12, 10**12]
        assert plan.solution.ends_ns == (10**12,) * 4 and plan.balance == 1.0
        assert "slowest rank (makespan): 1000000.000 ms with what was planned before" in plan.report()
    else:
        shard(model.blocks, everybody)
    groups = [{"params": list(model.parameters()), "use_muon": True}]
    optimizer = dmuon.Muon(groups, distributed_config=dmuon.create_dtensor_config(costs=COSTS))
    counts = [torch.empty((), dtype=torch.int64) for _ in range(world)]
    dist.all_gather(counts, torch.tensor(owned(model, optimizer, rank)))
    assert [int(count) for count in counts] == [1, 1, 1, 1]
