"""How a region of memory, divided into one part per rank, is gathered from the parts' owners and reduced to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.layout.buffer import Transport, part_offsets
from dmuon.layout.topology import GlobalRank, Position
from dmuon.platform.torch_private import all_gather_single, reduce_scatter_single

Works = list[dist.Work | None]  # of collectives that were started; None of none


@dataclass(frozen=True, slots=True)
class Line:
    """The ranks along one dimension of the topology, and dmuon's own process groups over them.

    Weights and gradients have a group each, so that neither waits for the other.

    Attributes:
        ranks: by position on the line.
        position: of this rank.
    """

    ranks: tuple[GlobalRank, ...]
    position: Position
    weights: dist.ProcessGroup
    gradients: dist.ProcessGroup


def scratch(
    transport: Transport, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Memory for a reduction: the region and its parts, which are views of it where they travel together.

    Separate ones can be freed one by one.
    """
    if transport == "broadcast":
        parts = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        return parts[0], parts
    offsets = part_offsets(transport, sizes)
    region = torch.empty(offsets[-1], dtype=dtype, device=device)
    return region, [region[a:b] for a, b in pairwise(offsets)]


def gather(transport: Transport, region: Tensor, parts: Sequence[Tensor], line: Line) -> Works:
    """Start filling every part from the rank at its position on ``line``; this rank's own part holds its content.

    Args:
        region: 1-D, all parts in order.
        parts: views of it, some perhaps empty.
    """
    match transport:
        case "single":
            return [all_gather_single(region, parts[line.position], group=line.weights, async_op=True)]
        case "list":
            return [dist.all_gather(list(parts), parts[line.position], group=line.weights, async_op=True)]
        case _:
            return [
                dist.broadcast(part, src=line.ranks[i], group=line.weights, async_op=True)
                for i, part in enumerate(parts)
                if part.numel()
            ]


def reduce(transport: Transport, region: Tensor, parts: Sequence[Tensor], line: Line) -> tuple[Tensor, Works]:
    """Start averaging every part to the rank at its position on ``line``; the other parts are garbage then.

    Returns:
        Where this rank's own part arrives, and the works.
    """
    average = dist.ReduceOp.AVG
    own = parts[line.position]
    match transport:
        case "single":
            out = torch.empty_like(own)
            return out, [reduce_scatter_single(out, region, op=average, group=line.gradients, async_op=True)]
        case "list":
            out = torch.empty_like(own)
            return out, [dist.reduce_scatter(out, list(parts), op=average, group=line.gradients, async_op=True)]
        case _:
            return own, [
                dist.reduce(part, line.ranks[i], average, group=line.gradients, async_op=True)
                for i, part in enumerate(parts)
                if part.numel()
            ]
