"""Supervised fine-tuning by TRL on two ranks, under DDP and on a dedicated model, against one process."""

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


def trained(kind: Any, model: Any, folder: Path, world: int) -> Any:
    import datasets
    import trl

    text = [" ".join(f"w{int(token)}" for token in sample["input_ids"]) for sample in samples()]
    settings = trl.SFTConfig(
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
        max_length=16,
    )
    trainer = kind(
        model=model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"text": text}),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(lambda: dmuon.Muon, OPTIONS),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("dedicated", [False, True])
@on_ranks(2, timeout=180.0)
def test_fine_tuning_equals_one_process(rank: int, world: int, dedicated: bool) -> None:
    import trl

    from dmuon.integrations.transformers import DedicatedTrainerMixin

    class DedicatedSFTTrainer(DedicatedTrainerMixin, trl.SFTTrainer):
        pass

    torch.manual_seed(0)
    with shared_folder() as folder:
        with launched(rank, 1):
            expected = weights_of(trained(trl.SFTTrainer, build(), folder / str(rank), 1).model)
        with launched(rank, world):
            model = build()
            if dedicated:
                dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
            trainer = trained(DedicatedSFTTrainer if dedicated else trl.SFTTrainer, model, folder, world)
            assert_equal_weights(weights_of(trainer.model), expected)
            assert over_ranks(optimizer_of(trainer).last_step.ns_matrices) == MATRICES["llama"]
