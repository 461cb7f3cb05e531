"""Programs on ranks that have the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.inside import default_store, limit_of

from pretend import module

BACKENDS = f"cpu:gloo,{module.NAME}:{module.NAME}"


def on_device(rank: int, world: int, library: Path, program: Callable[..., Any], *args: Any) -> Any:
    """``program(rank, world, *args)`` in groups that communicate tensors of both devices.

    Called by the pool of ranks, in workers that have run nothing but this: autograd makes one thread for each device
    at the first backward of a process.
    """
    module.load(library)
    torch.pretend.set_device(rank)  # type: ignore[attr-defined]
    store = dist.PrefixStore("pretend", default_store())
    limit = limit_of(dist.group.WORLD)
    dist.destroy_process_group()
    dist.init_process_group(BACKENDS, store=store, rank=rank, world_size=world, timeout=limit)
    return program(rank, world, *args)
