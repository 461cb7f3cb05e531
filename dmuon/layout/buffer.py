"""Where the matrices of one flat buffer lie, owner by owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Transport = Literal["auto", "broadcast", "single"]


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Offsets in elements; the weights of a buffer and their gradients share it.

    Attributes:
        row, column: how segments travel along a row, and parts of a segment along a column.
        slots: ``[start, end)`` of each matrix, in the order given.
        segments: ``[start, end)`` per shard.
        parts: ``[start, end)`` per shard and replica.
        size: of the whole.
    """

    row: Transport
    column: Transport
    slots: tuple[tuple[int, int], ...]
    segments: tuple[tuple[int, int], ...]
    parts: tuple[tuple[tuple[int, int], ...], ...]
    size: int


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

    sizes = [[0] * replicas for _ in range(shards)]
    inside: list[int] = []  # of the part
    for r, s, numel in matrices:
        inside.append(sizes[s][r])
        sizes[s][r] += rounded(numel)
    column = choose_column(wanted, sizes, backend, resident)
    within = [part_offsets(column, of_shard) for of_shard in sizes]
    lengths = [offsets[-1] for offsets in within]
    row = choose_transport(wanted, lengths, backend) if shards > 1 else "broadcast"
    starts = part_offsets(row, lengths)
    parts = tuple(
        tuple((starts[s] + within[s][r], starts[s] + within[s][r + 1]) for r in range(replicas)) for s in range(shards)
    )
    slots = tuple(
        (parts[s][r][0] + offset, parts[s][r][0] + offset + numel)
        for (r, s, numel), offset in zip(matrices, inside, strict=True)
    )
    segments = tuple((starts[s], starts[s + 1]) for s in range(shards))
    return BufferLayout(row, column, slots, segments, parts, starts[-1])


def choose_column(wanted: Transport, sizes: Sequence[Sequence[int]], backend: str, resident: bool) -> Transport:
    """One transport for all columns: the rule's for the column that would be padded most."""
    if len(sizes[0]) == 1 or not resident:
        return "broadcast"
    kinds = {choose_transport(wanted, of_shard, backend) for of_shard in sizes}
    return kinds.pop() if len(kinds) == 1 else "broadcast"


_MOST_PADDING = 1.15  # of a padded region over its content


def choose_transport(wanted: Transport, sizes: Sequence[int], backend: str) -> Transport:
    """How parts of ``sizes`` elements travel: by rule for ``"auto"``, else as wanted."""
    if wanted != "auto":
        return wanted
    if backend != "nccl":
        return "broadcast"  # on gloo a step with padded parts took 5 % longer (bench/step.py --programs sweep)
    content = sum(sizes)
    return "single" if content and max(sizes) * len(sizes) <= _MOST_PADDING * content else "broadcast"


def part_offsets(transport: Transport, sizes: Sequence[int]) -> list[int]:
    """Where each part starts, and behind the last one where the region ends."""
    padded = [max(sizes)] * len(sizes) if transport == "single" else list(sizes)
    offsets = [0]
    for size in padded:
        offsets.append(offsets[-1] + size)
    return offsets
