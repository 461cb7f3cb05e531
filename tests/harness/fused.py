"""A model whose blocks hold tensors of every split in ``SPLITS``, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dmuon
from harness.dtensors import noise
from harness.hand_laid import SPLITS, Split
from harness.network import shard
from harness.oracle import Twin
from harness.toy import DECAY, LR, OPTIONS

WIDTH, CLASSES, LAYERS = 7, 5, 2


class FusedBlock(nn.Module):
    """Each tensor moves the input by a number that depends on all of its elements and on the input."""

    def __init__(self, seed: int, splits: Sequence[Split]) -> None:
        super().__init__()
        for i, split in enumerate(splits):
            weight = noise(100 * seed + i, *split.shape)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
            features = noise(100 * seed + 50 + i, WIDTH, weight.numel()) / weight.numel() ** 0.5
            self.register_buffer(f"features{i}", features, persistent=False)
        self.count = len(splits)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            weight, features = getattr(self, f"weight{i}"), getattr(self, f"features{i}")
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            x = x + torch.tanh(x @ features @ weight.flatten())[:, None]
        return x


class FusedModel(nn.Module):
    def __init__(self, splits: Sequence[Split] = tuple(SPLITS)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(FusedBlock(i, splits)) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.head.weight.data, self.head.bias.data = noise(7, CLASSES, WIDTH), noise(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_spec(splits: Sequence[Split] = tuple(SPLITS)) -> Any:
    """``select=`` for the model."""

    def select(fqn: str, _module: nn.Module, _param: nn.Parameter) -> bool | dmuon.MatrixSpec:
        return splits[int(fqn.rsplit("weight", 1)[1])].spec if "blocks" in fqn else False

    return select


def split_params(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism by rows, by columns, or as copies."""
    for block in model.get_submodule("blocks").children():
        for i, (name, param) in enumerate(list(block[0].named_parameters())):
            kinds = [Shard(0), Shard(1), Replicate(), *([Shard(2)] if param.ndim == 3 else [])]
            spread = distribute_tensor(param.detach(), mesh, [kinds[i % len(kinds)]])
            block[0].register_parameter(name, nn.Parameter(spread))


MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "shard-1": ((1,), ("shard",)),
    "shard-2": ((2,), ("shard",)),
    "shard-3": ((3,), ("shard",)),
    "replicate-2": ((2,), ("replicate",)),
    "hsdp": ((2, 2), ("replicate", "shard")),
    "tp-2": ((1, 2), ("shard", "tp")),
    "tp": ((2, 2), ("shard", "tp")),
}


def fused(
    layout: str, splits: Sequence[Split] = tuple(SPLITS), *, overlap_backward: bool = False, **options: Any
) -> tuple[FusedModel, dmuon.Muon, DeviceMesh]:
    """The model on one of ``MESHES``, where dmuon owns all that Muon takes, its optimizer, its data-parallel mesh."""
    extents, names = MESHES[layout]
    mesh = init_device_mesh("cpu", extents, mesh_dim_names=names)
    model = FusedModel(splits)
    if "tp" in names:
        split_params(model, mesh["tp"])
        mesh = mesh["shard"]
    dmuon.dedicate_params(model, mesh, select=by_spec(splits), costs="flops", **options)
    return model, dmuon.Muon(model, overlap_backward=overlap_backward, **OPTIONS), mesh


def fused_batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and classes of one global step, or a rank's part of them."""
    classes = torch.randint(CLASSES, (24,), generator=torch.Generator().manual_seed(step))
    return shard((noise(5000 + step, 24, WIDTH), classes), rank, world)


def fused_loss(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> Tensor:
    inputs, classes = fused_batch(step, rank, world)
    return F.cross_entropy(model(inputs), classes)


def fused_reference(steps: int, splits: Sequence[Split] = tuple(SPLITS), twin: Twin | None = None) -> dict[str, Tensor]:
    """Weights after ``steps`` of ``torch.optim.Muon`` on parts that are cut by hand, and ``torch.optim.AdamW``.

    Args:
        twin: that updates the matrices, in place of ``torch.optim.Muon``.
    """
    model = FusedModel(splits)
    named = [(name, param) for name, param in model.named_parameters() if "blocks" in name]
    twin = twin or Twin([], LR, DECAY)
    for name, param in named:
        twin.add(param.detach(), splits[int(name.rsplit("weight", 1)[1])].cut)
    groups = [{"params": [model.head.weight]}, {"params": [model.head.bias], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for step in range(steps):
        model.zero_grad()
        fused_loss(model, step).backward()
        twin.step([param.grad for _, param in named])
        adamw.step()
        with torch.no_grad():
            for (_, param), value in zip(named, twin.weights(), strict=True):
                param.copy_(value)
    return {name: param.detach().clone() for name, param in model.named_parameters()}
