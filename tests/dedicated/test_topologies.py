"""Meshes and splits beyond rows and columns: sequence parallelism, and stages of a pipeline, as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights
from harness.network import Block, Network, full_state, is_matrix, shard, shard_blocks
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from harness.oracle import reference_weights
from harness.topologies import Laid
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dmuon
from dmuon.dedicated.dedication import dedications

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


@pytest.mark.pitfall("P04", "P37")
@pytest.mark.parametrize(
    ("kind", "world", "fsdp"),
    [
        *(pytest.param(kind, 2, False, id=f"{kind}-tp") for kind in SPLITS),
        *(pytest.param(kind, 4, kind == "copies", id=f"{kind}-dp-tp", marks=pytest.mark.slow) for kind in SPLITS),
    ],
)
@on_ranks()
def test_sequence_parallel_norms_and_copied_matrices(rank: int, world: int, kind: str, fsdp: bool) -> None:
    make, split = SPLITS[kind]
    model = make()
    whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh = whole["dp"]
    split(model, whole["tp"])
    dmuon.dedicate_params(model, mesh, costs="flops")
    if fsdp:
        shard_blocks(model, mesh, dmuon.fully_shard)
    optimizer = dmuon.Muon(model, **OPTIONS)
    Laid(model, mesh, mesh.get_local_rank(), mesh.size(), model).train(optimizer, range(3))
    muon = [n for n, p in model.named_parameters() if p in dmuon.owned_parameters(model)]
    assert len(muon) == 9 and all(map(is_matrix, muon)), "norms stay on AdamW"
    weights = full_state(model)
    assert_equal_weights(weights, reference_weights(3))
    assert_same_over_ranks(weights)
    assert over_ranks(optimizer.last_step.ns_matrices) == 9


# -- pipeline stages, each dedicated over its own data-parallel ranks --------------------------------------------------


STAGES, LAYERS, MICRO, STEPS, MAX_NORM = 2, 4, 3, 3, 0.5
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Stage(nn.Module):
    """A half of a toy model."""

    def __init__(self, index: int) -> None:
        super().__init__()
        whole = build(layers=LAYERS)
        half = LAYERS // STAGES
        self.embed = whole.embed if index == 0 else None
        self.blocks = whole.blocks[index * half : (index + 1) * half]
        self.norm = whole.norm if index == STAGES - 1 else None
        self.head = whole.head if index == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def global_names(state: dict[str, Tensor], stage: int) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            name = f"blocks.{int(number) + stage * LAYERS // STAGES}.{rest}"
        found[name] = tensor
    return found


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@pytest.mark.pitfall("P19", "P36")
@pytest.mark.parametrize(("schedule", "world", "more"), [("GPipe", 2, False), ("1F1B", 4, True)])
@on_ranks()
def test_stages_equal_single_process(rank: int, world: int, schedule: str, more: bool) -> None:
    """``more``: FSDP2 shards the rest of each stage, and gradients are clipped by the norm over all stages."""
    whole = init_device_mesh("cpu", (STAGES, world // STAGES), mesh_dim_names=("pp", "dp"))
    mesh = whole["dp"]
    index = whole.get_local_rank("pp")
    model = Stage(index)
    plan = dmuon.dedicate_params(model, mesh, costs="flops")
    assert len(plan.owners) == 3 * LAYERS // STAGES, "a plan holds the matrices of its stage"
    if more:
        shard_blocks(model, mesh, dmuon.fully_shard)
    optimizer = dmuon.Muon(model, **OPTIONS)
    flight: list[int] = []
    first = dedications(model)[0].runtime.blocks[0]
    model.blocks[0].register_forward_hook(lambda *_: flight.append(first.calls))
    stage = PipelineStage(model, index, STAGES, torch.device("cpu"), group=whole.get_group("pp"))
    pipeline = SCHEDULES[schedule](stage, MICRO, loss_fn=cross_entropy)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = shard(batch(step), mesh.get_local_rank(), mesh.size())
        if index == 0:
            pipeline.step(tokens)
        else:
            pipeline.step(target=targets)
        if more:
            assert float(dmuon.clip_grad_norm_(model.parameters(), MAX_NORM, pp_mesh=whole["pp"])) > MAX_NORM
        optimizer.step()
    expected = reference_weights(STEPS, clip=MAX_NORM if more else torch.inf, layers=LAYERS)
    weights = global_names(full_state(model), index)
    assert_equal_weights(weights, {name: expected[name] for name in weights})
    assert max(flight) >= (2 if index == 0 or schedule == "GPipe" else 1), "forwards in flight"
