"""What ``distributed_config=None`` stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import ranks_of
from dmuon.exchanged.config import DistributedConfig
from dmuon.exchanged.functions import ShardFunctions
from dmuon.exchanged.generators import create_dtensor_config, layout_config

__all__ = ["default_config", "functions_of"]


def default_config(
    copies: Mapping[int, dist.ProcessGroup], params: Sequence[Tensor], last: DistributedConfig | None = None
) -> DistributedConfig | None:
    """What ``distributed_config=None`` stands for: None where every rank has all of everything to itself.

    Args:
        copies: by ``id``, the parameters that ``DistributedDataParallel`` replicates, and over which group.
        last: what it stood for before; still does, with the groups that it made, unless ``copies`` are others.
    """
    if not any(id(p) in copies or isinstance(p, DTensor) for p in params):
        return None
    held = {key: ranks_of(group) for key, group in copies.items()}
    known = None if last is None else functions_of(last)
    if known is not None and known.copied() == held:
        return last
    config = create_dtensor_config()
    if not held:
        return config
    functions = functions_of(config)
    assert functions is not None
    return layout_config(
        None,
        None,
        config.async_gpu_parallelism,
        config.prefetch_count,
        None,
        None,
        functions.chunk_bytes,
        functions.small_numel,
        copies=held,
    )


def functions_of(config: DistributedConfig) -> ShardFunctions | None:
    """The layouts that ``gather_fn`` and ``redistribute_fn`` go by, if both were generated together."""
    found = [getattr(f, "__self__", None) for f in (config.gather_fn, config.redistribute_fn)]
    known = found[0]
    return known if isinstance(known, ShardFunctions) and found[1] is known else None
