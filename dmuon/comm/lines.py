"""Parts of one region that the ranks of a line gather from each other, or reduce to each other.

A line over several nodes may do so in two legs: along *rails*, which are the ranks with one place in their nodes, and
within nodes. A message then goes around a rail and a node in place of the whole line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.monitor import Interrupted, run_all
from dmuon.layout.buffer import Spans, Transport
from dmuon.layout.topology import GlobalRank, NodeGrid, Position, position_in
from dmuon.platform.torch_private import all_gather_single, in_one_launch, reduce_scatter_single

Works = list[dist.Work | None]  # of collectives that were started; None of none


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of the way that parts take along a line.

    Attributes:
        group: whose ranks communicate.
        ends: by position on the line, for the parts that take this leg, where it begins if they are gathered, and ends
            if they are reduced; None if all do, from and to the ranks of the line.
        share: which one, of how many equal ones, holds these parts in a region of padded parts.
    """

    group: dist.ProcessGroup
    ends: Mapping[int, GlobalRank] | None = None
    share: tuple[int, int] = (0, 1)

    def end(self, position: int, line: Line) -> GlobalRank | None:
        """Of the part of a position; None if it does not take this leg."""
        return line.ranks[position] if self.ends is None else self.ends.get(position)

    def of(self, region: Tensor) -> Tensor:
        """What takes this leg of a region of padded parts."""
        number, count = self.share
        size = region.numel() // count
        return region[number * size : (number + 1) * size]


@dataclass(frozen=True, slots=True)
class Line:
    """Ranks that hold parts of regions, and a process group of dmuon's own over them.

    Attributes:
        ranks: by position on the line.
        position: of this rank.
        group: over all of them.
        levels: along this rank's rail, and within its node; None if parts take one leg over the whole line.
        order: of positions in a region of padded parts, where it is not ascending: rail by rail.
    """

    ranks: tuple[GlobalRank, ...]
    position: Position
    group: dist.ProcessGroup
    levels: tuple[Leg, Leg] | None = field(default=None, hash=False)
    order: tuple[Position, ...] | None = None

    @property
    def legs(self) -> tuple[Leg, ...]:
        """In the order in which parts take them when they are gathered."""
        return (Leg(self.group),) if self.levels is None else self.levels

    @property
    def firsts(self) -> tuple[Position, ...]:
        """Ascending, one position on each rail: what they send passes all of them. Of a line of one leg one."""
        if self.levels is None or self.order is None:
            return (Position(0),)
        return tuple(sorted(self.order[:: self.levels[0].group.size()]))


def line_in_levels(
    ranks: tuple[GlobalRank, ...],
    position: Position,
    grid: NodeGrid,
    group: dist.ProcessGroup,
    along_rail: dist.ProcessGroup,
    within_node: dist.ProcessGroup,
) -> Line:
    """A line whose parts take two legs.

    Args:
        group, along_rail, within_node: over the line, and over this rank's rail and node.
    """
    rail, node = grid.rail_of(ranks[position]), grid.node_of(ranks[position])
    place = grid.rails.index(rail)
    on_rail: dict[int, GlobalRank] = {position_in(ranks, rank): rank for rank in rail}
    arrived = {rank: here for others, here in zip(grid.rails, node, strict=True) for rank in others}
    legs = (
        Leg(along_rail, on_rail, (place, len(node))),
        Leg(within_node, {i: arrived[rank] for i, rank in enumerate(ranks)}),
    )
    order = tuple(position_in(ranks, rank) for others in grid.rails for rank in others)
    return Line(ranks, position, group, legs, order)


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
    works: Works = []
    here = _own(region, parts, line)
    for leg in line.legs:
        with _behind(works):
            match transport:
                case "single":
                    whole = leg.of(region)
                    works.append(all_gather_single(whole, here, group=leg.group, async_op=True))
                    here = whole
                case _:
                    launches = [
                        partial(dist.broadcast, part, src=source, group=leg.group, async_op=True)
                        for position, part in parts.items()
                        if (source := leg.end(position, line)) is not None
                    ]
                    works += in_one_launch(leg.group, region.device, launches)
    return works


@contextmanager
def _behind(works: Works) -> Iterator[None]:
    """What starts in here runs after ``works``.

    Raises:
        Interrupted: something failed while ``works`` are under way.
    """
    started = [work for work in works if work is not None]
    try:
        _queue_behind(started)
        yield
    except Exception as error:
        if not started:
            raise
        raise Interrupted(started) from error


def _queue_behind(works: Sequence[dist.Work]) -> None:
    """What starts from now on runs after ``works``; the host waits where a device has no streams."""
    run_all(work.wait for work in works)


def _own(region: Tensor, parts: Parts, line: Line) -> Tensor:
    """This rank's part."""
    return parts[line.position] if line.position in parts else region[:0]


def reduce(transport: Transport, region: Tensor, parts: Parts, line: Line) -> tuple[Tensor, Works]:
    """Start averaging every part to the rank at its position on ``line``; the other parts are garbage then.

    Returns:
        Where this rank's own part arrives, and the works.
    """
    average = dist.ReduceOp.AVG
    works: Works = []
    result = own = _own(region, parts, line)
    legs = line.legs[::-1]
    for number, leg in enumerate(legs, 1):
        with _behind(works):
            match transport:
                case "single":
                    # In place but for the last, which outlives the region.
                    result = legs[number].of(region) if number < len(legs) else torch.empty_like(own)
                    reduced = reduce_scatter_single(result, leg.of(region), op=average, group=leg.group, async_op=True)
                    works.append(reduced)
                case _:
                    launches = [
                        partial(dist.reduce, part, target, average, group=leg.group, async_op=True)
                        for position, part in parts.items()
                        if (target := leg.end(position, line)) is not None
                    ]
                    works += in_one_launch(leg.group, region.device, launches)
    return result, works
