"""TRL's trainers on two ranks, under DDP and dedicated: against one process, or each other where they sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.hugging_face import MATRICES, OPTIONS, build, launched, optimizer_of, samples, shared_folder, weights_of
from harness.on_ranks import on_ranks, over_ranks
from torch.distributed.device_mesh import init_device_mesh

import dmuon

pytest.importorskip("trl", reason="trl is not installed (the extra 'frameworks')")
pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(32)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="w0", eos_token="w1", unk_token="w0")


def settings_of(config: Any, folder: Path, world: int, **options: Any) -> Any:
    return config(
        str(folder),
        per_device_train_batch_size=4 // world,
        max_steps=3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )


def trained(method: str, dedicated: bool, model: Any, folder: Path, world: int) -> Any:
    """As docs/i-use.md says it, on 48 lines of words; DPO prefers the line before, and GRPO short answers."""
    import datasets
    import trl

    from dmuon.integrations.transformers import DedicatedTrainerMixin

    text = [" ".join(f"w{int(token)}" for token in sample["input_ids"]) for sample in samples()]
    kind, options, data = {
        "SFT": (trl.SFTTrainer, {}, {"text": text}),
        "DPO": (trl.DPOTrainer, {}, {"prompt": text, "chosen": text[1:] + text[:1], "rejected": text}),
        "GRPO": (trl.GRPOTrainer, {"reward_funcs": _shorter}, {"prompt": text}),
    }[method]
    lengths: dict[str, Any] = {"max_length": 32}
    if method == "DPO":
        options["ref_model"] = build()
    if method == "GRPO":  # of three tokens two end an answer, so that ranks sample for more or fewer steps
        lengths = {
            "max_completion_length": 6,
            "num_generations": 2,
            "generation_kwargs": {"eos_token_id": [*range(21)]},
        }
    if dedicated:
        kind = type("Dedicated", (DedicatedTrainerMixin, kind), {})
    trainer = kind(
        model=model,
        args=settings_of(getattr(trl, f"{method}Config"), folder, world, **lengths),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
        **options,
    )
    trainer.optimizer_cls_and_kwargs = (lambda: dmuon.Muon, OPTIONS)
    trainer.train()
    return trainer


def _shorter(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(set(completion.split()))) for completion in completions]


@pytest.mark.parametrize("method", ["SFT", "DPO", "GRPO"])
@on_ranks(2, timeout=180.0)
def test_training_equals_one_process_and_dedication_that_under_ddp(rank: int, world: int, method: str) -> None:
    torch.manual_seed(0)
    with shared_folder() as folder:
        expected = None
        if method != "GRPO":  # which samples answers, other ones on each rank
            with launched(rank, 1):
                expected = weights_of(trained(method, False, build(), folder / str(rank), 1).model)
        with launched(rank, world):
            under_ddp = weights_of(trained(method, False, build(), folder, world).model)
            model = build()
            before = weights_of(model)
            dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
            trainer = trained(method, True, model, folder, world)
            dedicated = weights_of(trainer.model)
            name = "model.layers.0.mlp.up_proj.weight"
            assert not torch.equal(before[name], dedicated[name])
            for found in (under_ddp, dedicated):
                assert_equal_weights(found, expected or under_ddp)
            assert over_ranks(optimizer_of(trainer).last_step.ns_matrices) == MATRICES["llama"]
