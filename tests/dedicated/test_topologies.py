"""Meshes and splits beyond rows and columns: sequence parallelism, parts of the world, several models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights, assert_same_bits
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import Laid, lay
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dmuon
from dmuon.check.model import Block, Network, is_matrix, loss_of, shard
from dmuon.check.topologies import full_state


def train(laid: Laid, optimizer: dmuon.Muon, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        laid.backward(step)
        optimizer.step()


# -- tensor parallelism beyond rows and columns -------------------------------------------------------------------


class SequenceBlock(Block):
    """A block whose norm sees a part of the sequence on each tensor-parallel rank."""

    tensor_mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        along = DTensor.from_local(x, self.tensor_mesh, [Replicate()], run_check=False)
        return x + self.mix(x) + self.down(F.gelu(self.up(self.norm(along))))


def split_sequence(model: Network, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        block.tensor_mesh = mesh
        plan = {
            "norm": SequenceParallel(),
            "mix": ColwiseParallel(output_layouts=Replicate()),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def copy_matrix(model: Network, mesh: DeviceMesh) -> None:
    """``mix`` is whole on every tensor-parallel rank, each of which sees a part of the sequence."""

    def scatter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return whole.redistribute(mesh, [Shard(1)])

    def gather(_module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(mesh, [Replicate()]).to_local()

    for block in model.blocks:
        distribute_module(block.mix, mesh, input_fn=scatter, output_fn=gather)
        parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})


SPLITS: dict[str, tuple[Callable[[], Network], Callable[[Network, DeviceMesh], None]]] = {
    "sequence": (lambda: build(block=SequenceBlock), split_sequence),
    "copies": (build, copy_matrix),
}


def run_split(_rank: int, world: int, kind: str, fsdp: bool) -> tuple[dict[str, Tensor], int, list[str]]:
    make, split = SPLITS[kind]
    model = make()
    whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh = whole["dp"]
    split(model, whole["tp"])
    dmuon.dedicate_params(model, mesh, costs="flops")
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(Laid(model, mesh, mesh.get_local_rank(), mesh.size(), model), optimizer)
    muon = [n for n, p in model.named_parameters() if p in dmuon.owned_parameters(model)]
    return full_state(model), optimizer.last_step.ns_matrices, muon


@pytest.mark.pitfall("P04", "P37")
@pytest.mark.parametrize(
    ("kind", "world", "fsdp"),
    [
        *(pytest.param(kind, 2, False, id=f"{kind}-tp") for kind in SPLITS),
        *(pytest.param(kind, 4, False, id=f"{kind}-dp-tp", marks=pytest.mark.slow) for kind in SPLITS),
        *(pytest.param(kind, 4, True, id=f"{kind}-fsdp-tp", marks=pytest.mark.slow) for kind in SPLITS),
    ],
)
def test_sequence_parallel_norms_and_copied_matrices(ranks: RankPool, kind: str, world: int, fsdp: bool) -> None:
    results = ranks(world, run_split, kind, fsdp)
    for weights, _, muon in results:
        assert len(muon) == 9 and all(map(is_matrix, muon)), "norms stay on AdamW"
        assert_equal_weights(weights, reference_weights(3))
    assert_same_bits([weights for weights, *_ in results])
    assert sum(calls for _, calls, _ in results) == 9


# -- other meshes -------------------------------------------------------------------------------------------------


def run_parts_of_the_world(rank: int, _world: int, alone: bool) -> list[dict[str, Tensor]]:
    """Pairs of ranks train different models; with ``alone`` only the last pair uses dmuon."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    mesh = pairs["shard"]
    which = rank // 2
    if alone and which == 0:
        return []
    model = build(seed=which)
    dmuon.dedicate_params(model, mesh, costs="flops")
    for block in model.blocks:
        dmuon.fully_shard(block, mesh=mesh)
    dmuon.fully_shard(model, mesh=mesh)
    train(Laid(model, mesh, rank % 2, 2, model), dmuon.Muon(model, **OPTIONS))
    return [full_state(model)]


@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_parts_of_the_world_are_independent(ranks: RankPool, alone: bool) -> None:
    results = ranks(4, run_parts_of_the_world, alone)
    assert [len(r) for r in results] == ([0, 0, 1, 1] if alone else [1] * 4)
    for rank, found in enumerate(results):
        for weights in found:
            assert_equal_weights(weights, reference_weights(3, seed=rank // 2))


def run_again(rank: int, world: int) -> list[dict[str, Tensor]]:
    """A model, then all process groups destroyed, then another model; the first one stays alive."""
    store = dist.distributed_c10d._get_default_store()
    alive, found = [], []
    for name in ("hsdp", "tp-fsdp", "hsdp", "ddp-4"):
        laid = lay(name, build())
        optimizer = laid.optimizer()
        train(laid, optimizer)
        found.append(full_state(laid.model))
        alive.append((laid, optimizer))
        dist.destroy_process_group()
        again = dist.PrefixStore(f"again{len(found)}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
    return found


@pytest.mark.slow
@pytest.mark.pitfall("P24")
def test_new_meshes_after_the_process_groups_were_destroyed(ranks: RankPool) -> None:
    for found in ranks(4, run_again, fresh=True):
        for weights in found:
            assert_equal_weights(weights, reference_weights(3))


# -- several dedicated modules -------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = build(0), build(1)


def two_models(rank: int, world: int) -> tuple[dict[str, Tensor], list[str]]:
    pair = Pair()
    mesh = init_device_mesh("cpu", (world,))
    for model in (pair.a, pair.b):
        dmuon.dedicate_params(model, mesh, costs="flops")
    owned = dmuon.owned_parameters(pair)
    rest = [p for p in pair.parameters() if p not in owned]
    muon = dmuon.Muon(owned, **OPTIONS)
    adamw = torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        for model in (pair.a, pair.b):
            loss_of(model, *shard(batch(step), rank, world)).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    muon.state_dict()
    return full_state(pair), [p.fqn for p in muon.param_groups[0]["params"]]


def test_several_dedicated_models_share_an_optimizer(ranks: RankPool) -> None:
    pair = Pair()
    muon = dmuon.Muon([p for n, p in pair.named_parameters() if ".blocks." in n and p.ndim == 2], **OPTIONS)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    rest = [p for p in pair.parameters() if id(p) not in matrices]
    adamw = torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        for model in (pair.a, pair.b):
            loss_of(model, *batch(step)).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    results = ranks(2, two_models)
    for found, order in results:
        assert_equal_weights(found, {n: p.detach() for n, p in pair.state_dict().items()})
        assert order == results[0][1]
