"""From counts to owners: blocks are spread, counts stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import LLAMA_8B, SHAPES, decoder, linear_costs, make_matrices

from dmuon.solver import CostTable, Matrix, SolveOptions, plan
from dmuon.solver.spread import ClassKey, _bound, _least, _tabulate, block_bytes, spread_blocks

Quota = dict[ClassKey, list[int]]


def quota_of(matrices: Sequence[Matrix], owners: Mapping[str, int], ranks: int) -> Quota:
    """Matrices per class and rank."""
    quota: Quota = {m.key: [0] * ranks for m in matrices}
    for m in matrices:
        quota[m.key][owners[m.name]] += 1
    return quota


def largest_shares(matrices: Sequence[Matrix], owners: Mapping[str, int]) -> int:
    """Sum over blocks of the largest owner's bytes."""
    return sum(max(row.values()) for row in block_bytes(matrices, owners).values())


def spread_bound(matrices: Sequence[Matrix], quota: Quota) -> int:
    """The bound on the sum of the largest shares that ends the search when it is reached."""
    table = _tabulate(matrices, quota)
    return _bound(table, _least(table))


Task = tuple[list[Matrix], dict[str, int], int]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Matrices of a few shapes, sizes and pools in a few blocks, owners at random, and the number of ranks."""
    ranks = draw(st.integers(1, 5))
    kinds = st.tuples(st.sampled_from(SHAPES), st.integers(0, 3), st.sampled_from([0, 7]), st.sampled_from(["", "p"]))
    matrices = [
        Matrix(f"m{i}", *shape, block=f"b{block}", nbytes=size, pool=pool)
        for i, (shape, block, size, pool) in enumerate(draw(st.lists(kinds, min_size=1, max_size=24)))
    ]
    return matrices, {m.name: draw(st.integers(0, ranks - 1)) for m in matrices}, ranks


@given(tasks(), st.one_of(st.none(), st.integers(1, 200_000)))
@settings(deadline=None, max_examples=50)
def test_every_rank_owns_exactly_its_quota_of_each_class(task: Task, cap: int | None) -> None:
    matrices, drawn, ranks = task
    quota = quota_of(matrices, drawn, ranks)
    caps = None if cap is None else {"b0": cap, "b1": cap}
    owners = spread_blocks(matrices, quota, caps)
    assert list(owners) == [m.name for m in matrices]
    assert quota_of(matrices, owners, ranks) == quota


@given(tasks(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=20)
def test_the_order_of_the_matrices_does_not_reach_the_owners(task: Task, random: Random) -> None:
    matrices, drawn, ranks = task
    quota = quota_of(matrices, drawn, ranks)
    shuffled = random.sample(matrices, len(matrices))
    assert spread_blocks(shuffled, quota) == spread_blocks(matrices, quota)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4).filter(any), min_size=1, max_size=8))
@settings(deadline=None, max_examples=40)
def test_caps_of_one_matrix_hold_where_one_class_allows_them(table: list[list[bool]]) -> None:
    placed = [(b, r) for b, row in enumerate(table) for r, owned in enumerate(row) if owned]
    matrices = [Matrix(f"{b}.{r}", 8, 8, block=f"{b}") for b, r in placed]
    quota = quota_of(matrices, {f"{b}.{r}": r for b, r in placed}, 4)
    owners = spread_blocks(matrices, quota, {f"{b}": 256 for b in range(len(table))})
    assert {size for row in block_bytes(matrices, owners).values() for size in row.values()} == {256}


@pytest.mark.parametrize(("capped", "other"), ["ab", "ba"])
def test_a_cap_moves_what_must_double_up_to_another_block(capped: str, other: str) -> None:
    matrices = [Matrix(f"{block}{i}", 8, 8, block=block) for block in "ab" for i in range(2)]
    owners = spread_blocks(matrices, {(8, 8, ""): [3, 1]}, {capped: 256})
    assert block_bytes(matrices, owners) == {capped: {0: 256, 1: 256}, other: {0: 512}}


def test_a_block_with_one_matrix_per_rank_is_spread_over_all_ranks() -> None:
    result = plan(make_matrices([32], blocks=8), 4, linear_costs(10))
    for block, (largest, least) in result.block_balance.items():
        assert largest == least == 64 * 64 * 4, block


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("sides", [(32, *LLAMA_8B), (28, 3584, 512, 18944)])
def test_a_decoder_is_spread_as_far_as_the_counts_allow(sides: tuple[int, int, int, int], ranks: int) -> None:
    matrices = decoder(*sides)
    result = plan(matrices, ranks, CostTable.from_flops({m.shape for m in matrices}), SolveOptions(method="greedy"))
    quota = quota_of(matrices, result.owners, ranks)
    assert largest_shares(matrices, spread_blocks(matrices, quota)) <= 1.001 * spread_bound(matrices, quota)
