"""From counts per rank to owners: spread each block over the ranks, and label these by the XOR layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .inputs import ClassKey, Matrix, Rank

_Kind = tuple[int, ClassKey]  # (-bytes, class): the largest sort first
_Ints = NDArray[np.int64]

_NEAR = 1000  # a result within one part in so many of the bound ends the search
_BUDGET = 5_000_000  # cells looked at per start; counted, not timed, so that the result repeats
_CALL = 4_000  # what a look costs beside its cells, in cells
_NO_CAP = 2**60
_STARTS = ("even", "share", "floor")


def spread_blocks(
    matrices: Sequence[Matrix], quota: Mapping[ClassKey, Sequence[int]], caps: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Name an owner for each matrix so that each rank owns exactly its quota of each class.

    A block's collective takes as long as its largest owner's bytes, so the sum of those over blocks is kept small.
    The blocks are filled in three ways. Each is improved by exchanges between two ranks in two blocks, and the best is
    taken. The order of ``matrices`` does not matter.

    Args:
        quota: ``quota[shape, pool][rank]``: matrices of that class that the rank must own. A rank that may not own a
            class has a quota of 0.
        caps: per block, the bytes that one rank may own; a block left out has no cap. The bytes above the caps are made
            small first, but some may remain: the caller sees them in ``block_bytes``.

    Returns:
        rank per matrix name, in the order of ``matrices``.

    Raises:
        ValueError: quotas that do not add up to the matrices of a class.
    """
    table = _tabulate(matrices, quota)
    above = np.array([(caps or {}).get(block, _NO_CAP) for block in table.blocks], dtype=np.int64)
    least, best, counts = _least(table), (_NO_CAP, _NO_CAP), table.quota[None]
    enough = (0, _bound(table, least) * (_NEAR + 1) // _NEAR)
    for value, candidate in (item for start in _STARTS for item in _improve(table, _fill(table, start), least, above)):
        if value < best:
            best, counts = value, candidate
        if best <= enough:
            break
    owners: dict[str, int] = {}
    ranks = np.arange(table.quota.shape[1])
    for cell, names in table.names.items():
        owners.update(zip(names, np.repeat(ranks, counts[cell]).tolist(), strict=True))
    return {m.name: owners[m.name] for m in matrices}


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The problem in counts. A kind is a class and a size in bytes; in one block its matrices are interchangeable.

    Attributes:
        blocks: names, sorted.
        sizes: bytes of a matrix per kind, ``(kinds,)``, largest first.
        demand: matrices per block and kind, ``(blocks, kinds)``.
        quota: matrices per kind and rank, ``(kinds, ranks)``.
        names: the matrices per (block, kind), sorted.
    """

    blocks: tuple[str, ...]
    sizes: _Ints
    demand: _Ints
    quota: _Ints
    names: Mapping[tuple[int, int], list[str]]


def _tabulate(matrices: Sequence[Matrix], quota: Mapping[ClassKey, Sequence[int]]) -> _Table:
    cells: dict[tuple[str, _Kind], list[str]] = {}
    for m in matrices:
        cells.setdefault((m.block, (-m.nbytes, m.key)), []).append(m.name)
    blocks = tuple(sorted({block for block, _ in cells}))
    kinds = sorted({kind for _, kind in cells})
    row, column = {block: i for i, block in enumerate(blocks)}, {kind: i for i, kind in enumerate(kinds)}
    names = {(row[block], column[kind]): sorted(members) for (block, kind), members in cells.items()}
    demand = np.zeros((len(blocks), len(kinds)), dtype=np.int64)
    for cell, alike in names.items():
        demand[cell] = len(alike)
    sizes, members = np.array([-kind[0] for kind in kinds], dtype=np.int64), demand.sum(axis=0)
    return _Table(blocks, sizes, demand, _quota_per_kind(kinds, members, quota), names)


def _quota_per_kind(kinds: Sequence[_Kind], members: _Ints, quota: Mapping[ClassKey, Sequence[int]]) -> _Ints:
    """Split each class's quota over its sizes, so that every rank gets its share of the class's bytes."""
    rows: list[_Ints] = [np.zeros(0, dtype=np.int64)] * len(kinds)
    for key in sorted({key for _, key in kinds}):
        places = [i for i, kind in enumerate(kinds) if kind[1] == key]
        left = np.array(quota.get(key, ()), dtype=np.int64)
        count = int(members[places].sum())
        if int(left.sum()) != count or (left < 0).any():
            raise ValueError(f"quota of class {key}: {left.sum()} matrices, but {count} are to be owned; plan again")
        size = sum(-kinds[i][0] * int(members[i]) for i in places)
        want = (left * (size / count)).astype(np.int64)
        for i in places:
            rows[i] = _pour(int(members[i]), -kinds[i][0], want, left)
            left, want = left - rows[i], want + rows[i] * kinds[i][0]
    return np.stack(rows)


def _fill(table: _Table, start: str) -> _Ints:
    """Counts ``(blocks, kinds, ranks)``: hand out each block, the largest matrices first.

    ``"even"``: to the rank with the fewest bytes of the block. ``"share"``: to the rank that lacks most of its share
    of the block's bytes, which is in proportion to what it has left to take. ``"floor"``: each rank first takes its
    whole share of each kind, rounded down.
    """
    left, members = table.quota.copy(), table.demand.sum(axis=0)
    counts = np.zeros((*table.demand.shape, left.shape[1]), dtype=np.int64)
    for demand, dealt in zip(table.demand, counts, strict=True):
        want = np.zeros(left.shape[1], dtype=np.int64)
        if start != "even":
            left_bytes = table.sizes @ left
            want = (left_bytes * (int(demand @ table.sizes) / int(left_bytes.sum()))).astype(np.int64)
        if start == "floor":
            dealt += demand[:, None] * left // np.maximum(members, 1)[:, None]
            want -= table.sizes @ dealt
        for k in np.flatnonzero(demand).tolist():
            more = _pour(int(demand[k] - dealt[k].sum()), int(table.sizes[k]), want, left[k] - dealt[k])
            dealt[k] += more
            want -= more * table.sizes[k]
        left -= dealt
        members = members - demand
    return counts


def _pour(count: int, size: int, want: _Ints, most: _Ints) -> _Ints:
    """Hand out ``count`` matrices of ``size`` bytes one by one to the rank that then wants most bytes, up to ``most``.

    Ties go to the rank that may take most, then to the lowest.
    """
    taken = np.zeros_like(most)
    if count > len(most):  # all at once down to a level of want that leaves few to hand out one by one
        low, high = int(want.min()) - size * (count + 1), int(want.max())
        while high - low > size:
            level = (low + high) // 2
            if int(np.clip((want - level) // size, 0, most).sum()) <= count:
                high = level
            else:
                low = level
        taken = np.clip((want - high) // size, 0, most)
        count -= int(taken.sum())
    while count:
        able = np.flatnonzero(taken < most)
        wants = want[able] - taken[able] * size
        order = np.lexsort((taken[able] - most[able], -wants))
        # Those within one matrix of the first each take one before any takes two.
        first = int(np.searchsorted(-wants[order], size - wants[order[0]]))
        chosen = able[order[: min(first, count)]]
        taken[chosen] += 1
        count -= len(chosen)
    return taken


def _bound(table: _Table, least: _Ints) -> int:
    """Every block has its least, and some rank carries the most bytes of all blocks."""
    return max(int(least.sum()), int((table.sizes @ table.quota).max()))


def _least(table: _Table) -> _Ints:
    """Per block, bytes that its largest owner cannot go below, ``(blocks,)``."""
    rows, inverse = np.unique(table.demand, axis=0, return_inverse=True)
    return np.array([_least_of(row, table) for row in rows], dtype=np.int64)[inverse.ravel()]


def _least_of(demand: _Ints, table: _Table) -> int:
    kinds = np.flatnonzero(demand)
    nbytes = table.sizes[kinds] @ table.quota[kinds]
    least = _level(nbytes, int(demand @ table.sizes))
    for k in kinds.tolist():
        least = max(least, int(table.sizes[k]) * _level(table.quota[k], int(demand[k])))
    # Of the j·R+1 largest matrices, some rank owns j+1: at least the j+1 smallest of them.
    sizes, ranks = np.repeat(table.sizes, demand), int((nbytes > 0).sum())
    for j in range(1, (len(sizes) - 1) // ranks + 1):
        least = max(least, int(sizes[j * ranks - j : j * ranks + 1].sum()))
    return least


def _level(most: _Ints, total: int) -> int:
    """The smallest level at which ranks that take up to ``most``, but no more than the level, take ``total``."""
    left = total
    for i, limit in enumerate(np.sort(most).tolist()):
        level = -(-left // (len(most) - i))
        if level <= limit:
            return level
        left -= limit
    raise AssertionError("quotas below the demand")


def _improve(table: _Table, counts: _Ints, least: _Ints, caps: _Ints) -> Iterator[tuple[tuple[int, int], _Ints]]:
    """Yield ``((bytes above caps, sum of largest owners' bytes), counts)`` of each local optimum on the way."""
    search = _Search(table, counts, caps)
    search.settle()
    yield search.value(caps), counts.copy()
    # If some rank's bytes exceed the sum of the blocks' least, the blocks must rise to hold them, each by its part.
    short = max(0, int((table.sizes @ table.quota).max()) - int(least.sum()))
    size = table.demand @ table.sizes
    search.targets = np.minimum(least + np.ceil(short / int(size.sum()) * size).astype(np.int64), caps)
    search.ceilings = caps
    while search.budget > 0:
        search.settle()
        yield search.value(caps), counts.copy()
        largest = search.loads.max(axis=1)
        over = largest > search.targets
        if not over.any():
            return
        # The cheapest block to give up on; the room that this makes in it may settle the others.
        block = int(np.where(over, largest - search.targets, 2 * _NO_CAP).argmin())
        search.targets[block] = largest[block]


class _Search:
    """Local search over ``counts``, in place: fewer bytes above the blocks' ``targets``, within ``ceilings``.

    In one step a rank gives ``u`` matrices of a kind in one block and takes as many of it, from the same other rank,
    in another block. Quotas stay as they are.
    """

    def __init__(self, table: _Table, counts: _Ints, targets: _Ints) -> None:
        self.sizes, self.counts, self.targets = table.sizes.tolist(), counts, targets
        self.loads: _Ints = np.einsum("k,bkr->br", table.sizes, counts)  # bytes per block and rank
        self.ceilings = np.full_like(targets, 2 * _NO_CAP)
        self.budget = _BUDGET

    def value(self, caps: _Ints) -> tuple[int, int]:
        """``(bytes above caps, sum of largest owners' bytes)``."""
        return int(np.maximum(self.loads - caps[:, None], 0).sum()), int(self.loads.max(axis=1).sum())

    def settle(self) -> None:
        """Step down from the cells most above target until no step helps or the budget is spent."""
        improved = True
        while improved and self.budget > 0:
            improved = False
            above = self.loads - self.targets[:, None]
            cells = np.argwhere(above > 0)
            for i in np.argsort(-above[above > 0], kind="stable").tolist():
                block, rank = cells[i].tolist()
                while self.loads[block, rank] > self.targets[block] and self.budget > 0 and self._step(block, rank):
                    improved = True

    def _step(self, block: int, rank: int) -> bool:
        """Take the best step that relieves ``rank`` in ``block``, if one lessens the bytes above target."""
        above = self.loads - self.targets[:, None]
        best, choice = 0, (0, 0, 0, 0)
        for kind in np.flatnonzero(self.counts[block, :, rank]).tolist():
            size = self.sizes[kind]
            many = min(int(self.counts[block, kind, rank]), max(1, int(above[block, rank]) // size))
            for units in sorted({1, many}):
                self.budget -= above.size + _CALL
                moved = units * size
                able = self.counts[:, kind] >= units
                able &= self.loads[block] + moved <= self.ceilings[block]
                able &= (self.loads[:, rank] + moved <= self.ceilings)[:, None]
                able[block] = able[:, rank] = False
                gain = _drop(above, -moved) + _drop(above[block], moved)
                gain += (_drop(above[:, rank], moved) + _drop(above[block, rank], -moved))[:, None]
                place = int(np.where(able, gain, 0).argmax())
                if able.flat[place] and gain.flat[place] > best:
                    best, choice = int(gain.flat[place]), (*divmod(place, above.shape[1]), kind, units)
        if not best:
            return False
        other, peer, kind, units = choice
        for b, r, change in ((block, rank, -units), (block, peer, units), (other, peer, -units), (other, rank, units)):
            self.counts[b, kind, r] += change
            self.loads[b, r] += change * self.sizes[kind]
        return True


def _drop(above: _Ints, change: int) -> _Ints:
    """By how much the bytes above target shrink where cells ``above`` change by so many bytes."""
    return np.asarray(np.maximum(above, 0) - np.maximum(above + change, 0), dtype=np.int64)


# -- labels ---------------------------------------------------------------------------------------------------------


def xor_labels(owners: Mapping[str, int], ranks: Sequence[Rank]) -> dict[str, int]:
    """The owners by their labels: owner ``k`` goes to node ``i = k mod N`` of ``N`` and to lane ``(k div N) XOR i``.

    A rank's lane is its position within its node: ranks of one lane share a rail of the network, ranks of one node its
    links. So owners that follow each other get other nodes and other rails.
    Where a node has no power of two of ranks, rotation by ``i`` replaces XOR. Relabelling moves whole ranks, and only
    interchangeable ranks, of equal speed, memory and pools, trade labels. On one node all labels stay.

    Args:
        ranks: in the order of their indices.

    Returns:
        rank per matrix name, in the order of ``owners``.
    """
    order = {node: i for i, node in enumerate(sorted({rank.node for rank in ranks}))}
    nodes = np.array([order[rank.node] for rank in ranks])
    lanes = np.empty_like(nodes)
    for node in order.values():
        members = np.flatnonzero(nodes == node)
        lanes[members] = np.arange(len(members))
    width = int(lanes.max()) + 1
    turn = lanes ^ (nodes % width) if width & (width - 1) == 0 else (lanes - nodes) % width
    step = np.lexsort((nodes, turn)).argsort()  # when a place is due
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, rank in enumerate(ranks):
        alike.setdefault((rank.speed, rank.memory, rank.pools), []).append(i)
    label = np.arange(len(ranks))
    for group in map(np.array, alike.values()):
        label[group] = group[step[group].argsort()]
    return {name: int(label[rank]) for name, rank in owners.items()}
