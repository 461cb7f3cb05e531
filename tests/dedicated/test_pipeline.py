"""Pipeline stages, each dedicated over its own data-parallel ranks, equal a single process."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights
from harness.network import full_state, loss_of, shard
from harness.oracle import Reference
from harness.pool import RankPool
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import dmuon
from dmuon.dedicated.dedication import dedications

STAGES, LAYERS, MICRO, STEPS, MAX_NORM = 2, 4, 4, 3, 0.5
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CLIPS = "pp_mesh" in inspect.signature(dmuon.clip_grad_norm_).parameters


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


def run_stage(
    rank: int, world: int, schedule: str, fsdp: bool, clip: bool
) -> tuple[dict[str, Tensor], list[str], int, list[float]]:
    whole = init_device_mesh("cpu", (STAGES, world // STAGES), mesh_dim_names=("pp", "dp"))
    mesh = whole["dp"]
    index, dp = whole.get_local_rank("pp"), mesh.size()
    model = Stage(index)
    plan = dmuon.dedicate_params(model, mesh, costs="flops")
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **OPTIONS)
    flight: list[int] = []
    first = dedications(model)[0].runtime.blocks[0]
    model.blocks[0].register_forward_hook(lambda *_: flight.append(first.calls))
    stage = PipelineStage(model, index, STAGES, torch.device("cpu"), group=whole.get_group("pp"))
    pipeline = SCHEDULES[schedule](stage, MICRO, loss_fn=cross_entropy)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = shard(batch(step, rows=16), mesh.get_local_rank(), dp)
        if index == 0:
            pipeline.step(tokens)
        else:
            pipeline.step(target=targets)
        if clip:
            norms.append(float(dmuon.clip_grad_norm_(model.parameters(), MAX_NORM, pp_mesh=whole["pp"])))
        optimizer.step()
    return global_names(full_state(model), index), sorted(plan.owners), max(flight), norms


def run_reference(clip: bool) -> tuple[dict[str, Tensor], list[float]]:
    model = build(layers=LAYERS)
    optimizer = Reference(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step, rows=16)).backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return {n: p.detach() for n, p in model.state_dict().items()}, norms


def check(ranks: RankPool, schedule: str, world: int, fsdp: bool, clip: bool = False) -> None:
    results = ranks(world, run_stage, schedule, fsdp, clip)
    expected, norms = run_reference(clip)
    dp = world // STAGES
    for first, second in zip(results[:dp], results[dp:], strict=True):
        assert_equal_weights({**first[0], **second[0]}, expected)
    for weights, owned, flight, found in results:
        stage_weights = results[0] if weights.keys() == results[0][0].keys() else results[-1]
        assert all(torch.equal(tensor, stage_weights[0][name]) for name, tensor in weights.items())
        assert len(owned) == 3 * LAYERS // STAGES, "a plan holds the matrices of its stage"
        assert flight >= (2 if "embed.weight" in weights or schedule == "GPipe" else 1), "forwards in flight"
        assert found == pytest.approx(norms, rel=1e-5)


@pytest.mark.pitfall("P19")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("world", "fsdp"),
    [(2, False), pytest.param(4, False, marks=pytest.mark.slow), (4, True)],
    ids=["2x1", "2x2", "2x2-fsdp"],
)
def test_stages_equal_single_process(ranks: RankPool, schedule: str, world: int, fsdp: bool) -> None:
    check(ranks, schedule, world, fsdp)


@pytest.mark.pitfall("P36")
@pytest.mark.skipif(not CLIPS, reason="clip_grad_norm_ takes no pp_mesh")
@pytest.mark.parametrize(("world", "fsdp"), [(2, False), (4, True)], ids=["2x1", "2x2-fsdp"])
def test_clipping_over_all_stages(ranks: RankPool, world: int, fsdp: bool) -> None:
    check(ranks, "1F1B", world, fsdp, clip=True)
