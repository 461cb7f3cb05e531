"""In which order blocks run, as the last forward showed it: what to fetch next, and what to publish first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dmuon.dedicated.block import Block
from dmuon.dedicated.buffer import OwnedBuffer

__all__ = ["ExecutionOrder"]


class ExecutionOrder:
    """Successors and predecessors of blocks; the order of the model until a forward has run."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = list(blocks)
        self._following = {id(a): b for a, b in zip(self._blocks, self._blocks[1:], strict=False)}
        self._preceding: dict[int, Block] = {}
        self._first = self._blocks[0] if self._blocks else None
        self._last: Block | None = None

    def restart(self) -> None:
        """The next block that runs does not follow the last one."""
        self._last = None

    def record(self, block: Block, *, first: bool) -> None:
        """``block`` runs forward now.

        Args:
            first: without a block before it, it is the first of the model.
        """
        if self._last is None:
            if first:
                self._first = block
        elif self._last is not block:
            self._following[id(self._last)] = block
            self._preceding[id(block)] = self._last
        self._last = block

    def after(self, block: Block) -> Block | None:
        """What ran after ``block`` in forward."""
        return self._following.get(id(block))

    def before(self, block: Block) -> Block | None:
        """What ran before ``block`` in forward, and comes after it in backward."""
        return self._preceding.get(id(block))

    def groups_from(self, block: Block | None, *, backward: bool = False) -> Iterator[OwnedBuffer]:
        """The groups that come after ``block``'s own, nearest first, each once."""
        step = self.before if backward else self.after
        seen = {id(block.group)} if block is not None else set()
        visited: set[int] = set()
        following = self._first if block is None else step(block)
        while following is not None and id(following) not in visited:
            visited.add(id(following))
            if id(following.group) not in seen:
                seen.add(id(following.group))
                yield following.group
            following = step(following)

    def groups(self) -> Iterator[OwnedBuffer]:
        """All groups that run, first to last."""
        return self.groups_from(None)
