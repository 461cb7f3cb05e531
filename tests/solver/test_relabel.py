"""Labels of interchangeable ranks: what they own stays, where they stand changes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import LLAMA_8B, decoder

from dmuon.solver import Matrix
from dmuon.solver.inputs import Rank
from dmuon.solver.relabel import _grid, _peers, _place, _rows, link_cost, relabel, xor_labels

Task = tuple[list[Matrix], dict[str, int], list[Rank]]


def grid(nodes: int, lanes: int) -> list[Rank]:
    return [Rank(i, node=i // lanes) for i in range(nodes * lanes)]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Matrices in blocks, owners at random, and nodes of uneven sizes with two kinds of ranks."""
    nodes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    speeds = st.sampled_from([1.0, 1.0, 2.0])
    places = [node for node, size in enumerate(nodes) for _ in range(size)]
    ranks = [Rank(i, node=node, speed=draw(speeds)) for i, node in enumerate(places)]
    kinds = st.tuples(st.sampled_from([(8, 8), (8, 16)]), st.integers(0, 11))
    drawn = draw(st.lists(kinds, min_size=1, max_size=20))
    matrices = [Matrix(f"m{i}", *side, block=f"layers.{block}") for i, (side, block) in enumerate(drawn)]
    return matrices, {m.name: draw(st.integers(0, len(ranks) - 1)) for m in matrices}, ranks


@given(tasks())
@settings(deadline=None, max_examples=100)
def test_ranks_keep_what_they_own_and_trade_labels_with_their_like(task: Task) -> None:
    matrices, owners, ranks = task
    for labels in (relabel(matrices, owners, ranks), xor_labels(owners, ranks)):
        assert list(labels) == list(owners)
        pairs = {(owners[name], labels[name]) for name in owners}
        assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
        assert all(ranks[old].speed == ranks[new].speed for old, new in pairs)


@given(tasks())
@settings(deadline=None, max_examples=100)
def test_relabelling_is_never_worse_than_leaving_the_labels_nor_than_the_xor_rule(task: Task) -> None:
    matrices, owners, ranks = task
    reached = link_cost(matrices, relabel(matrices, owners, ranks), ranks)
    assert reached <= link_cost(matrices, owners, ranks)
    assert reached <= link_cost(matrices, xor_labels(owners, ranks), ranks)


@given(tasks(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_the_matrices_does_not_reach_the_labels(task: Task, random: Random) -> None:
    matrices, owners, ranks = task
    assert relabel(random.sample(matrices, len(matrices)), owners, ranks) == relabel(matrices, owners, ranks)


@pytest.mark.parametrize("ranks", [grid(1, 8), grid(8, 1), grid(1, 1)])
def test_one_node_or_one_lane_leaves_the_labels_as_they_are(ranks: list[Rank]) -> None:
    matrices = [Matrix(f"{i}", 8, 8, block=f"{i // 3}") for i in range(30)]
    owners = {m.name: i % len(ranks) for i, m in enumerate(matrices)}
    assert relabel(matrices, owners, ranks) == owners


def test_consecutive_blocks_start_from_other_nodes_and_lanes() -> None:
    ranks = grid(4, 4)
    matrices = [Matrix(f"{i}", 8, 8, block=f"layers.{i}") for i in range(12)]  # 2 after 1, 10 after 9
    labels = relabel(matrices, {f"{i}": i for i in range(12)}, ranks)
    for i in range(11):
        here, there = labels[f"{i}"], labels[f"{i + 1}"]
        assert here // 4 != there // 4, (i, labels)
        assert here % 4 != there % 4, (i, labels)


def test_a_block_is_even_over_nodes_and_lanes() -> None:
    ranks = grid(4, 4)
    matrices = [Matrix(f"{block}.{i}", 8, 8, block=f"{block}") for block in range(4) for i in range(4)]
    labels = relabel(matrices, {m.name: i for i, m in enumerate(matrices)}, ranks)
    # Each of 4 blocks has 256 bytes on every node and every lane, each of 3 pairs 512.
    assert link_cost(matrices, labels, ranks) == 2 * (4 * 256 + 3 * 512)


def test_the_cost_adds_the_fullest_node_and_lane_of_blocks_and_of_pairs() -> None:
    matrices = [Matrix(f"{i}", 1, 1, block=f"b{i // 2}", nbytes=n) for i, n in enumerate([1, 2, 4, 8])]
    owners = {"0": 0, "1": 1, "2": 0, "3": 3}
    # Nodes: 3, 8, and 8 of both blocks. Lanes: 2, 8, and 10 of both.
    assert link_cost(matrices, owners, grid(2, 2)) == (3 + 8 + 8) + (2 + 8 + 10)


def test_the_xor_rule_sends_consecutive_owners_to_other_nodes_and_lanes() -> None:
    owners = {f"{i}": i for i in range(16)}
    places = [divmod(rank, 4) for rank in xor_labels(owners, grid(4, 4)).values()]
    assert places[:8] == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (1, 0), (2, 3), (3, 2)]


def test_a_decoder_on_four_nodes_of_eight_costs_less_than_by_the_xor_rule() -> None:
    matrices, rng, ranks = decoder(32, *LLAMA_8B), np.random.default_rng(0), grid(4, 8)
    drawn = [owner for _ in range(32) for owner in rng.permutation(32).tolist()[:7]]
    owners = {m.name: owner for m, owner in zip(matrices, drawn, strict=True)}
    reached = link_cost(matrices, relabel(matrices, owners, ranks), ranks)
    assert reached < 0.97 * link_cost(matrices, xor_labels(owners, ranks), ranks)
    assert reached < 0.97 * link_cost(matrices, owners, ranks)


@settings(max_examples=100, deadline=None)
@given(task=tasks())
def test_each_rank_takes_the_first_of_the_free_places_that_add_least(task: Task) -> None:
    """Against every free place, one by one, by the cost that is defined."""
    matrices, owners, ranks = task
    rows, grid, peers = _rows(matrices, owners, len(ranks)), _grid(ranks), _peers(ranks)
    unit = int(rows.max()) // 2**20 + 1
    first = rows[: (len(rows) + 1) // 2]
    busy = [rank for rank in range(len(ranks)) if rows[:, rank].any()]
    busy.sort(key=lambda rank: (int(first[:, rank].argmax()), -int(rows[:, rank].sum()), rank))
    free, carried = set(range(len(ranks))), [np.zeros((len(rows), int(of.max()) + 1), dtype=np.int64) for of in grid]
    expected = {}
    for rank in busy:
        own = rows[:, rank]

        def added(place: int, own: np.ndarray = own) -> tuple[int, int, int]:
            more = shared = 0
            for of, links in zip(grid, carried, strict=True):
                link = links[:, of[place]]
                more += int(np.maximum(link + own - links.max(axis=1), 0)[own > 0].sum())
                shared += int(((own // unit) * (link // unit)).sum())
            return more, shared, place

        place = min((place for place in free if place in peers[rank]), key=added)
        free.remove(place)
        expected[rank] = place
        for of, links in zip(grid, carried, strict=True):
            links[:, of[place]] += own
    label = _place(rows, grid, peers)
    assert {rank: int(label[rank]) for rank in busy} == expected
    assert sorted(label) == list(range(len(ranks)))
