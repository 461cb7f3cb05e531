"""A user's ``gather_fn`` and ``redistribute_fn`` for weights that are cut by rows into equal parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

State = dict[str, Any]  # of which ``shapes`` are those of the whole parameters


def shape_now(state: State) -> tuple[int, ...]:
    """Of the whole of the parameter that is under way."""
    shape: tuple[int, ...] = state["shapes"][state["current_param_idx"]]
    return shape


def gather_with_work(update: Tensor, dst_rank: int, state: State) -> tuple[Tensor | None, Any]:
    if state["rank"] != dst_rank:
        return None, dist.gather(update, None, dst=dst_rank, async_op=True)
    whole = torch.empty(shape_now(state))
    return whole, dist.gather(update, list(whole.chunk(dist.get_world_size())), dst=dst_rank, async_op=True)


def scatter_with_work(update: Tensor | None, src_rank: int, state: State) -> tuple[Tensor, Any]:
    rows, cols = shape_now(state)
    part = torch.empty(rows // dist.get_world_size(), cols)
    parts = None if update is None else list(update.chunk(dist.get_world_size()))
    return part, dist.scatter(part, parts, src=src_rank, async_op=True)
