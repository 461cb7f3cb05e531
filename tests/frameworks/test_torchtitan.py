"""torchtitan's optimizer container, schedulers, clipping and checkpointer on two ranks, against one process."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights, assert_same_tensors
from harness.on_ranks import on_ranks, over_ranks
from harness.oracle import Reference
from harness.toy import OPTIONS, SIZE, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.check.model import Network, is_matrix, loss_of, shard
from dmuon.check.topologies import full_state
from dmuon.model.routing import route_parameters

pytest.importorskip("torchtitan", reason="torchtitan is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_  # noqa: E402

STEPS, HALF, NORM = 4, 2, 0.5
MATRICES = sum(is_matrix(name) for name, _ in build().named_parameters())


class Optimizers(OptimizersContainer):  # type: ignore[misc]
    """As in docs/i-use.md."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts, self.optimizers = model_parts, []
        for part in model_parts:
            names = {p: name for name, p in part.named_parameters()}
            groups = dmuon.param_groups(part)
            for group in groups:
                group["params"] = [(names[p], p) for p in group["params"]]
            self.optimizers.append(dmuon.Muon(groups, **OPTIONS))
        self._post_init([p for part in model_parts for p in part.parameters()])


def rate(step: int) -> float:
    return 1.0 / (1 + step)


class Run:
    """The parts of torchtitan's trainer that see the optimizer."""

    def __init__(self, kind: str, folder: Path) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = build()
        if kind == "dedicated":
            dmuon.dedicate_params(self.model, mesh, costs="flops")
        elif kind == "meta":
            with torch.device("meta"):
                self.model = Network(SIZE)
        shard_ = dmuon.fully_shard if kind == "dedicated" else fully_shard
        for block in self.model.blocks:
            shard_(block, mesh=mesh)
        shard_(self.model, mesh=mesh)
        if kind == "meta":
            self.model.to_empty(device="cpu")
            whole = build().state_dict()
            for name, p in self.model.named_parameters():
                with torch.no_grad():
                    p.copy_(torch.distributed.tensor.distribute_tensor(whole[name], mesh, p.placements))
        self.optimizers = Optimizers.Config().build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, rate)
        self.checkpointer = CheckpointManager(
            CheckpointManager.Config(enable=True, folder=str(folder), interval=HALF, keep_latest_k=0),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
        )

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizers.zero_grad()
            loss_of(self.model, *shard(batch(step), dist.get_rank(), dist.get_world_size())).backward()
            clip_grad_norm_(list(self.model.parameters()), NORM)
            self.optimizers.step()
            self.schedulers.step()


def reference() -> dict[str, Tensor]:
    model = build()
    optimizer = Reference(model)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, rate) for o in (optimizer.muon, optimizer.adamw)]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return dict(model.state_dict())


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize("kind", ["fsdp2", "meta", "dedicated"])
@on_ranks(2, timeout=120.0)
def test_training_equals_one_process_and_resumes_exactly(rank: int, world: int, kind: str) -> None:
    names = [tempfile.mkdtemp(prefix="dmuon-torchtitan-") if rank == 0 else ""]
    dist.broadcast_object_list(names, 0)
    folder = Path(names[0])
    run = Run(kind, folder)
    run.train(0, HALF)
    assert run.checkpointer.save(HALF)
    run.train(HALF, STEPS)
    weights = full_state(run.model)
    assert_equal_weights(weights, reference())
    assert over_ranks(run.optimizers.optimizers[0].last_step.ns_matrices) == MATRICES, "each has one owner"

    resumed = Run(kind, folder)
    assert resumed.checkpointer.load()
    resumed.train(HALF, STEPS)
    assert_same_tensors(full_state(resumed.model), weights)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def test_its_llama_is_routed_on_the_meta_device() -> None:
    models = pytest.importorskip("torchtitan.models.llama3")
    with torch.device("meta"):
        llama = models.llama3_configs["debugmodel"]("flex").build()
    routes = {route.fqn: route for route in route_parameters(llama)}
    fused = routes["layers.0.attention.qkv_linear.wqkv.weight"]
    assert fused.muon and fused.spec == dmuon.MatrixSpec((16, 16, 16), repeats=16), "by heads"
    assert not routes["tok_embeddings.weight"].muon and not routes["lm_head.weight"].muon
    assert all(route.muon == (route.param.ndim == 2) for fqn, route in routes.items() if fqn.startswith("layers."))
