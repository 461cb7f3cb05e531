"""Which rank bears which label: spread blocks over nodes and lanes.

A rank's lane is its position within its node: GPU 0 … 7. Ranks of one lane share a rail of the network, ranks of one
node share its links, and on a mesh of nodes × GPUs they share a communicator of a column or a row. Relabelling moves
whole ranks, so what a rank owns stays together, and two blocks that share an owner go on sharing one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .inputs import Matrix, Rank

_Ints = NDArray[np.int64]

_BUDGET = 24_000_000  # cells of traffic looked at; counted, not timed, so that the result repeats
_CALL = 10_000  # what a batch costs however few its cells, in cells
_BATCH = 100_000  # cells per batch of swaps
_STRIDE = 7919  # a prime: partners differ from batch to batch, and all have their turn


def link_cost(matrices: Sequence[Matrix], owners: Mapping[str, int], ranks: Sequence[Rank]) -> int:
    """Bytes that wait for one another.

    For every block, and for every two blocks that follow each other, the node and the lane that own most of their bytes
    are found; the cost is the sum of all these bytes. Blocks come in the natural order of their names.

    Args:
        ranks: in the order of their indices.
    """
    rows = _rows(matrices, owners, len(ranks))
    return _cost(rows, np.arange(len(ranks)), _grid(ranks))


def relabel(matrices: Sequence[Matrix], owners: Mapping[str, int], ranks: Sequence[Rank]) -> dict[str, int]:
    """Permute the labels of interchangeable ranks so that ``link_cost`` is small.

    Interchangeable are ranks of equal speed, memory and pools. Takes the best of the labels as they are, of
    ``xor_labels``, and of placing ranks one by one, then swaps pairs. If nothing is gained, the labels stay.

    Args:
        ranks: in the order of their indices.

    Returns:
        rank per matrix name, in the order of ``owners``.
    """
    rows, grid, peers = _rows(matrices, owners, len(ranks)), _grid(ranks), _peers(ranks)
    starts = [np.arange(len(ranks)), _xor_order(ranks), _place(rows, grid, peers)]
    label = min(starts, key=lambda start: _cost(rows, start, grid))
    _swap(rows, label, grid, peers)
    return {name: int(label[rank]) for name, rank in owners.items()}


def xor_labels(owners: Mapping[str, int], ranks: Sequence[Rank]) -> dict[str, int]:
    """The XOR rule over the mesh of nodes × GPUs, for comparison: consecutive owners lie on other nodes and lanes.

    Owner ``k`` goes to node ``i = k mod N`` of ``N`` and to lane ``(k div N) XOR i``. Rotation replaces XOR where the
    lanes are not a power of two. Only interchangeable ranks trade labels.
    """
    label = _xor_order(ranks)
    return {name: int(label[rank]) for name, rank in owners.items()}


def _grid(ranks: Sequence[Rank]) -> tuple[_Ints, _Ints]:
    """Node and lane per rank, both counted from 0."""
    order = {node: i for i, node in enumerate(sorted({rank.node for rank in ranks}))}
    seen = [0] * len(order)
    nodes, lanes = [], []
    for rank in ranks:
        node = order[rank.node]
        nodes.append(node)
        lanes.append(seen[node])
        seen[node] += 1
    return np.array(nodes, dtype=np.int64), np.array(lanes, dtype=np.int64)


def _alike(ranks: Sequence[Rank]) -> list[_Ints]:
    """Groups of ranks that may trade labels, ascending in each."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, rank in enumerate(ranks):
        groups.setdefault((rank.speed, rank.memory, rank.pools), []).append(i)
    return [np.array(members, dtype=np.int64) for members in groups.values()]


def _peers(ranks: Sequence[Rank]) -> list[_Ints]:
    """Per rank, the ranks that it may trade labels with, itself included."""
    group_of = {int(rank): group for group in _alike(ranks) for rank in group}
    return [group_of[rank] for rank in range(len(ranks))]


