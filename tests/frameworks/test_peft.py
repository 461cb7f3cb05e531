"""LoRA by peft: adapters train, are saved and merged, alone, under DDP and on dedicated models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights
from harness.hugging_face import OPTIONS, build, launched, samples, shared_folder, weights_of
from harness.on_ranks import on_ranks, over_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dmuon

peft = pytest.importorskip("peft", reason="peft is not installed (the extra 'frameworks')")
pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS, BATCH = 3, 8
ADAPTERS = 8  # two projections of two blocks, A and B of each


def adapted() -> Any:
    model = build()
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(model: Any, optimizer: dmuon.Muon, rank: int = 0, world: int = 1) -> None:
    tokens = torch.stack([sample["input_ids"] for sample in samples()])
    for step in range(STEPS):
        rows = tokens[BATCH * step : BATCH * (step + 1)][rank::world]
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()


def merged_in_one_process() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights with adapters, and merged ones, after training in one process."""
    model = adapted()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer)
    assert {name for name, p in model.named_parameters() if p in optimizer.state} == {
        name for name, p in model.named_parameters() if "lora" in name
    }, "what is frozen has no state"
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, dict(model.merge_and_unload().state_dict())


def loaded(folder: Path) -> dict[str, Tensor]:
    """The saved adapter on a fresh base, merged."""
    return dict(peft.PeftModel.from_pretrained(build(), folder).merge_and_unload().state_dict())


@on_ranks(2, timeout=180.0)
def test_adapters_train_save_and_merge_under_ddp(rank: int, world: int) -> None:
    expected, merged = merged_in_one_process()
    with shared_folder() as folder, launched(rank, 1):
        model = adapted()
        optimizer = dmuon.Muon(model, **OPTIONS)
        train(DistributedDataParallel(model), optimizer, rank, world)
        assert over_ranks(optimizer.last_step.ns_matrices) == ADAPTERS
        assert sum(p in optimizer.state for p in model.parameters()) == ADAPTERS
        assert_equal_weights(dict(model.state_dict()), expected)
        model.save_pretrained(folder, is_main_process=rank == 0)
        dist.barrier()
        assert_equal_weights(loaded(folder), merged)
        assert_equal_weights(dict(model.merge_and_unload().state_dict()), merged)


@on_ranks(2, timeout=180.0)
def test_adapters_of_a_dedicated_model_train_save_and_merge(rank: int, world: int) -> None:
    import transformers

    expected, merged = merged_in_one_process()
    with shared_folder() as folder, launched(rank, 1):
        model = adapted()
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
        optimizer = dmuon.Muon(model, **OPTIONS)
        train(model, optimizer, rank, world)
        assert over_ranks(optimizer.last_step.ns_matrices) == ADAPTERS
        assert len(optimizer.state) == ADAPTERS
        assert_equal_weights(weights_of(model), expected)
        with pytest.raises(RuntimeError, match=r"use `with dmuon\.summon_full_params"):
            model.merge_adapter()
        with dmuon.summon_full_params(model, writeback=False):
            model.save_pretrained(folder, is_main_process=rank == 0)
            dist.barrier()
            assert_equal_weights(loaded(folder), merged)
            whole = model.merge_and_unload()
            assert_equal_weights(dict(whole.state_dict()), merged)
            whole.save_pretrained(folder / "merged", is_main_process=rank == 0)
        dist.barrier()
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
        assert_equal_weights(dict(saved.state_dict()), merged)
