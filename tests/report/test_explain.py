"""``explain`` tells what the optimizer does, whatever it was given, and what costs more than it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.fused import FusedModel, by_spec
from harness.hand_laid import SPLITS
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon


def line_of(text: str, name: str) -> str:
    [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line


def test_tensors_that_are_several_matrices_say_which() -> None:
    model = FusedModel()
    text = dmuon.explain(model, dmuon.Muon(model, select=by_spec(), **OPTIONS))
    for i, split in enumerate(SPLITS):
        shapes = [list(matrix.shape) for matrix in split.cut(torch.empty(split.shape))]
        if split.spec.transposed:  # it says how they are stored
            shapes = [shape[::-1] for shape in shapes]
        line = line_of(text, f"blocks.0.0.weight{i}")
        if "itself" in line:
            assert len(shapes) == 1
            continue
        for m, n in shapes:
            assert f"{shapes.count([m, n])} of {m}x{n}" in line


def test_groups_of_ones_own_are_told_as_they_are() -> None:
    """Of a model that the policy refuses, too; and what is in no group."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 12), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0][0].qkv = nn.Linear(4, 12)  # looks fused
    muon = [model[0][1].weight]
    optimizer = dmuon.Muon([{"params": muon, "use_muon": True}, {"params": [model[1].bias], "use_muon": False}])
    text = dmuon.explain(model, optimizer)
    assert "itself" in line_of(text, "0.1.weight")
    assert line_of(text, "1.weight").endswith("in no group: this optimizer does not train it")
    assert "in no group" not in line_of(text, "1.bias")


@on_ranks(2)
def test_work_that_several_ranks_may_repeat_is_told(rank: int, world: int) -> None:
    model = build()
    assert "9 parameters are whole on this rank" in dmuon.explain(model, dmuon.Muon(model, **OPTIONS))
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert "whole on this rank" not in dmuon.explain(model, dmuon.Muon(model, **OPTIONS))


@pytest.mark.parametrize("dedicated", [True, False])
@on_ranks(2)
def test_an_owner_that_dominates_is_told(rank: int, world: int, dedicated: bool) -> None:
    model: Any = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8))])
    mesh = init_device_mesh("cpu", (world,))
    if dedicated:
        dmuon.dedicate_params(model[0], mesh, costs="flops", select=lambda fqn, _, p: p.ndim == 2, blocks=[model[0]])
        model = model[0]
    else:
        fully_shard(model[0], mesh=mesh)
    optimizer = (
        dmuon.Muon(model, **OPTIONS)
        if dedicated
        else dmuon.Muon(
            [{"params": [p for p in model.parameters() if p.ndim == 2], "use_muon": True}],
            distributed_config=dmuon.create_dtensor_config(costs="flops"),
        )
    )
    text = dmuon.explain(model, optimizer)
    assert ("times the mean load" in text and "1 matrices of this rank have fewer" in text) or rank == 0


def test_a_model_that_costs_nothing_extra_has_no_warnings() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    text = dmuon.explain(model, dmuon.Muon(model))
    assert "warnings" not in text
