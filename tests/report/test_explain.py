"""``explain`` tells what the optimizer does, whatever it was given, and what costs more than it should."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.fused import FusedModel, by_spec
from harness.hand_laid import SPLITS
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS, build, train
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
        if "one matrix" in line:
            assert len(shapes) == 1
            continue
        for m, n in shapes:
            assert f"{shapes.count([m, n])} of {m}x{n}" in line


def test_what_is_computed_in_which_dtype_is_told() -> None:
    model = build()
    text = dmuon.explain(model, dmuon.Muon(model, ns_dtype=torch.bfloat16, **OPTIONS))
    assert "Newton-Schulz: classic, 5 steps in torch.bfloat16\n" in text
    model = build()
    assert "Newton-Schulz: you, 4 steps in torch.float32" in dmuon.explain(
        model, dmuon.Muon(model, **{**OPTIONS, "ns_coefficients": "you", "ns_steps": 4})
    )


def test_groups_of_ones_own_are_told_as_they_are() -> None:
    """Of a model that the policy refuses, too; and what is in no group."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 12), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0][0].qkv = nn.Linear(4, 12)  # looks fused
    muon = [model[0][1].weight]
    optimizer = dmuon.Muon([{"params": muon, "use_muon": True}, {"params": [model[1].bias], "use_muon": False}])
    text = dmuon.explain(model, optimizer)
    assert "one matrix" in line_of(text, "0.1.weight")
    assert line_of(text, "1.weight").endswith("in no group: this optimizer does not train it")
    assert "in no group" not in line_of(text, "1.bias")


class Fused(nn.Module):
    """``qkv`` tells by its name, ``wi`` by what follows it, ``square`` is only named like one, ``down`` is none."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.square_qkv = nn.Linear(32, 32)
        self.wi = nn.Linear(32, 256)
        self.down = nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.square_qkv(self.qkv(x)[:, :32])
        gate, up = self.wi(x).chunk(2, -1)
        out: torch.Tensor = self.down(gate * up)
        return out


SPLIT = {"qkv": dmuon.MatrixSpec((32, 32, 32)), "wi": dmuon.MatrixSpec((128, 128))}


def whole(_fqn: str, _module: nn.Module, param: nn.Parameter) -> bool:
    return param.ndim == 2


def split(fqn: str, _module: nn.Module, param: nn.Parameter) -> bool | dmuon.MatrixSpec:
    return param.ndim == 2 and SPLIT.get(fqn.split(".")[-2], True)


@pytest.mark.pitfall("P78")
@pytest.mark.parametrize("way", ["alone", "sharded", "dedicated"])
@on_ranks(2)
def test_what_looks_fused_and_is_taken_whole_is_told(rank: int, world: int, way: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for select, warned in ((whole, True), (split, False)):
        model = nn.Sequential(Fused(), Fused())
        given: dict[str, Any] = {"select": select}
        if way == "sharded":
            fully_shard(model, mesh=mesh)
            given["distributed_config"] = dmuon.create_dtensor_config(costs="flops")
        elif way == "dedicated":
            dmuon.dedicate_params(model, mesh, costs="flops", **given)
            given = {}
        text = dmuon.explain(model, dmuon.Muon(model, **given))
        told = [line for line in text.splitlines() if "fused into one tensor" in line]
        assert bool(told) == warned
        if told:
            [line] = told
            assert "'0.qkv.weight'" in line and "'0.wi.weight'" in line
            assert "and 1 more" in line and "square" not in line and "down" not in line


def test_an_optimizer_that_will_be_laid_out_anew_says_so() -> None:
    """A copy, one whose parameters were replaced, and one that lost a group."""
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    copied = deepcopy(optimizer)
    assert "the next step decides" in dmuon.explain(model, copied)
    assert "the next step decides" not in dmuon.explain(model, optimizer)
    muon = optimizer.param_groups[0]["params"]
    muon[0] = nn.Parameter(muon[0].detach().clone())
    text = dmuon.explain(model, optimizer)
    assert "the next step decides" in text and "parameter 0 of group 0" in text
    train(model, optimizer, range(1))
    assert "the next step decides" not in dmuon.explain(model, optimizer)
    del optimizer.param_groups[0]
    assert "the next step decides" in dmuon.explain(model, optimizer)
    copied.step()
    assert "the next step decides" not in dmuon.explain(model, copied)


def test_a_model_that_costs_nothing_extra_has_no_warnings() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    text = dmuon.explain(model, dmuon.Muon(model))
    assert "warnings" not in text
