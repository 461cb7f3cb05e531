"""Hugging Face's Trainer for dedicated models, which nothing may wrap again and of which every rank has a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import Trainer

from dmuon.dedicated.dedication import require_dedicated
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.integrations import WholeOptimizer, require_whole
from dmuon.step.residency import like_param, part_like


class DedicatedTrainerMixin:
    """Makes a subclass of ``transformers.Trainer`` train models that went through ``dmuon.dedicate_params``.

    ``class MyTrainer(DedicatedTrainerMixin, SFTTrainer): ...``. The checkpoints are Trainer's own, whole in one file,
    for models and optimizers on any number of ranks. ``save_model`` and checkpoints are collective.

    Raises:
        ValueError: the model was not dedicated, or the arguments ask for FSDP or DeepSpeed.
    """

    args: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_dedicated(self.model)
        require_whole(self.model)
        if getattr(self, "is_fsdp_enabled", False) or getattr(self, "is_deepspeed_enabled", False):
            raise ValueError(
                "args ask for FSDP or DeepSpeed, and the model is dedicated: leave them out, and call "
                "dmuon.fully_shard(model, mesh=mesh) after dedicate_params to shard what dmuon does not own"
            )
        self.model.register_load_state_dict_pre_hook(_cut)
        self.model._is_fsdp_managed_module = True  # so that generate() and dropped layers keep ranks in step

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """``dedicate_params`` has done it."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """As Trainer prepares models for evaluation: autocast and compilation, without DistributedDataParallel."""
        prepared: nn.Module = self.accelerator.prepare_model(model, evaluation_mode=True)  # type: ignore[attr-defined]
        return prepared

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = get_model_state_dict(self.model, options=self._whole())
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own = self.optimizer
        self.optimizer = WholeOptimizer(self.model, own, self._whole())
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = own

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        own = self.optimizer
        self.optimizer = WholeOptimizer(self.model, own)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        finally:
            self.optimizer = own

    def _whole(self) -> StateDictOptions:
        """On rank 0 only, in the memory of the host, unless ranks of other hosts write too."""
        return StateDictOptions(full_state_dict=True, cpu_offload=not self.args.save_on_each_node)


def _cut(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a load: the parts of whole values for what FSDP2 or tensor parallelism has cut."""
    params: Iterable[tuple[str, Tensor]] = model.named_parameters(remove_duplicate=False)
    for name, param in params:
        value = state_dict.get(prefix + name)
        if not isinstance(param, DTensor) or isinstance(param, OwnedTensor) or isinstance(value, DTensor):
            continue
        if isinstance(value, Tensor) and value.shape == param.shape:  # torch says what is wrong with others
            state_dict[prefix + name] = like_param(param, part_like(param, value, name))


class DedicatedTrainer(DedicatedTrainerMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` for a model that went through ``dmuon.dedicate_params``."""
