"""Members of Muon's family, wherever matrices lie, against one process that is written from their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.dtensors import placements_of
from harness.fused import FusedModel, by_spec, fused_loss, fused_reference, split_params
from harness.hand_laid import SPLITS, Weights
from harness.network import full_state, is_matrix, loss_of
from harness.on_ranks import on_ranks
from harness.paper import Paper
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import DECAY, LR, OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from dmuon import create_dtensor_config

STEPS = 3
MEMBERS: dict[str, dict[str, Any]] = {
    "independent": {"weight_decay_mode": "independent"},
    "l2": {"weight_decay_mode": "l2"},
    "cautious": {"weight_decay_mode": "cautious"},
}
EVERY = pytest.mark.parametrize("member", MEMBERS)


def paper(member: str, lr: float = LR) -> Paper:
    return Paper(lr, DECAY, **MEMBERS[member])


@EVERY
@pytest.mark.parametrize("world", [1, 2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
@on_ranks()
def test_tensors_of_any_matrices_on_any_placements(rank: int, world: int, member: str) -> None:
    """DTensors of all splits: rows and columns, even and uneven, copies, and both dimensions at once."""
    weights = Weights(twin=paper(member, 0.02))
    for i, split in enumerate(SPLITS):
        for extents, placements in placements_of(world, 2 if split.spec.flattened else len(split.shape)):
            weights.shard(i, split.shape, init_device_mesh("cpu", extents), placements, split=split)
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"), **MEMBERS[member])
    weights.train(optimizer, STEPS)
    weights.check(optimizer)


@EVERY
@pytest.mark.parametrize("layout", ["2", "3", "ddp", "hsdp", "tp"])
def test_tensors_of_any_matrices_that_dmuon_owns(ranks: RankPool, layout: str, member: str) -> None:
    ranks({"hsdp": 4, "3": 3}.get(layout, 2), owned, layout, member)


def owned(rank: int, world: int, layout: str, member: str) -> None:
    names = {"ddp": ("replicate",), "tp": ("dp", "tp")}.get(layout)
    mesh = init_device_mesh("cpu", {"hsdp": (2, 2), "tp": (1, 2)}.get(layout, (world,)), mesh_dim_names=names)
    model = FusedModel()
    if layout == "tp":
        split_params(model, mesh["tp"])
        mesh = mesh["dp"]
    dmuon.dedicate_params(model, mesh, select=by_spec(), costs="flops")
    optimizer = dmuon.Muon(model, overlap_backward=layout in ("3", "hsdp"), **OPTIONS, **MEMBERS[member])
    part = 0 if layout == "tp" else rank
    for step in range(STEPS):
        optimizer.zero_grad()
        fused_loss(model, step, part, mesh.size()).backward()
        optimizer.step()
    found = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    expected = fused_reference(STEPS, twin=paper(member))
    assert_equal_weights({name: found[name] for name in expected}, expected)


@EVERY
@pytest.mark.parametrize(
    "layout",
    ["ddp", "tp-alone", "fsdp2-3", "1d-3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp2-tp", "cp-mesh"))],
)
def test_models_as_users_lay_them_out(ranks: RankPool, layout: str, member: str) -> None:
    ranks(LAYOUTS[layout].world, laid_out, layout, member)


def laid_out(rank: int, world: int, layout: str, member: str) -> None:
    laid = lay(layout, build())
    optimizer = laid.optimizer(**MEMBERS[member])
    for step in range(STEPS):
        optimizer.zero_grad()
        laid.backward(step)
        optimizer.step()
    assert_equal_weights(full_state(laid.network), trained(build(), member))


def trained(model: nn.Module, member: str) -> dict[str, Tensor]:
    """In one process: matrices as the paper says, the rest by ``torch.optim.AdamW``."""
    twin, named = paper(member), dict(model.named_parameters())
    matrices = [param for name, param in named.items() if is_matrix(name)]
    for param in matrices:
        twin.add(param.detach())
    rest = [param for name, param in named.items() if not is_matrix(name)]
    groups = [
        {"params": [param for param in rest if param.ndim > 1], "weight_decay": DECAY},
        {"params": [param for param in rest if param.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, *batch(step)).backward()
        twin.step([param.grad for param in matrices])
        adamw.step()
        with torch.no_grad():
            for param, value in zip(matrices, twin.weights(), strict=True):
                param.copy_(value)
    return {name: param.detach().clone() for name, param in named.items()}
