"""Hugging Face's libraries inside a test's rank: tiny random models, their data, and Trainer on one or on all ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import dmuon

VOCAB, LENGTH = 32, 8
OPTIONS: dict[str, Any] = {"lr": 5e-3, "adamw_lr": 2e-3, "ns_coefficients": "classic"}  # of dmuon.Muon
MATRICES = {"llama": 14, "gpt2": 12}  # those of two blocks: one fused tensor of GPT-2 is three
_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Inside, the libraries find what a launcher tells ranks; of one rank alone, that there is none."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        PartialState._reset_state()
        for name in [n for n in os.environ if n in told or n.startswith(("ACCELERATE_", "FSDP_"))]:
            del os.environ[name]

    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    forget()
    os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    if world > 1:
        os.environ.update({name: str(number) for name, number in told.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    forget()


def take_cpu_for_accelerator() -> None:
    """accelerate lets its FSDP plugin do nothing, without a word, unless ranks have accelerators."""
    from accelerate.state import DistributedType, PartialState

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder, the same on all ranks. Collective."""
    names = [tempfile.mkdtemp(prefix="dmuon-frameworks-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names, src=0)
    yield Path(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


def build(kind: str = "llama", **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, use_cache=False, **_SIZES[kind], **options
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def samples(number: int = 48) -> list[dict[str, Tensor]]:
    tokens = torch.randint(2, VOCAB, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole, whatever the model is. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    whole = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    shared: list[Any] = [whole]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(shared, src=0)
    return {name: value.clone() for name, value in shared[0].items()}


def trainer_of(model: Any, folder: Path, batch: int, kind: Any = None, **arguments: Any) -> Any:
    """A Trainer with dmuon, whose batches over all ranks are ``batch`` samples in the order of the data."""
    import transformers

    given = {
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    } | arguments
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = transformers.TrainingArguments(str(folder), per_device_train_batch_size=batch // world, **given)
    if settings.fsdp and settings.device is not None:
        take_cpu_for_accelerator()
    return (kind or transformers.Trainer)(
        model=model,
        args=settings,
        train_dataset=samples(),
        eval_dataset=samples(16),
        optimizer_cls_and_kwargs=(lambda: dmuon.Muon, OPTIONS),
    )


def optimizer_of(trainer: Any) -> dmuon.Muon:
    """Without what accelerate puts around it."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def grad_norms(trainer: Any) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
