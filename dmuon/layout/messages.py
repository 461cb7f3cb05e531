"""The table of what travels in a step: a row for each message, from the layout alone, and of no matter what holds it.

What tells how much a model or an optimizer sends sums rows of this table; predictions for machines that are not there
(``dmuon.tools.simulation``) have sums of their own. docs/communication.md says the same in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from dmuon.layout.buffer import Transport
from dmuon.layout.matrices import Parcel
from dmuon.layout.topology import Position

Purpose = Literal["fill", "publish", "reduce", "gather", "scatter", "copy", "sum"]
Group = Literal["shard group", "replicate group", "domain", "team"]


class Message(NamedTuple):
    """What one rank sends to another one, or to and from all of a group.

    Attributes:
        purpose: owners' weights to their shard group ("fill") and to replicas ("publish"), gradients to owners
            ("reduce"); momentum to whom orthogonalizes ("gather"), parts of the update back ("scatter"), and these on
            from an owner to replicas ("copy"); Gram matrices of slices ("sum").
        group: whose positions the next two are.
        source, destination: None stands for all of the group.
        nbytes: of the tensor that is sent; where all send, of all of them.
        calls: collectives that carry this alone. What many messages share is a row without bytes.
    """

    purpose: Purpose
    group: Group
    source: Position | None
    destination: Position | None
    nbytes: int
    calls: int = 0


def region_messages(
    purpose: Purpose, group: Group, transport: Transport, sizes: Mapping[int, int], itemsize: int, times: int
) -> Iterator[Message]:
    """What owners send of a flat region, or get of its gradients, so many ``times`` in a step.

    Args:
        sizes: elements by position of the owner in the group, with padding.
    """
    if transport == "single":
        yield Message(purpose, group, None, None, times * sum(sizes.values()) * itemsize, times)
        return
    for position, size in sizes.items():
        owner = Position(position)
        source, destination = (None, owner) if purpose == "reduce" else (owner, None)
        yield Message(purpose, group, source, destination, times * size * itemsize, times)


def parcel_messages(parcel: Parcel, position: Position, before: int, after: int) -> Iterator[Message]:
    """What the rank at ``position`` sends and gets of the momentum and the update of a parcel.

    Args:
        before, after: bytes of an element on its way to the owner, and back.
    """
    ways: tuple[tuple[Purpose, int], ...] = (("gather", before), ("scatter", after))
    for (purpose, itemsize), route in zip(ways, parcel.routes(position), strict=True):
        for to, numel in route.numel_out(position).items():
            yield Message(purpose, "domain", position, to, numel * itemsize)
        for of, numel in route.numel_in(position).items():
            yield Message(purpose, "domain", of, position, numel * itemsize)
    if parcel.has_owner and parcel.spread.copies > 1 and position in parcel.spread.parts:
        source = parcel.spread.source(position, parcel.owner)
        destination = None if source == position else position
        nbytes = parcel.count * parcel.spread.parts[position].numel * after
        yield Message("copy", "domain", source, destination, nbytes)
