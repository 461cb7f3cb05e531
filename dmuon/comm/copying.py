"""Parts of matrices that several ranks have copies of: from the copy that the owner has part in, to the others.

The owner sends each part once, to the rank of its own copy that holds it. From there it goes on to those that hold the
same part in the other copies: they are a *line*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.comm.lines import Line, Parts, Works, gather, scratch
from dmuon.comm.process_groups import connect, make_group, named
from dmuon.layout.buffer import choose_transport, lay_spans
from dmuon.layout.parcels import Parcel, Spread
from dmuon.layout.topology import Position, Ranks, position_in
from dmuon.platform.torch_private import backend_of, default_group_is_bound


def connect_copies(domain: Domain, spreads: Iterable[Spread]) -> None:
    """Connect the lines of matrices that lie so. Collective over the domain, all ranks of which name the same ones.

    It need not be called for matrices without copies, or with full ones on all ranks, and does nothing for those that
    it was called for before.
    """
    by_lines: dict[tuple[tuple[Position, ...], ...], list[Spread]] = {}
    for spread in spreads:
        if 1 < spread.copies < domain.world and spread not in domain.lines:
            by_lines.setdefault(spread.lines, []).append(spread)
    known = {spread.lines: line for spread, line in domain.lines.items()}
    for lines, alike in sorted(by_lines.items()):
        line = known[lines] if lines in known else _connected(domain, lines)
        domain.lines |= dict.fromkeys(alike, line)


def _connected(domain: Domain, lines: Sequence[tuple[Position, ...]]) -> Line | None:
    """The one of ``lines`` that this rank is on, if it is."""
    partition = [Ranks(domain.ranks[position] for position in line) for line in lines]
    rank = domain.ranks[domain.position]
    own = next((ranks for ranks in partition if rank in ranks), None)
    if default_group_is_bound():  # then all ranks make all groups
        partition += [Ranks([other]) for other in sorted(set(domain.ranks).difference(*partition))]
    elif own is None:
        return None
    else:
        known = next((line for line in domain.lines.values() if line is not None and line.ranks == own), None)
        if known is not None:
            return known
    group = make_group(domain.device, partition, "copies", None)
    with named(f"first use of the process group of ranks {dist.get_process_group_ranks(group)}"):
        connect(group, domain.device, gathers=True)
    return None if own is None else Line(own, position_in(own, rank), group)


class Copies:
    """What goes on to other copies of batches that travel together; for any number of times.

    Args:
        parcels: of the batches, whose spreads :func:`connect_copies` was told of.

    Attributes:
        needed: some rank of the domain has something to send or to get.
        loads: of this rank, one for each line.
    """

    def __init__(self, parcels: Sequence[Parcel], domain: Domain) -> None:
        self.domain = domain
        self.needed = any(parcel.spread.copies > 1 for parcel in parcels)
        whole = Line(domain.ranks, domain.position, domain.group)
        found: dict[Line, dict[Position, dict[int, torch.Size]]] = {}
        for number, parcel in enumerate(parcels):
            spread, position = parcel.spread, domain.position
            if spread.copies == 1 or position not in spread.parts:
                continue
            line = domain.lines[spread] if spread.copies < domain.world else whole
            assert line is not None, "a rank with a part is on a line"
            source = position_in(line.ranks, domain.ranks[spread.source(position, parcel.owner)])
            shape = torch.Size((parcel.count, *spread.parts[position].shape))
            found.setdefault(line, {}).setdefault(source, {})[number] = shape
        lines = sorted(found, key=lambda line: line.ranks)
        self.loads = [_LineLoad(line, found[line], domain.device) for line in lines]


class _LineLoad:
    """What goes over one line, and from which of its ranks.

    Args:
        shapes: by position on the line of the rank that has them, and by number of the batch.

    Attributes:
        transport, spans: of the parts of all batches.
    """

    def __init__(self, line: Line, shapes: Mapping[Position, Mapping[int, torch.Size]], device: torch.device) -> None:
        self.line = line
        self.shapes = shapes
        sizes = {int(source): sum(shape.numel() for shape in some.values()) for source, some in shapes.items()}
        self.transport = choose_transport("auto", sizes, len(line.ranks), backend_of(line.group, device))
        self.spans = lay_spans(self.transport, sizes, len(line.ranks))

    @property
    def calls(self) -> int:
        """Collectives."""
        return 1 if self.transport == "single" else len(self.spans.filled)

    @property
    def numel(self) -> int:
        """Elements of all parts, with padding where it travels."""
        return self.spans.size

    @property
    def numel_out(self) -> int:
        """The same of this rank's own."""
        start, end = self.spans[self.line.position]
        return end - start

    def region(self, updates: dict[int, Tensor], like: Tensor) -> tuple[Tensor, Parts]:
        """Memory for all parts, of which this rank's own have their content; they are taken out of ``updates``."""
        region, parts = scratch(self.transport, self.spans, like.dtype, like.device)
        slots = self._slots(parts, self.line.position)
        if slots:
            torch._foreach_copy_([*slots.values()], [updates.pop(number) for number in slots])
        if self.transport == "single":  # checks of what is sent would take its padding for weights
            parts[self.line.position][sum(map(torch.numel, slots.values())) :].zero_()
        return region, parts

    def unpacked(self, parts: Parts) -> dict[int, Tensor]:
        """By number of the batch, what all of them have."""
        return {number: slot for source in self.shapes for number, slot in self._slots(parts, source).items()}

    def _slots(self, parts: Parts, source: Position) -> dict[int, Tensor]:
        slots: dict[int, Tensor] = {}
        begin = 0
        for number, shape in self.shapes.get(source, {}).items():
            slots[number] = parts[source][begin : begin + shape.numel()].view(shape)
            begin += shape.numel()
        return slots


class Copying:
    """Updates on their way to other copies. Collective over the domain, in one order on all ranks.

    Args:
        updates: by number of the batch, what this rank has got of its own copy; they are taken out.
        like: has the dtype and device of what travels.
        what: names it, the same on all ranks.
    """

    def __init__(self, copies: Copies, updates: dict[int, Tensor], like: Tensor, what: str) -> None:
        self._loads = copies.loads
        self._rest = updates  # of batches without copies
        self._packed = [load.region(updates, like) for load in self._loads]

        def launch() -> Works:
            pairs = zip(self._loads, self._packed, strict=True)
            return [
                work for load, (region, parts) in pairs for work in gather(load.transport, region, parts, load.line)
            ]

        domain = copies.domain
        self._pending = domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> dict[int, Tensor]:
        """By number of the batch, ``(count, …)`` of this rank's parts of all copies."""
        self._pending.wait()
        updates, self._rest = self._rest, {}
        for load, (_, parts) in zip(self._loads, self._packed, strict=True):
            updates |= load.unpacked(parts)
        self._packed = []
        return dict(sorted(updates.items()))
