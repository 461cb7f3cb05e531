"""Momentum between two steps: edited by hand, loaded by one rank or all, and of weights that are laid out anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.checkpoints import MOMENTUM, SINGLE, Run, by_dtensors, start, world_of
from harness.dtensors import local_tensor
from harness.network import full_state
from harness.on_ranks import attempt, on_ranks
from harness.pool import Outcome, RankPool
from harness.toy import OPTIONS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuon


def edit(run: Run, how: str) -> None:
    """Halve or clear all momentum."""
    for name, momentum in run.shown().items():
        values = run.optimizer.state[run.inner.get_parameter(name)]
        match how:
            case "in place":
                momentum.mul_(0.5)
            case "local part":
                values[MOMENTUM] = local_tensor(momentum) * 0.5
            case "whole":
                values[MOMENTUM] = (momentum.full_tensor() if isinstance(momentum, DTensor) else momentum) * 0.5
            case "cleared":
                values.clear()
            case "zeroed":
                momentum.zero_()


def train_with_edit(name: str, how: str, saving: bool = False) -> dict[str, Tensor]:
    run = start(name)
    run.train(range(2))
    with torch.no_grad():
        edit(run, how)
    if saving:  # what is saved is what the next step would use
        state = run.optimizer.state_dict()
        run.optimizer = dmuon.Muon(run.model, **OPTIONS, distributed_config=run.config)
        run.optimizer.load_state_dict(state)
    run.train(range(2, 4))
    return full_state(run.inner)


# How momentum is edited, and whether it is saved and loaded before the next step.
EDITS = {"in place": True, "local part": False, "whole": False, "cleared": True}


@on_ranks(3)
def test_edited_momentum_counts_in_the_next_step(rank: int, world: int) -> None:
    expected = {of: train_with_edit(SINGLE, of) for of in ("in place", "zeroed")}
    for how, saving in EDITS.items():
        with about(how):
            found = train_with_edit("fsdp2-3", how, saving)
            assert_equal_weights(found, expected["zeroed" if how == "cleared" else "in place"])


@on_ranks(2, timeout=20.0, expect=ValueError, match=r"blocks\.1\.up\.weight.*\(1, 13\)")
def test_replaced_momentum_of_another_shape_is_refused_by_name(rank: int, world: int) -> None:
    run = start("fsdp2-2")
    run.train(range(1))
    param = run.inner.get_parameter("blocks.1.up.weight")
    run.optimizer.state[param][MOMENTUM] = torch.zeros(1, 13)  # copying would broadcast it
    run.train(range(1, 2))


def whole_momentum(run: Run, name: str) -> Tensor:
    """Through a state dict, which adopts what users put into the state. Collective."""
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    number = next(i for i, param in enumerate(params) if param is run.model.get_parameter(name))
    saved = run.optimizer.state_dict()["state"][number][MOMENTUM]
    whole: Tensor = saved.full_tensor() if isinstance(saved, DTensor) else saved.clone()
    return whole


@pytest.mark.parametrize("layout", ["1d", "fsdp2-2"])
@on_ranks(2)
def test_momenta_that_change_places_are_both_kept(rank: int, world: int, layout: str) -> None:
    """What the state shows lies in stacks, into which what takes its place is written."""
    run = start(layout)
    run.train(range(2))
    state, params = run.optimizer.state, dict(run.model.named_parameters())
    names = [f"blocks.{i}.mix.weight" for i in range(3)]
    kept = [whole_momentum(run, name) for name in names]
    shown = [state[params[name]][MOMENTUM] for name in names]
    for name, value in zip(names, [shown[1], shown[0], None], strict=True):
        state[params[name]][MOMENTUM] = value
    expected = [kept[1], kept[0], torch.zeros_like(kept[2])]
    for name, momentum in zip(names, expected, strict=True):
        assert torch.equal(whole_momentum(run, name), momentum), name


# -- state dicts that one rank or all load: what is missing, faulty or cut otherwise -----------------------------------


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
            case "sparse":
                state["state"][4][MOMENTUM] = torch.zeros(29, 13).to_sparse()
            case "missing":
                del state["state"][4][MOMENTUM]
            case "AdamW missing":
                del state["state"][20]
            case "AdamW shape":
                state["state"][20]["exp_avg_sq"] = torch.zeros(14)
            case "whole":
                state["state"][4][MOMENTUM] = torch.zeros(29, 13)
    run.optimizer.load_state_dict(state)


KEY = r"blocks\.1\.up\.weight"  # number 4
FAULTS = {
    "fewer": "parameters", "moved": "group 0", "route": "use_muon", "shape": KEY + r".*\(1, 13\)", "part": KEY,
    "missing": KEY + ".*absent", "whole": KEY + ".*whole", "sparse": "momentum.* is torch.sparse_coo",
    "AdamW missing": r"exp_avg of 'blocks\.2\.norm\.bias' in the saved state is .*absent",
    "AdamW shape": r"exp_avg_sq of 'blocks\.2\.norm\.bias' in the saved state is .*\(14,\)",
}  # fmt: skip


FAULTS_ON = {
    ("fsdp2-2", False): list(FAULTS),
    ("fsdp2-2", True): ["part"],
    **{("1d-two-lines", everywhere): ["fewer", "moved", "route", "shape", "sparse"] for everywhere in (False, True)},
}


@pytest.fixture(scope="module")
def told(ranks: RankPool) -> Callable[[str, bool], list[list[Outcome]]]:
    """What each rank came to with each fault, in one call."""

    @cache
    def of_layout(name: str, everywhere: bool) -> list[list[Outcome]]:
        programs = [(load_faulty, (name, fault, everywhere)) for fault in FAULTS_ON[name, everywhere]]
        return ranks(world_of(name), attempt, programs)

    return of_layout


@pytest.mark.pitfall("P27", "P31", "P48", "P89")
@pytest.mark.parametrize(
    ("name", "everywhere", "fault"),
    [(*layout, fault) for layout, faults in FAULTS_ON.items() for fault in faults],
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
