"""Lightning on two ranks, under DDP and ``ModelParallelStrategy``, against torch's optimizers in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights, assert_same_tensors
from harness.network import is_matrix, loss_of, shard_blocks
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from harness.oracle import Reference
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import dmuon

lightning = pytest.importorskip("lightning", reason="lightning is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS, HALF, ROWS, MICRO, NORM, HIDDEN = 4, 2, 12, 2, 0.5, 28
MATRICES = sum(is_matrix(name) for name, _ in build(hidden=HIDDEN).named_parameters())


def reference() -> dict[str, Tensor]:
    model = build(hidden=HIDDEN)
    optimizer = Reference(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step, ROWS)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Task(lightning.LightningModule):
    """The toy model, laid out as Lightning asks for it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.model = build(hidden=HIDDEN)

    def configure_model(self) -> None:
        if self.kind == "ddp":
            return
        mesh = self.device_mesh["data_parallel"]
        if self.kind.startswith("dedicated"):
            dmuon.dedicate_params(self.model, mesh, costs="flops")
        if self.kind == "dedicated alone":
            return
        shard_blocks(self.model, mesh, fully_shard if self.kind == "fsdp2" else dmuon.fully_shard)

    def training_step(self, rows: list[Tensor], number: int) -> Tensor:
        return loss_of(self.model, *rows)

    def configure_optimizers(self) -> dmuon.Muon:
        return dmuon.Muon(self, **OPTIONS)  # the model is one of its children


def fit(kind: str, steps: int, world: int, full: bool = False, resume: Path | None = None) -> tuple[Any, Any]:
    """A trainer that has taken so many steps, of two micro-batches each, and what it trained."""
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    strategy = (
        DDPStrategy()
        if kind == "ddp"
        else ModelParallelStrategy(
            data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=not full
        )
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=[LightningEnvironment()],
        use_distributed_sampler=False,
        max_steps=steps,
        accumulate_grad_batches=MICRO,
        gradient_clip_val=NORM,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    coming = [*range(STEPS)] if resume is None else [*range(HALF, STEPS), *range(HALF)]  # it begins with the first row
    tokens, targets = (torch.cat(parts) for parts in zip(*(batch(step, ROWS) for step in coming), strict=True))
    rank = dist.get_rank()
    data = torch.utils.data.TensorDataset(tokens[rank::world], targets[rank::world])  # Lightning's sampler shuffles
    task = Task(kind)
    trainer.fit(task, torch.utils.data.DataLoader(data, ROWS // MICRO // world), ckpt_path=resume)
    assert trainer.global_step == steps
    return trainer, task


def weights_of(task: Any) -> dict[str, Tensor]:
    """Whole, of the inner model. Collective."""
    state = get_model_state_dict(task.model, options=StateDictOptions(full_state_dict=True))
    names = [list(state)]
    dist.broadcast_object_list(names, 0)
    whole = {}
    for name in names[0]:
        value = [state.get(name)]
        dist.broadcast_object_list(value, 0)
        whole[name] = value[0]
    return whole


@pytest.mark.pitfall("P74", "P76")
@pytest.mark.parametrize(
    ("kind", "full"),
    [("ddp", True), ("fsdp2", False), ("dedicated", True), ("dedicated alone", False)],
)
@on_ranks(2, timeout=120.0)
def test_training_equals_one_process_and_resumes_exactly(
    rank: int, world: int, kind: str, full: bool, tmp_path: Path
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # where Lightning looks for it
    _, task = fit(kind, STEPS, world)
    (optimizer,) = (o.optimizer for o in [task.optimizers()])
    assert over_ranks(optimizer.last_step.ns_matrices) == MATRICES, "each has one owner"
    weights = weights_of(task)
    assert_equal_weights(weights, reference())
    assert_same_over_ranks(weights)

    trainer, _ = fit(kind, HALF, world, full)
    trainer.save_checkpoint(tmp_path / "saved")
    _, resumed = fit(kind, STEPS, world, full, tmp_path / "saved")
    assert_same_tensors(weights_of(resumed), weights)
