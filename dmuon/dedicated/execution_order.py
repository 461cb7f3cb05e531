"""In which order blocks run, as the last forward showed it: what to fetch next, and what to publish first."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

__all__ = ["ExecutionOrder"]

_Block = TypeVar("_Block", bound=Hashable)


class ExecutionOrder(Generic[_Block]):
    """Successors and predecessors of blocks; the order of the model until a forward has run."""

    def __init__(self, blocks: Sequence[_Block]) -> None:
        self._first = blocks[0] if blocks else None
        self._following = dict(pairwise(blocks))
        self._preceding: dict[_Block, _Block] = {}
        self._last: _Block | None = None

    def restart(self) -> None:
        """The next block that runs does not follow the last one."""
        self._last = None

    def record(self, block: _Block, *, first: bool) -> None:
        """``block`` runs forward now.

        Args:
            first: without a block before it, it is the first of the model.
        """
        if self._last is None:
            if first:
                self._first = block
        elif self._last is not block:
            self._following[self._last] = block
            self._preceding[block] = self._last
        self._last = block

    def after(self, block: _Block) -> _Block | None:
        """What ran after ``block`` in forward."""
        return self._following.get(block)

    def before(self, block: _Block) -> _Block | None:
        """What ran before ``block`` in forward, and comes after it in backward."""
        return self._preceding.get(block)

    def walk(self, block: _Block | None = None, *, backward: bool = False) -> Iterator[_Block]:
        """``block`` (by default the first one) and what comes after it in forward or backward, each once."""
        links = self._preceding if backward else self._following
        block = self._first if block is None else block
        visited: set[_Block] = set()
        while block is not None and block not in visited:
            visited.add(block)
            yield block
            block = links.get(block)
