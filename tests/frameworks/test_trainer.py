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


@pytest.mark.pitfall("P74", "P77")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@on_ranks(2, timeout=180.0)
def test_training_equals_one_process_and_each_matrix_has_one_owner(rank: int, world: int, family: str) -> None:
    found: list[Any] = []
    with shared_folder() as folder:
        for ranks in (1, world):
            with launched(rank, ranks):
                trainer = trainer_of(build(family), folder / str(ranks) / str(rank), 4, gradient_accumulation_steps=2)
                trainer.train()
                found.append((trainer, weights_of(trainer.model), trainer.evaluate()["eval_loss"]))
    (alone, expected, loss), (together, weights, loss_together) = found
    # The keys' part of a bias has no gradient but rounding, of which AdamW makes an update.
    assert_equal_weights(weights, expected, 2e-4 if family == "gpt2" else 1e-5)
    assert_same_over_ranks(weights)
    assert grad_norms(together) == pytest.approx(grad_norms(alone), rel=1e-5) and max(grad_norms(alone)) > 0.5
    assert loss_together == pytest.approx(loss, rel=1e-5)
    assert optimizer_of(alone).last_step.ns_matrices == MATRICES[family]
    assert over_ranks(optimizer_of(together).last_step.ns_matrices) == MATRICES[family]


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
@pytest.mark.parametrize("kind", ["ddp", "FULL_STATE_DICT"])
@on_ranks(2, timeout=180.0)
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


Layout = tuple[tuple[str, ...], bool]  # names of the mesh's dimensions, and whether FSDP2 shards the rest
SHARDED: Layout = ((), True)
COPIES: Layout = (("replicate",), False)


def dedicated(world: int, layout: Layout, **options: Any) -> Any:
    model = build(**options)
    names, sharded = layout
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=names or None)
    dmuon.dedicate_params(model, mesh, costs="flops")
    for block in model.model.layers if sharded else ():
        dmuon.fully_shard(block, mesh=mesh)
    if sharded:
        dmuon.fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize(
    ("layout", "tied", "bf16"),
    [(SHARDED, False, False), (SHARDED, True, True), (COPIES, True, False)],
)
@on_ranks(2, timeout=180.0)
def test_dedicated_model_trains_saves_and_resumes(
    rank: int, world: int, layout: Layout, tied: bool, bf16: bool
) -> None:
    import transformers

    from dmuon.integrations.transformers import DedicatedTrainer

    common: dict[str, Any] = {"gradient_accumulation_steps": 2, "bf16": bf16}
    options = common | {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    tolerance = 3e-2 if bf16 else 1e-5
    with shared_folder() as folder:
        with launched(rank, 1):
            alone = trainer_of(build(tie_word_embeddings=tied), folder / "alone" / str(rank), 4, **common)
            alone.train()
            expected, loss = weights_of(alone.model), alone.evaluate()["eval_loss"]

        def run(kept: Layout) -> Any:
            model = dedicated(world, kept, tie_word_embeddings=tied)
            return trainer_of(model, folder / "together", 4, DedicatedTrainer, load_best_model_at_end=True, **options)

        with launched(rank, world):
            trainer = run(layout)
            trainer.train()
            weights = weights_of(trainer.model)
            assert trainer.state.best_global_step == 4
            assert_equal_weights(weights, expected, tolerance)
            assert grad_norms(trainer) == pytest.approx(grad_norms(alone), rel=tolerance)
            assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=tolerance)
            assert over_ranks(optimizer_of(trainer).last_step.ns_matrices) == MATRICES["llama"]
            trainer.save_model(str(folder / "final"))
            dist.barrier()
            saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
            assert_same_tensors(dict(saved.state_dict()), weights)
        for kept in (SHARDED, COPIES) if layout == COPIES else (layout,):
            with launched(rank, world):
                resumed = run(kept)
                resumed.train(resume_from_checkpoint=str(folder / "together" / "checkpoint-2"))
                if kept == layout:
                    assert_same_tensors(weights_of(resumed.model), weights)
                assert_equal_weights(weights_of(resumed.model), weights, tolerance)


@on_ranks(2, timeout=180.0)
def test_trainers_that_do_not_fit_are_refused_with_the_one_that_does(rank: int, world: int) -> None:
    from dmuon.integrations.transformers import DedicatedTrainer

    with shared_folder() as folder:
        with (
            launched(rank, world),
            pytest.raises(RuntimeError, match=r"dmuon\.integrations\.transformers\.DedicatedTr"),
        ):
            trainer_of(dedicated(world, COPIES), folder, 4)
        with launched(rank, world), pytest.raises(ValueError, match="was not dedicated"):
            trainer_of(build(), folder, 4, DedicatedTrainer)
        with launched(rank, world), pytest.raises(ValueError, match="leave them out"):
            trainer_of(dedicated(world, COPIES), folder, 4, DedicatedTrainer, **FSDP2)
