"""accelerate for dedicated models, which nothing may wrap again and of which every rank saves a part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from dmuon.dedicated.dedication import dedications, no_sync
from dmuon.integrations import WholeModel, WholeOptimizer, require_whole

_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class DedicatedAccelerator(Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` that takes models which went through ``dmuon.dedicate_params``, and others.

    ``prepare`` wraps none of them: it adds autocast and compilation. What ``save_state`` and ``save_model`` write is
    whole, in the files that accelerate writes for DDP, so another number of ranks may load it, and so may one process.
    Call them on every rank, and ``get_state_dict`` too, which gives rank 0 whole weights and other ranks none.

    Raises:
        ValueError: the configuration asks for FSDP, DeepSpeed or Megatron.
    """

    _optimizers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type in _SHARDING:
            raise ValueError(
                f"accelerate is configured for {self.distributed_type.value}, and dmuon lays out dedicated models: "
                "leave it out, and call dmuon.fully_shard(model, mesh=mesh) after dedicate_params to shard what dmuon "
                "does not own; for other models take accelerate.Accelerator"
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if dedications(model):  # it is on its device already
            require_whole(model)
            device_placement, evaluation_mode = False, True
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with no_sync(model) if dedications(model) else super().no_sync(model):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        if not dedications(model):
            return super().get_state_dict(model, unwrap)
        # accelerate looks for tied weights in an ordered dict only
        return OrderedDict(get_model_state_dict(model, options=self._whole()))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._stand_ins(self._whole()):
            saved = super().save_state(*args, **kwargs)
        self.wait_for_everyone()  # rank 0 writes alone, and any rank may load next
        return saved

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        hook = self.register_load_state_pre_hook(_load_whole)  # after the user's, which see the models
        try:
            with self._stand_ins(None):
                super().load_state(*args, **kwargs)
        finally:
            hook.remove()

    @contextmanager
    def _stand_ins(self, options: StateDictOptions | None) -> Iterator[None]:
        """Inside, whole state is saved and loaded in the place of optimizers of dedicated models."""
        own = self._optimizers
        pairs = [(optimizer, self._model_of(optimizer)) for optimizer in own]
        self._optimizers = [
            optimizer if model is None else WholeOptimizer(model, optimizer, options) for optimizer, model in pairs
        ]
        try:
            yield
        finally:
            self._optimizers = own

    def _model_of(self, optimizer: Any) -> nn.Module | None:
        """The dedicated model that holds what the optimizer trains, if one does."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = (model for model in self._models if dedications(model))
        return next((model for model in models if trained <= {id(p) for p in model.parameters()}), None)

    def _whole(self) -> StateDictOptions:
        """On rank 0 only, in the memory of the host, unless ranks of other hosts write too."""
        each_host = self.project_configuration.save_on_each_node
        return StateDictOptions(full_state_dict=True, cpu_offload=not each_host)


def _load_whole(models: list[Any], _folder: str) -> None:
    models[:] = [WholeModel(model) if dedications(model) else model for model in models]
