"""Meshes and splits beyond rows and columns: sequence parallelism, parts of the world, several models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights, assert_same_bits
from harness.network import Block, Network, full_state, is_matrix
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import Laid
from harness.toy import OPTIONS, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dmuon


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
        # What torch 2.12 gathers along a sequence is not contiguous, though its DTensor says so, and fails to multiply.
        whole = self.norm(along).full_tensor().contiguous()
        return x + self.mix(x) + self.down(F.gelu(self.up(whole)))


def split_sequence(model: Network, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        block.tensor_mesh = mesh
        plan = {
            "norm": SequenceParallel(),
            "mix": ColwiseParallel(output_layouts=Replicate()),
            "up": ColwiseParallel(use_local_output=False),
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
