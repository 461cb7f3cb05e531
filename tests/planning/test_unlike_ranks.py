"""Ranks that earlier plans, or their speed, leave with less or more to do."""

from __future__ import annotations

import pytest
import torch.nn as nn
from harness.assertions import assert_same_tensors
from harness.on_ranks import of_all_ranks, on_ranks
from harness.topologies import lay
from harness.toy import build, trained
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
@pytest.mark.parametrize(("experts", "rest"), [("dedicated", "dedicated"), ("dedicated", "exchanged")])
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
    assert of_all_ranks(owned(model, optimizer, rank)) == [1, 1, 1, 1]


# -- a slower rank owns less, and ranks that differ by noise count as alike --------------------------------------------


def loads(found: dmuon.OwnerPlan) -> list[int]:
    """Of each rank, the elements that it owns."""
    elements = [0] * found.world
    for matrix in found.matrices:
        elements[found.owners[matrix.name]] += matrix.rows * matrix.cols
    return elements


@on_ranks(2)
def test_both_residencies_give_a_slow_rank_less_and_train_to_the_same_weights(rank: int, world: int) -> None:
    even, uneven = (lay("1d-two-lines", build(), ranks=speeds).model for speeds in (None, [1.0, 1 / 3]))
    shares = [of_ranks[1] / sum(of_ranks) for of_ranks in (loads(dedications(m)[0].plan) for m in (even, uneven))]
    assert shares == pytest.approx([1 / 2, 1 / 4], abs=0.1)
    exchanged = lay("fsdp2-2", build(), ranks=[1, 1 / 3]).optimizer().exchanged()
    assert sum(one.owner == 1 for one in exchanged) / len(exchanged) < 0.35
    assert_same_tensors(trained(uneven, rank, world), trained(even, rank, world))


@on_ranks(2)
def test_speeds_that_ranks_do_not_agree_on_are_refused_on_all(rank: int, world: int) -> None:
    """Of a dedicated model: tests/dedicated/test_refusals.py."""
    laid = lay("fsdp2-2", build(), ranks=[1.0, 0.5] if rank else None)
    with pytest.raises(ValueError, match=r"rank 1 was given ranks=\[1.0, 0.5\], and rank 0 ranks=None"):
        laid.optimizer()
