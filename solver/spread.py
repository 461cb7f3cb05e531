"""From counts per rank to owners: spread each block over the ranks, and label these by the XOR layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from .inputs import ClassKey, Matrix, Rank


def spread_blocks(matrices: Sequence[Matrix], quota: Mapping[ClassKey, Sequence[int]]) -> dict[str, int]:
    """Name an owner for each matrix so that each rank owns exactly its quota of each class.

    A block's collective takes as long as its largest owner's bytes. So of each block a rank is due a share that is in
    proportion to the bytes that it still has to take, and the largest matrix goes to the rank to which most is due. The
    order of ``matrices`` does not matter.

    Args:
        quota: ``quota[class][rank]``: matrices of that class that the rank must own, and 0 where it may own none.

    Returns:
        rank per matrix name, in the order of ``matrices``.
    """
    left = {key: np.array(counts, dtype=np.int64) for key, counts in quota.items()}
    members, nbytes = Counter(m.key for m in matrices), Counter[ClassKey]()
    blocks: dict[str, list[Matrix]] = {}
    for m in matrices:
        nbytes[m.key] += m.nbytes
        blocks.setdefault(m.block, []).append(m)
    to_take = np.sum([counts * (nbytes[key] / members[key]) for key, counts in left.items()], axis=0)
    owners: dict[str, int] = {}
    for _, block in sorted(blocks.items()):
        due = to_take * (sum(m.nbytes for m in block) / to_take.sum())
        for m in sorted(block, key=lambda m: (-m.nbytes, m.key, m.name)):
            room = left[m.key]
            able = np.flatnonzero(room)
            most = able[due[able] == due[able].max()]
            rank = int(most[room[most].argmax()])  # of equals the one that must take most of the class, then the lowest
            owners[m.name] = rank
            room[rank] -= 1
            due[rank] -= m.nbytes
            to_take[rank] -= m.nbytes
    return {m.name: owners[m.name] for m in matrices}


def xor_labels(owners: Mapping[str, int], ranks: Sequence[Rank]) -> dict[str, int]:
    """The owners by their labels: owner ``k`` goes to node ``i = k mod N`` of ``N`` and to lane ``(k div N) XOR i``.

    A rank's lane is its position within its node: ranks of one lane share a rail of the network, ranks of one node its
    links. So owners that follow each other get other nodes and other rails.
    Where a node has no power of two of ranks, rotation by ``i`` replaces XOR. Relabelling moves whole ranks, and only
    interchangeable ranks, of equal traits, trade labels. On one node all labels stay.

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
        alike.setdefault(rank.traits, []).append(i)
    label = np.arange(len(ranks))
    for group in map(np.array, alike.values()):
        label[group] = group[step[group].argsort()]
    return {name: int(label[rank]) for name, rank in owners.items()}
