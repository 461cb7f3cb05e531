"""Labels of interchangeable ranks by the XOR layout: what they own stays, where they stand changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.solver import Rank
from dmuon.solver.planner import xor_labels

Task = tuple[dict[str, int], list[Rank]]


def grid(nodes: int, lanes: int) -> list[Rank]:
    return [Rank(i, node=i // lanes) for i in range(nodes * lanes)]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Owners at random, and nodes of uneven sizes with two kinds of ranks."""
    nodes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    speeds = st.sampled_from([1.0, 1.0, 2.0])
    places = [node for node, size in enumerate(nodes) for _ in range(size)]
    ranks = [Rank(i, node=node, speed=draw(speeds)) for i, node in enumerate(places)]
    return {f"m{i}": draw(st.integers(0, len(ranks) - 1)) for i in range(draw(st.integers(1, 20)))}, ranks


@given(tasks())
@settings(deadline=None, max_examples=40)
def test_ranks_keep_what_they_own_and_trade_labels_with_their_like(task: Task) -> None:
    owners, ranks = task
    labels = xor_labels(owners, ranks)
    assert list(labels) == list(owners)
    pairs = {(owners[name], labels[name]) for name in owners}
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
    assert all(ranks[old].speed == ranks[new].speed for old, new in pairs)


@pytest.mark.parametrize("ranks", [grid(1, 8), grid(8, 1), grid(1, 1)])
def test_one_node_or_one_lane_leaves_the_labels_as_they_are(ranks: list[Rank]) -> None:
    owners = {f"{i}": i % len(ranks) for i in range(30)}
    assert xor_labels(owners, ranks) == owners


def test_consecutive_owners_go_to_other_nodes_and_lanes() -> None:
    owners = {f"{i}": i for i in range(16)}
    places = [divmod(rank, 4) for rank in xor_labels(owners, grid(4, 4)).values()]
    assert places[:8] == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (1, 0), (2, 3), (3, 2)]
    rotated = [divmod(rank, 3) for rank in xor_labels(owners, grid(6, 3)).values()]
    assert rotated[:6] == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
