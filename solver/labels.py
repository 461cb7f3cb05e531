"""Which rank bears which label: the XOR layout over the mesh of nodes × GPUs.

A rank's lane is its position within its node: GPU 0 … 7. Ranks of one lane share a rail of the network, ranks of one
node share its links, and on a mesh of nodes × GPUs they share a communicator of a column or a row. So owners that
follow each other get other nodes and other lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .inputs import Rank


def xor_labels(owners: Mapping[str, int], ranks: Sequence[Rank]) -> dict[str, int]:
    """The owners by their labels: owner ``k`` goes to node ``i = k mod N`` of ``N`` and to lane ``(k div N) XOR i``.

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
