"""Where the matrices of one flat buffer lie, owner by owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Transport = Literal["auto", "broadcast", "single"]
Span = tuple[int, int]  # half-open [start, end) of elements


@dataclass(frozen=True, slots=True)
class Spans:
    """Neighbouring parts of a flat region, by position on a line of ranks. Of thousands only a few may be filled.

    Attributes:
        length: number of parts.
        start: of the first.
        filled: those that are not empty, ascending.
    """

    length: int
    start: int
    filled: Mapping[int, Span]

    @property
    def end(self) -> int:
        """Of the last one."""
        return max((end for _, end in self.filled.values()), default=self.start)

    @property
    def size(self) -> int:
        return self.end - self.start

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Span]:
        return map(self.__getitem__, range(self.length))

    def __getitem__(self, position: int) -> Span:
        position = range(self.length)[position]
        before = [end for at, (_, end) in self.filled.items() if at < position]
        empty = before[-1] if before else self.start
        return self.filled.get(position, (empty, empty))


def lay_spans(transport: Transport, sizes: Mapping[int, int], count: int, start: int = 0) -> Spans:
    """Parts of ``sizes`` elements, by position among ``count``; padded to one size if they travel together."""
    if transport == "single":
        width = max(sizes.values(), default=0)
        starts = range(start, start + count * width, max(1, width))
        return Spans(count, start, {i: (a, a + width) for i, a in zip(range(count), starts, strict=False)})
    filled, end = {}, start
    for position in sorted(sizes):
        if sizes[position]:
            filled[position] = (end, end + sizes[position])
            end += sizes[position]
    return Spans(count, start, filled)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Offsets in elements; the weights of a buffer and their gradients share it.

    Attributes:
        row, column: how segments travel along a row, and parts of a segment along a column.
        replicas: parts of a segment.
        slots: of each matrix, in the order given.
        segments: by shard.
        filled_parts: by shard with any, the parts of its segment, by replica.
    """

    row: Transport
    column: Transport
    replicas: int
    slots: tuple[Span, ...]
    segments: Spans
    filled_parts: Mapping[int, Spans]

    @property
    def size(self) -> int:
        """Of the whole."""
        return self.segments.end

    def parts(self, shard: int) -> Spans:
        """Of a segment, by replica; without its padding."""
        return self.filled_parts.get(shard) or Spans(self.replicas, self.segments[shard][0], {})


def make_layout(
    matrices: Sequence[tuple[int, int, int]],
    replicas: int,
    shards: int,
    *,
    wanted: Transport,
    backend: str,
    resident: bool,
    align: int,
) -> BufferLayout:
    """Lay out matrices given as ``(replica of the owner, its shard, elements)``.

    Args:
        resident: whole weights stay in memory, so that a column can gather into them in place; without, each part
            travels by a broadcast of its own.
        align: elements to a multiple of which every slot starts.
    """

    def rounded(size: int) -> int:
        return -(-size // align) * align

    sizes: dict[int, dict[int, int]] = {}  # by shard and replica, of those that own something
    inside: list[int] = []  # of the part
    for r, s, numel in matrices:
        of_shard = sizes.setdefault(s, {})
        inside.append(of_shard.get(r, 0))
        of_shard[r] = of_shard.get(r, 0) + rounded(numel)
    column: Transport = "broadcast"
    if replicas > 1 and resident:  # all columns take the transport of the one that would be padded most
        columns = [*sizes.values(), *([{}] if len(sizes) < shards else [])]
        kinds = {choose_transport(wanted, of_shard, replicas, backend) for of_shard in columns}
        column = kinds.pop() if len(kinds) == 1 else "broadcast"
    lengths = {s: lay_spans(column, of_shard, replicas).size for s, of_shard in sizes.items()}
    row = choose_transport(wanted, lengths, shards, backend) if shards > 1 else "broadcast"
    segments = lay_spans(row, lengths, shards)
    parts = {s: lay_spans(column, of_shard, replicas, segments[s][0]) for s, of_shard in sizes.items()}
    slots = tuple(
        (parts[s][r][0] + offset, parts[s][r][0] + offset + numel)
        for (r, s, numel), offset in zip(matrices, inside, strict=True)
    )
    return BufferLayout(row, column, replicas, slots, segments, parts)


_MOST_PADDING = 1.15  # of a padded region over its content


def choose_transport(wanted: Transport, sizes: Mapping[int, int], count: int, backend: str) -> Transport:
    """How ``count`` parts of ``sizes`` elements by position travel: by rule for ``"auto"``, else as wanted."""
    if wanted != "auto":
        return wanted
    if backend != "nccl":
        return "broadcast"  # on gloo a step with padded parts took 5 % longer (bench/step.py --programs sweep)
    content = sum(sizes.values())
    return "single" if content and max(sizes.values()) * count <= _MOST_PADDING * content else "broadcast"
