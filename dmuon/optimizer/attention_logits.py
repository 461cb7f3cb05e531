"""The largest logits of calls of attention, multiplied again from what these were given."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import create_mask

from dmuon.platform.torch_private import local_tensor

_BLOCK_NUMEL = 2**24  # of logits that are computed at once


def logits_of_sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """The largest logit of each head, ``(heads,)``. The arguments are those of ``scaled_dot_product_attention``."""
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | options

    def allowed(start: int, stop: int) -> Tensor | None:
        if given.get("is_causal", False):
            return torch.ones(stop - start, key.shape[2], dtype=torch.bool, device=query.device).tril(start)
        if given.get("attn_mask") is None:
            return None
        mask = local_tensor(given["attn_mask"])
        mask = mask[..., start:stop, :] if mask.shape[-2] > 1 else mask
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2  # some are finite

    return _largest_logits(query, key, given.get("scale"), allowed)


def logits_of_flex(
    query: Tensor, key: Tensor, _value: Tensor, score_mod: Any, block_mask: tuple[Any, ...], scale: float, *_: Any
) -> Tensor:
    """The same of ``flex_attention``. What ``score_mod`` makes ``-inf`` does not count; else it changes nothing."""

    def allowed(start: int, stop: int) -> Tensor:
        shape = (query.shape[0], query.shape[1], stop - start, key.shape[2], str(query.device))
        mask = create_mask(lambda b, h, i, j: block_mask[-1](b, h, i + start, j), *shape)
        return mask & create_mask(lambda score, b, h, i, j: score_mod(score, b, h, i + start, j), *shape)

    return _largest_logits(query, key, scale, allowed)


@torch.no_grad()
def _largest_logits(
    query: Tensor, key: Tensor, scale: float | None, allowed: Callable[[int, int], Tensor | None]
) -> Tensor:
    """Of ``query·key·scale`` in fp32 or wider, ``(heads,)``; ``-inf`` of a head of which no position counts.

    Args:
        allowed: which positions count, of a range of queries.
    """
    for tensor in (query, key):
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        whole = all(placement.is_replicate() or placement in (Shard(0), Shard(1)) for placement in placements)
        if tensor.is_nested or tensor.ndim != 4 or not whole:
            raise RuntimeError(
                "QKClip.collect() reads (batch, heads, length, width) with whole sequences, and was given "
                f"{tensor.ndim} dimensions of {placements or type(tensor)}: let the module call clip.report()"
            )
    query, key = local_tensor(query.detach()), local_tensor(key.detach())
    dtype = torch.promote_types(query.dtype, torch.float32)
    found = torch.full((query.shape[1],), -inf, dtype=dtype, device=query.device)
    width = query.shape[3]
    columns = key.to(dtype).transpose(2, 3).unsqueeze(2)
    rows = max(1, _BLOCK_NUMEL // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, query.shape[2] if query.numel() and key.numel() else 0, rows):
            some = query[:, :, start : start + rows].to(dtype).unflatten(1, (key.shape[1], -1))
            logits = (some @ columns).flatten(1, 2) * (width**-0.5 if scale is None else scale)
            counting = allowed(start, start + logits.shape[2])
            if counting is not None:
                logits = logits.masked_fill(~counting, -inf)
            found = torch.maximum(found, logits.amax((0, 2, 3)))
    return found
