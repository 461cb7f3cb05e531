"""Hugging Face's Trainer on two ranks, against Trainer on one with the same batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights, assert_same_tensors
from harness.hugging_face import (
    MATRICES,
    build,
    grad_norms,
    launched,
    optimizer_of,
    shared_folder,
    trainer_of,
    weights_of,
)
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon

pytest.importorskip("accelerate", reason="accelerate is not installed (the extra 'frameworks')")
pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.pitfall("P74")
@on_ranks(2)
def test_training_equals_one_process_and_each_matrix_has_one_owner(rank: int, world: int) -> None:
    found: list[Any] = []
    with shared_folder() as folder:
        for ranks in (1, world):
            with launched(rank, ranks):
                trainer = trainer_of(build(), folder / str(ranks) / str(rank), 4, gradient_accumulation_steps=2)
                trainer.train()
                found.append((trainer, weights_of(trainer.model), trainer.evaluate()["eval_loss"]))
    (alone, expected, loss), (together, weights, loss_together) = found
    assert_equal_weights(weights, expected)
    assert_same_over_ranks(weights)
    assert grad_norms(together) == pytest.approx(grad_norms(alone), rel=1e-5) and max(grad_norms(alone)) > 0.5
    assert loss_together == pytest.approx(loss, rel=1e-5)
    assert optimizer_of(alone).last_step.ns_matrices == MATRICES["llama"]
    assert over_ranks(optimizer_of(together).last_step.ns_matrices) == MATRICES["llama"]


FSDP2: dict[str, Any] = {
    "fsdp": "full_shard",
    "fsdp_config": {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    },
}


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize("kind", ["ddp", "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2, timeout=120.0)
def test_run_under_bf16_autocast_resumes_with_the_same_bits(rank: int, world: int, kind: str) -> None:
    options: dict[str, Any] = {"bf16": True, "save_strategy": "steps", "save_steps": 2}
    with shared_folder() as folder:
        with launched(rank, 1):
            alone = trainer_of(build(), folder / "alone" / str(rank), 4, bf16=True)
            alone.train()
            expected = weights_of(alone.model)
        with launched(rank, world):
            if kind != "ddp":
                options |= {"fsdp": FSDP2["fsdp"], "fsdp_config": FSDP2["fsdp_config"] | {"state_dict_type": kind}}
            trainer = trainer_of(build(), folder / "together", 4, **options)
            trainer.train()
            weights = weights_of(trainer.model_wrapped)
            sharded = (isinstance(p, DTensor) for p in trainer.model.parameters())
            assert all(sharded) if kind != "ddp" else not any(sharded)
            assert_equal_weights(weights, expected, 3e-2)  # sums of bf16 products are rounded otherwise
            assert {value.dtype for value in weights.values()} == {torch.float32}
            assert over_ranks(optimizer_of(trainer).last_step.ns_matrices) == MATRICES["llama"]
        with launched(rank, world):
            resumed = trainer_of(build(), folder / "together", 4, **options)
            resumed.train(resume_from_checkpoint=str(folder / "together" / "checkpoint-2"))
            assert_same_tensors(weights_of(resumed.model_wrapped), weights)


def dedicated(world: int, **options: Any) -> Any:
    model = build(**options)
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops")
    for block in model.model.layers:
        dmuon.fully_shard(block, mesh=mesh)
    dmuon.fully_shard(model, mesh=mesh)
    return model


@on_ranks(2, timeout=120.0)
def test_dedicated_model_trains_saves_and_resumes(rank: int, world: int) -> None:
    import transformers

    from dmuon.integrations.transformers import DedicatedTrainer

    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    with shared_folder() as folder:
        with launched(rank, 1):
            alone = trainer_of(build(), folder / "alone" / str(rank), 4, gradient_accumulation_steps=2)
            alone.train()
            expected, loss = weights_of(alone.model), alone.evaluate()["eval_loss"]
        with launched(rank, world):
            trainer = trainer_of(dedicated(world), folder / "together", 4, DedicatedTrainer, **options)
            trainer.train()
            weights = weights_of(trainer.model)
            assert_equal_weights(weights, expected)
            assert grad_norms(trainer) == pytest.approx(grad_norms(alone), rel=1e-5)
            assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
            assert over_ranks(optimizer_of(trainer).last_step.ns_matrices) == MATRICES["llama"]
            trainer.save_model(str(folder / "final"))
            dist.barrier()
            saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
            assert_same_tensors(dict(saved.state_dict()), weights)
        with launched(rank, world):
            resumed = trainer_of(dedicated(world), folder / "together", 4, DedicatedTrainer, **options)
            resumed.train(resume_from_checkpoint=str(folder / "together" / "checkpoint-2"))
            assert_same_tensors(weights_of(resumed.model), weights)
