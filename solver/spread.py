"""From counts per rank to owners: spread each block over the ranks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from .problem import Counts, Problem
from .types import Matrix, Shape

__all__ = ["block_bytes", "spread_blocks"]

_SWAP_BUDGET = 400_000  # pairs looked at; counted, not timed, so that the result repeats


def spread_blocks(problem: Problem, matrices: Sequence[Matrix], counts: Counts) -> dict[str, int]:
    """Name an owner for each matrix without changing ``counts``.

    A block's collective takes as long as its largest owner's bytes, so the sum of those over blocks is kept small;
    ties go to the rank with the most of its class left to take, then with the fewest bytes, then to the lowest rank.

    Returns:
        rank per matrix name, in the order of ``matrices``.
    """
    quota = {shape: counts[:, s].tolist() for s, shape in enumerate(problem.shapes)}
    held = [0] * problem.ranks
    owners: dict[str, int] = {}
    for members in _by_block(matrices).values():
        block_held = [0] * problem.ranks
        for group in _alike(members):
            _hand_out(group, quota[group[0].shape], block_held, held, owners)
    _swap(matrices, owners)
    return {m.name: owners[m.name] for m in matrices}


def block_bytes(matrices: Sequence[Matrix], owners: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Bytes per owner of each block."""
    table: dict[str, dict[int, int]] = {}
    for m in matrices:
        row = table.setdefault(m.block, {})
        row[owners[m.name]] = row.get(owners[m.name], 0) + m.nbytes
    return table


def _by_block(matrices: Sequence[Matrix]) -> dict[str, list[Matrix]]:
    blocks: dict[str, list[Matrix]] = {}
    for m in matrices:
        blocks.setdefault(m.block, []).append(m)
    return blocks


def _alike(members: Sequence[Matrix]) -> list[list[Matrix]]:
    """Groups of one shape and size, largest first: what is large must go while all owners are still empty."""
    groups: dict[tuple[int, Shape], list[Matrix]] = {}
    for m in members:
        groups.setdefault((-m.nbytes, m.shape), []).append(m)
    return [groups[key] for key in sorted(groups)]


def _hand_out(
    group: Sequence[Matrix], quota: list[int], block_held: list[int], held: list[int], owners: dict[str, int]
) -> None:
    """Give each matrix of ``group`` to the rank with quota left that then has the fewest bytes of the block."""
    heap = [(block_held[rank], -left, held[rank], rank) for rank, left in enumerate(quota) if left]
    heapq.heapify(heap)
    for m in group:
        *_, rank = heapq.heappop(heap)
        owners[m.name] = rank
        quota[rank] -= 1
        block_held[rank] += m.nbytes
        held[rank] += m.nbytes
        if quota[rank]:
            heapq.heappush(heap, (block_held[rank], -quota[rank], held[rank], rank))


def _swap(matrices: Sequence[Matrix], owners: dict[str, int]) -> None:
    """Swap the owners of two matrices of one shape and size while that shortens the blocks' collectives.

    Such a swap leaves the counts and the bytes of both ranks as they were.
    """
    blocks = _by_block(matrices)
    table = block_bytes(matrices, owners)
    peers: dict[tuple[Shape, int], list[Matrix]] = {}
    for m in matrices:
        peers.setdefault((m.shape, m.nbytes), []).append(m)
    budget = _SWAP_BUDGET
    improved = True
    while improved and budget > 0:
        improved = False
        for name, members in blocks.items():
            worst = max(table[name].values())
            for m in members:
                if table[name][owners[m.name]] < worst or worst == m.nbytes:
                    continue
                for other in peers[m.shape, m.nbytes]:
                    budget -= 1
                    if _swap_gain(table, owners, m, other) > 0:
                        _exchange(table, owners, m, other)
                        worst, improved = max(table[name].values()), True
                        break
                if budget <= 0:
                    return


def _swap_gain(table: dict[str, dict[int, int]], owners: dict[str, int], m: Matrix, other: Matrix) -> int:
    """Bytes by which the blocks' largest owners shrink when ``m`` and ``other`` trade owners."""
    mine, theirs = owners[m.name], owners[other.name]
    if m.block == other.block or mine == theirs:
        return 0
    here = table[m.block]
    # Most candidates fail here: their owner has too much of this block already. The full sums are for the rest.
    if here.get(theirs, 0) + m.nbytes >= here[mine]:
        return 0
    before = max(here.values()) + max(table[other.block].values())
    _exchange(table, owners, m, other)
    after = max(table[m.block].values()) + max(table[other.block].values())
    _exchange(table, owners, m, other)
    return before - after


def _exchange(table: dict[str, dict[int, int]], owners: dict[str, int], m: Matrix, other: Matrix) -> None:
    mine, theirs = owners[m.name], owners[other.name]
    for block, loser, winner in ((m.block, mine, theirs), (other.block, theirs, mine)):
        table[block][loser] -= m.nbytes
        table[block][winner] = table[block].get(winner, 0) + m.nbytes
    owners[m.name], owners[other.name] = theirs, mine
