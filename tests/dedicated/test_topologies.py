"""Stages of a pipeline, each dedicated over its own data-parallel ranks, as one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights
from harness.network import full_state, shard, shard_blocks
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

import dmuon
from dmuon.dedicated.dedication import dedications

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


@on_ranks(1)
def test_pipelines_of_zero_bubbles_are_refused_with_the_remedy(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    stages = []
    for index in range(STAGES):
        model = Stage(index)
        dmuon.dedicate_params(model, mesh, costs="flops")
        stages.append(PipelineStage(model, index, STAGES, torch.device("cpu"), group=mesh.get_group()))
    tokens, targets = batch(0)
    with pytest.raises(RuntimeError, match=r"'blocks\.\d\..*not zero bubbles, which split backward"):
        ScheduleInterleavedZeroBubble(stages, MICRO, loss_fn=cross_entropy).step(tokens, target=targets)


@on_ranks(2)
def test_two_models_in_one_optimizer_over_the_same_ranks(rank: int, world: int) -> None:
    """All that is owned is rank 0's. Where the second one is not trained, it alone is up to date there at first."""

    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [
            nn.Sequential(*(nn.Linear(*sides) for sides in ((4, width), (width, width), (width, 3))))
            for width in (8, 300)
        ]

    models, alone = made(), made()
    for model in models:
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    optimizers = [dmuon.Muon(nn.ModuleList(models), **OPTIONS), *(dmuon.Muon(model, **OPTIONS) for model in alone)]
    for step in range(STEPS):
        x = torch.randn(world, 5, 4, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(x[rank]).square().mean() for model in models[: 1 + step % 2]).backward()
        sum(model(x).square().mean() for model in alone[: 1 + step % 2]).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, expected in zip(models, alone, strict=True):
        assert_equal_weights(full_state(model), dict(expected.state_dict()))
