"""From counts to owners: blocks are spread, counts stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import SHAPES, linear_costs, make_matrices, problems

from dmuon.solver import CostTable, Matrix, SolveOptions, plan
from dmuon.solver.problem import build_problem
from dmuon.solver.spread import block_bytes, spread_blocks


@given(problems(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_spreading_leaves_the_counts_as_they_are(problem: tuple[list[Matrix], int, CostTable], random: object) -> None:
    matrices, ranks, costs = problem
    built = build_problem(sorted(matrices, key=lambda m: m.name), ranks, costs)
    rng = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    counts = np.stack([rng.multinomial(n, np.ones(ranks) / ranks) for n in built.members], axis=1)
    owners = spread_blocks(built, matrices, counts)
    found = np.zeros_like(counts)
    for m in matrices:
        found[owners[m.name], built.shapes.index(m.shape)] += 1
    assert found.tolist() == counts.tolist()


def test_a_block_with_one_matrix_per_rank_is_spread_over_all_ranks() -> None:
    result = plan(make_matrices([32], blocks=8), 4, linear_costs(10))
    for block, (largest, least) in result.block_balance.items():
        assert largest == least == 64 * 64 * 4, block


def largest_shares(matrices: Sequence[Matrix], owners: Mapping[str, int]) -> int:
    """Sum over blocks of the largest owner's bytes."""
    return sum(max(row.values()) for row in block_bytes(matrices, owners).values())


@pytest.mark.parametrize("seed", [*range(8), 45, 63])  # dealing in turn, without swaps, misses the last two
def test_largest_shares_are_within_a_fifth_of_the_least_that_the_counts_allow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrices = [Matrix(f"{i}", *SHAPES[rng.integers(2)], block=f"b{rng.integers(3)}") for i in range(8)]
    problem = build_problem(matrices, 3, linear_costs(1, 1))
    counts = np.stack([rng.multinomial(n, np.ones(3) / 3) for n in problem.members], axis=1)
    best = None
    for ranks in product(range(3), repeat=8):
        found = np.zeros_like(counts)
        for m, rank in zip(matrices, ranks, strict=True):
            found[rank, problem.shapes.index(m.shape)] += 1
        if (found == counts).all():
            shares = largest_shares(matrices, {m.name: r for m, r in zip(matrices, ranks, strict=True)})
            best = shares if best is None else min(best, shares)
    assert best is not None
    reached = largest_shares(matrices, spread_blocks(problem, matrices, counts))
    assert best <= reached <= 1.2 * best


def test_matrices_of_other_bytes_count_by_their_bytes() -> None:
    matrices = [Matrix(f"{i}", 64, 64, "b", nbytes=n) for i, n in enumerate([4, 4, 2, 2, 2, 2])]
    result = plan(matrices, 2, linear_costs(10), SolveOptions(method="greedy"))
    assert result.rank_matrices == (3, 3)
    assert sorted(result.rank_bytes) == [8, 8]
