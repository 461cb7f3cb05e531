"""Ranks that have copies of the same parts: what a vote says of their gradients, which must be there on all or on none.

A matrix is gathered from one copy, that of its owner. A gradient that only another copy has would be dropped, and
momentum that only some copies decay would no longer be the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from dmuon.layout.topology import Position

_NOTHING = -(2**31)  # of lines that a rank is not on; least of all int32

Copies = tuple[Position, ...]  # positions in the domain of the ranks that have the same part, one of each copy


class CopiesVote:
    """Of one domain. Of each line of copies a digest of who has which gradients, and its negative.

    Args:
        position: of this rank in the domain.
        params: by the ranks that have the same part of them, on all lines of the domain.
    """

    def __init__(self, position: Position, params: Mapping[Copies, Sequence[Tensor]]) -> None:
        self.lines = sorted(params)
        self._ids = [[*map(id, params[line])] for line in self.lines]
        self._own = [number for number, line in enumerate(self.lines) if position in line]

    def __len__(self) -> int:
        return 2 * len(self.lines)

    def numbers(self, present: Collection[int]) -> list[int]:
        """What this rank adds to its vote.

        Args:
            present: ``id`` of each parameter that has a gradient here.
        """
        said = [_NOTHING] * len(self)
        for number in self._own:
            digest = zlib.crc32(self._flags(number, present)) & 0x7FFFFFFF
            said[2 * number : 2 * number + 2] = digest, -digest
        return said

    def differing(self, maxima: Sequence[int]) -> int | None:
        """Number of the first line on which copies differ, by the largest of what all ranks said; None without."""
        pairs = zip(maxima[::2], maxima[1::2], strict=True)
        return next((i for i, (greatest, least) in enumerate(pairs) if greatest not in (-least, _NOTHING)), None)

    def told(self, number: int, present: Collection[int]) -> bytes | None:
        """What a rank on that line tells the others; None elsewhere."""
        return self._flags(number, present) if number in self._own else None

    def first(self, number: int, of_ranks: Sequence[bytes | None]) -> tuple[int, Position, Position]:
        """``id`` of a parameter that differs, a position that has no gradient of it, and one that has.

        Args:
            of_ranks: what all have :meth:`told`.
        """
        told = {position: flags for position in self.lines[number] if (flags := of_ranks[position]) is not None}
        line = list(told)
        for key, *said in zip(self._ids[number], *told.values(), strict=True):
            if min(said) != max(said):
                return key, line[said.index(0)], line[said.index(1)]
        raise AssertionError("digests differ, and flags do not")

    def _flags(self, number: int, present: Collection[int]) -> bytes:
        return bytes(key in present for key in self._ids[number])