def _rows(matrices: Sequence[Matrix], owners: Mapping[str, int], ranks: int) -> _Ints:
    """Bytes per rank of each block, then of each pair of consecutive blocks, ``(2 blocks - 1, ranks)``."""
    order = {block: i for i, block in enumerate(sorted({m.block for m in matrices}, key=_natural))}
    nbytes = np.zeros((len(order), ranks), dtype=np.int64)
    for m in matrices:
        nbytes[order[m.block], owners[m.name]] += m.nbytes
    return np.concatenate([nbytes, nbytes[1:] + nbytes[:-1]])


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``; the name itself breaks ties."""
    parts = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]
    return [*parts, (1, 0, name)]


def _traffic(rows: _Ints, link_of: _Ints) -> _Ints:
    """Bytes per row and node, or lane; ``link_of`` is that of each rank."""
    links = np.zeros((len(rows), int(link_of.max()) + 1), dtype=np.int64)
    np.add.at(links.T, link_of, rows.T)
    return links


def _cost(rows: _Ints, label: _Ints, grid: tuple[_Ints, _Ints]) -> int:
    return sum(int(_traffic(rows, link_of[label]).max(axis=1).sum()) for link_of in grid)


def _xor_order(ranks: Sequence[Rank]) -> _Ints:
    """New label per rank by the XOR rule."""
    nodes, lanes = _grid(ranks)
    width = int(lanes.max()) + 1
    turn = lanes ^ (nodes % width) if width & (width - 1) == 0 else (lanes - nodes) % width
    step = np.lexsort((nodes, turn)).argsort()  # when a place is due
    label = np.arange(len(ranks))
    for alike in _alike(ranks):
        label[alike] = alike[step[alike].argsort()]
    return label


def _place(rows: _Ints, grid: tuple[_Ints, _Ints], peers: Sequence[_Ints]) -> _Ints:
    """New label per rank. Ranks come in the order of the blocks where they own most.

    Each takes the free place that adds least to the cost. Of equals, it takes the one whose node and lane carry least
    of the same blocks and their neighbours, and then the first. What a place adds is what its node adds and what its
    lane does: of a node, its best free lane is compared with those of the others.
    """
    unit = int(rows.max()) // 2**20 + 1  # keeps products of bytes within 64 bits, and exact
    label = np.zeros(rows.shape[1], dtype=np.int64)
    node_of, lane_of = grid
    at = np.full((int(lane_of.max()) + 1, int(node_of.max()) + 1), -1, dtype=np.int64)  # the rank there
    at[lane_of, node_of] = np.arange(rows.shape[1])
    free = {id(alike): np.isin(at, alike) for alike in {id(alike): alike for alike in peers}.values()}
    links = [(link_of, np.zeros((len(rows), int(link_of.max()) + 1), dtype=np.int64)) for link_of in grid]
    most = np.where(rows.any(axis=0), rows[: (len(rows) + 1) // 2].argmax(axis=0), len(rows))
    idle: NDArray[np.bool_] = np.logical_not(rows.any(axis=0))
    order = np.lexsort((-rows.sum(axis=0), most))
    nodes = np.arange(at.shape[1])
    for rank in order[~idle[order]].tolist():
        touched = np.flatnonzero(rows[:, rank])
        own = rows[touched, rank][:, None]
        (added, shared), (lane_added, lane_shared) = (_burden(traffic[touched], own, unit) for _, traffic in links)
        turn = np.lexsort((lane_shared, lane_added))
        able = free[id(peers[rank])]
        lane = turn[able[turn].argmax(axis=0)]  # of each node, the one that adds least; of equals the first
        some = nodes[able[lane, nodes]]
        lane = lane[some]
        costs = (at[lane, some], shared[some] + lane_shared[lane], added[some] + lane_added[lane])
        chosen = int(costs[0][_least(costs)])
        label[rank], able[lane_of[chosen], node_of[chosen]] = chosen, False
        for link_of, traffic in links:
            traffic[touched, link_of[chosen]] += own[:, 0]
    left = {id(peers[rank]): peers[rank] for rank in np.flatnonzero(idle).tolist()}
    for key, alike in left.items():
        label[alike[idle[alike]]] = np.sort(at[free[key]])  # they add nothing anywhere
    return label


def _least(costs: Sequence[_Ints]) -> int:
    """Where the last of ``costs`` is least, and of equals the one before, and so on."""
    places = np.arange(len(costs[0]))
    for cost in reversed(costs):
        of_places = cost[places]
        places = places[of_places == of_places.min()]
    return int(places[0])


def _burden(traffic: _Ints, own: _Ints, unit: int) -> tuple[_Ints, _Ints]:
    """What bytes of some rows add to the most that any node, or lane, carries; and what it carries of the same rows."""
    added = np.maximum(traffic + own - traffic.max(axis=1, keepdims=True), 0).sum(axis=0)
    return added, ((own // unit) * (traffic // unit)).sum(axis=0)


def _swap(rows: _Ints, label: _Ints, grid: tuple[_Ints, _Ints], peers: Sequence[_Ints]) -> None:
    """Swap two ranks' labels while that lowers the cost, in place.

    Each turn takes a row, its most crowded node or lane, and a rank there, and tries a batch of partners.
    """
    links = [(link_of, _traffic(rows, link_of[label])) for link_of in grid]
    cells = sum(traffic.size for _, traffic in links)
    best = sum(int(traffic.max(axis=1).sum()) for _, traffic in links)
    budget, turn, idle = _BUDGET, 0, 0
    while budget > 0 and idle < 2 * len(links) * len(rows):
        link_of, traffic = links[turn % 2]
        row = turn // 2 % len(rows)
        crowd = np.flatnonzero(link_of[label] == traffic[row].argmax())
        rank = int(crowd[np.argsort(-rows[row, crowd], kind="stable")[turn // 2 // len(rows) % len(crowd)]])
        count = min(max(1, _BATCH // cells), len(peers[rank]))
        partners = peers[rank][(turn * _STRIDE + np.arange(count)) % len(peers[rank])]
        moved = (rows[:, partners] - rows[:, [rank]]).T
        costs = np.zeros(count, dtype=np.int64)
        for link_of, traffic in links:
            trial = np.repeat(traffic[None], count, axis=0)
            trial[np.arange(count), :, link_of[label[rank]]] += moved
            trial[np.arange(count), :, link_of[label[partners]]] -= moved
            costs += trial.max(axis=2).sum(axis=1)
        budget -= cells * count + _CALL
        turn, idle = turn + 1, idle + 1
        i = int(costs.argmin())
        if costs[i] < best:
            best, idle, partner = int(costs[i]), 0, int(partners[i])
            for link_of, traffic in links:
                traffic[:, link_of[label[rank]]] += moved[i]
                traffic[:, link_of[label[partner]]] -= moved[i]
            label[[rank, partner]] = label[[partner, rank]]
