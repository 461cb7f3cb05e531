"""torchtitan's optimizer container, schedulers, clipping and checkpointer on two ranks, against one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights, assert_same_tensors
from harness.network import Network, full_state, is_matrix, loss_of, shard, shard_blocks
from harness.on_ranks import on_ranks, over_ranks
from harness.oracle import Reference
from harness.toy import OPTIONS, SIZE, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.model.routing import route_parameters

pytest.importorskip("torchtitan", reason="torchtitan is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_  # noqa: E402

from dmuon.integrations.torchtitan import MuonOptimizers  # noqa: E402

STEPS, HALF, NORM, CONTEXT = 4, 2, 0.5, 8
MATRICES = sum(is_matrix(name) for name, _ in build().named_parameters())


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
        shard_blocks(self.model, mesh, dmuon.fully_shard if kind == "dedicated" else fully_shard)
        if kind == "meta":
            self.model.to_empty(device="cpu")
            whole = build().state_dict()
            for name, p in self.model.named_parameters():
                with torch.no_grad():
                    p.copy_(torch.distributed.tensor.distribute_tensor(whole[name], mesh, p.placements))
        options = {name: value for name, value in OPTIONS.items() if name != "lr"}
        self.optimizers = MuonOptimizers.Config(lr=OPTIONS["lr"], options=options).build(model_parts=[self.model])
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
def test_training_equals_one_process_and_resumes_exactly(rank: int, world: int, kind: str, tmp_path: Path) -> None:
    run = Run(kind, tmp_path)
    run.train(0, HALF)
    assert run.checkpointer.save(HALF)
    run.train(HALF, STEPS)
    weights = full_state(run.model)
    assert_equal_weights(weights, reference())
    assert over_ranks(run.optimizers.optimizers[0].last_step.ns_matrices) == MATRICES, "each has one owner"

    resumed = Run(kind, tmp_path)
    assert resumed.checkpointer.load()
    resumed.train(HALF, STEPS)
    assert_same_tensors(full_state(resumed.model), weights)


def llama() -> Any:
    """Its own, small, from the meta device and the same on all ranks."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = pytest.importorskip("torchtitan.models.llama3").llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope.max_seq_len = CONTEXT
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def train_llama(model: Any, optimizers: Any, rank: int = 0, world: int = 1) -> None:
    for step in range(2):
        tokens, targets = shard(batch(step), rank, world)
        optimizers.zero_grad()
        loss_of(model, tokens[:, :CONTEXT], targets[:, :CONTEXT]).backward()
        optimizers.step()


@pytest.mark.parametrize("dedicated", [False, True])
@on_ranks(2, timeout=120.0)
def test_its_llama_trains_as_in_one_process_with_its_fused_projection_split(
    rank: int, world: int, dedicated: bool
) -> None:
    alone = llama()
    routes = {route.fqn: route for route in route_parameters(alone)}
    fused = routes["layers.0.attention.qkv_linear.wqkv.weight"]
    assert fused.muon and fused.spec == dmuon.MatrixSpec((16, 16, 16), repeats=16), "by heads"
    assert not routes["tok_embeddings.weight"].muon and not routes["lm_head.weight"].muon
    train_llama(alone, MuonOptimizers.Config(lr=0.01).build(model_parts=[alone]))
    model, mesh = llama(), init_device_mesh("cpu", (world,))
    if dedicated:
        dmuon.dedicate_params(model, mesh, costs="flops")
    for block in model.layers.values():
        dmuon.fully_shard(block, mesh=mesh)
    dmuon.fully_shard(model, mesh=mesh)
    optimizers = MuonOptimizers.Config(lr=0.01).build(model_parts=[model])
    train_llama(model, optimizers, rank, world)
    assert_equal_weights(whole(model), whole(alone))
    assert over_ranks(optimizers.optimizers[0].last_step.ns_matrices) == 2 * (3 + 4), "queries, keys, values apart"

    trained = whole(model)
    state = copy.deepcopy(model.state_dict())  # in which its module shows them apart, too
    assert "layers.0.attention.qkv_linear.wq.weight" in state
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)
    assert_same_tensors(whole(model), trained)


def whole(model: torch.nn.Module) -> dict[str, Tensor]:
    """By parameter: its fused projection is several in state dicts. Collective."""
    with dmuon.summon_full_params(model, writeback=False) if dmuon.owned_parameters(model) else nullcontext():
        named = [(name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in model.named_parameters()]
        return {name: value.detach().clone() for name, value in named}


def test_options_reach_the_optimizer_and_groups_by_patterns_are_refused() -> None:
    model = build()
    (optimizer,) = MuonOptimizers.Config(lr=0.02, options={"adamw_lr": 0.003, "exclude": ["blocks.0"]}).build(
        model_parts=[model]
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.003, 0.003]
    names = {group["use_muon"]: group["param_names"] for group in optimizer.param_groups}
    assert names[True] == [n for n, _ in model.named_parameters() if is_matrix(n) and not n.startswith("blocks.0.")]
    with pytest.raises(ValueError, match=r"param_groups of MuonOptimizers\.Config are not read"):
        MuonOptimizers.Config(param_groups=default_adamw().param_groups).build(model_parts=[model])
