"""State dicts that one rank or all load: what is missing, faulty or cut otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn as nn
from harness.checkpoints import MOMENTUM, Experts, by_dtensors, start, world_of
from harness.dtensors import local_tensor
from harness.on_ranks import attempt, on_ranks
from harness.pool import Outcome, RankPool
from harness.toy import OPTIONS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon


def load_faulty(rank: int, world: int, name: str, fault: str, everywhere: bool) -> None:
    run = start(name)
    state = run.optimizer.state_dict()
    if everywhere or rank == world - 1:
        groups = state["param_groups"]
        match fault:
            case "fewer":
                groups[0]["params"] = groups[0]["params"][:-1]
            case "moved":  # the same count in all
                groups[1]["params"] = [groups[0]["params"].pop(), *groups[1]["params"]]
            case "route":
                groups[0]["use_muon"] = False
            case "shape":
                state["state"][4][MOMENTUM] = torch.zeros(1, 13)
            case "part":
                state["state"][4][MOMENTUM] = local_tensor(state["state"][4][MOMENTUM])[:5]
            case "no tensor":
                state["state"][4][MOMENTUM] = None if everywhere else 3.0
            case "missing":
                del state["state"][4][MOMENTUM]
            case "AdamW missing":
                del state["state"][20]
            case "AdamW whole":
                state["state"][20]["exp_avg"] = torch.zeros(13)
            case "AdamW shape":
                state["state"][20]["exp_avg_sq"] = torch.zeros(14)
            case "whole":
                state["state"][4][MOMENTUM] = torch.zeros(29, 13)
    run.optimizer.load_state_dict(state)


KEY = r"blocks\.1\.up\.weight"  # number 4
FAULTS = {
    "fewer": "parameters", "moved": "group 0", "route": "use_muon", "shape": KEY + r".*\(1, 13\)", "part": KEY,
    "no tensor": KEY, "missing": KEY + ".*absent", "whole": KEY + ".*whole",
    "AdamW missing": r"exp_avg of 'blocks\.2\.norm\.bias' in the saved state is .*absent",
    "AdamW whole": r"exp_avg of 'blocks\.2\.norm\.bias' in the saved state is .*whole",
    "AdamW shape": r"exp_avg_sq of 'blocks\.2\.norm\.bias' in the saved state is .*\(14,\)",
}  # fmt: skip


FAULTS_ON = {
    ("fsdp2-2", False): list(FAULTS),
    ("fsdp2-2", True): ["part"],
    # Norms lie over other ranks than the matrices there, and no group of these ranks is dmuon's.
    ("fsdp2-tp", False): [fault for fault in FAULTS if fault not in ("AdamW missing", "AdamW whole")],
    ("ddp", True): [fault for fault in FAULTS if fault.split()[-1] not in ("missing", "whole", "tensor")],
}


@pytest.fixture(scope="module")
def told(ranks: RankPool) -> Callable[[str, bool], list[list[Outcome]]]:
    """What each rank came to with each fault, in one call."""

    @cache
    def of_layout(name: str, everywhere: bool) -> list[list[Outcome]]:
        programs = [(load_faulty, (name, fault, everywhere)) for fault in FAULTS_ON[name, everywhere]]
        return ranks(world_of(name), attempt, programs)

    return of_layout


@pytest.mark.pitfall("P27", "P31", "P48")
@pytest.mark.parametrize(
    ("name", "everywhere", "fault"),
    [
        pytest.param(*layout, fault, marks=() if layout[0] == "fsdp2-2" else pytest.mark.slow)
        for layout, faults in FAULTS_ON.items()
        for fault in faults
    ],
)
def test_faulty_state_raises_on_every_rank(
    told: Callable[[str, bool], list[list[Outcome]]], name: str, everywhere: bool, fault: str
) -> None:
    for of_rank in told(name, everywhere):
        outcome = of_rank[FAULTS_ON[name, everywhere].index(fault)]
        assert outcome.raised(ValueError) and re.search(FAULTS[fault], outcome.message), outcome


@on_ranks(2)
def test_momentum_that_no_rank_has_is_zero(rank: int, world: int) -> None:
    """As ``torch.optim.Muon`` saves what never had a gradient."""
    run = start("fsdp2-2")
    run.train(range(2))
    state = run.optimizer.state_dict()
    before = {n: local_tensor(m).clone() for n, m in run.shown().items()}
    del state["state"][4]
    run.optimizer.load_state_dict(state)
    for name, momentum in run.shown().items():
        expected = torch.zeros_like(before[name]) if name == "blocks.1.up.weight" else before[name]
        assert torch.equal(local_tensor(momentum), expected), name


@pytest.mark.pitfall("P48")
@on_ranks(3, expect=ValueError, match=r"momentum of .*\(3, 3\)", timeout=20.0)
def test_fault_reaches_ranks_that_share_nothing_with_the_faulty_one(rank: int, world: int) -> None:
    """Ranks 0 and 1 share one matrix, 1 and 2 another, 0 and 2 none."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    one = torch.ones(4, 6)
    tensors = [distribute_tensor(one, m, [Shard(0)]) if rank in m.mesh.tolist() else one for m in meshes]
    optimizer = dmuon.Muon(list(map(nn.Parameter, tensors)), **OPTIONS, distributed_config=by_dtensors())
    state = optimizer.state_dict()
    if rank == 2:  # of the pairs the first has agreed by then
        state["state"][1][MOMENTUM] = torch.zeros(3, 3)
    optimizer.load_state_dict(state)


@on_ranks(3, timeout=30.0)
def test_momentum_of_another_mesh_loads_where_a_rank_holds_nothing(rank: int, world: int) -> None:
    """Momentum from a mesh of the same ranks, cut otherwise, into stacks of which one rank holds nothing."""
    run = start("experts on 3")
    state = run.optimizer.state_dict()
    other = init_device_mesh("cpu", (3,), mesh_dim_names=("other",))
    for i, momentum in enumerate(Experts.noise(7)):
        state["state"][i][MOMENTUM] = distribute_tensor(momentum, other, [Shard(1)])
    run.optimizer.load_state_dict(state)
    for found, given in zip(run.shown().values(), Experts.noise(7), strict=True):
        assert torch.equal(found.full_tensor(), given)
