"""Parts of one region that the ranks of a line gather from each other, or reduce to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.layout.buffer import Spans, Transport
from dmuon.layout.topology import GlobalRank, Position
from dmuon.platform.torch_private import all_gather_single, in_one_launch, reduce_scatter_single

Works = list[dist.Work | None]  # of collectives that were started; None of none


@dataclass(frozen=True, slots=True)
class Line:
    """Ranks that hold parts of regions, and a process group of dmuon's own over them.

    Attributes:
        ranks: by position on the line.
        position: of this rank.
    """

    ranks: tuple[GlobalRank, ...]
    position: Position
    group: dist.ProcessGroup


Parts = Mapping[int, Tensor]  # of a region, by position on a line; those that are not empty


def scratch(transport: Transport, spans: Spans, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Parts]:
    """Memory for a reduction: the region and its parts, which are views of it where they travel together.

    Separate ones can be freed one by one; the region is nothing then.
    """
    if transport == "broadcast":
        region = torch.empty(0, dtype=dtype, device=device)
        return region, {i: region.new_empty(end - start) for i, (start, end) in spans.filled.items()}
    region = torch.empty(spans.size, dtype=dtype, device=device)
    return region, {i: region[start - spans.start : end - spans.start] for i, (start, end) in spans.filled.items()}


def gather(transport: Transport, region: Tensor, parts: Parts, line: Line) -> Works:
    """Start filling every part from the rank at its position on ``line``; this rank's own part holds its content.

    Args:
        region: 1-D, all parts in order.
        parts: views of it.
    """
    if transport == "single":
        own = parts.get(line.position, region[:0])
        return [all_gather_single(region, own, group=line.group, async_op=True)]
    launches = [
        partial(dist.broadcast, part, src=line.ranks[position], group=line.group, async_op=True)
        for position, part in parts.items()
    ]
    return in_one_launch(line.group, region.device, launches)


def reduce(transport: Transport, region: Tensor, parts: Parts, line: Line) -> tuple[Tensor, Works]:
    """Start averaging every part to the rank at its position on ``line``; the other parts are garbage then.

    Returns:
        Where this rank's own part arrives, and the works.
    """
    average = dist.ReduceOp.AVG
    own = parts.get(line.position, region[:0])
    if transport == "single":
        result = torch.empty_like(own)  # which outlives the region
        work = reduce_scatter_single(result, region, op=average, group=line.group, async_op=True)
        return result, [work]
    launches = [
        partial(dist.reduce, part, line.ranks[position], average, group=line.group, async_op=True)
        for position, part in parts.items()
    ]
    return own, in_one_launch(line.group, region.device, launches)
