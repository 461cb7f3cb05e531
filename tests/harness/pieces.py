"""Tensors whose elements tell where they are from, parts of them, and meshes without process groups."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from dmuon.layout.shards import Piece


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Its elements are their flat indices; exact in bf16, too, up to 256 of them."""
    return torch.arange(prod(shape)).view(*shape).to(dtype)


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    """The local tensor of a piece, block by block; -1 where no block writes."""
    local = whole.new_full(piece.shape, -1)
    for here, there in piece.blocks():
        assert (local[here] == -1).all(), "blocks overlap"
        local[here] = whole[there]
    return local
