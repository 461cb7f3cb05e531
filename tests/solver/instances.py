"""Small planning problems, and their exact answers by exhaustion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product

from hypothesis import strategies as st

from dmuon.solver import CostTable, Matrix, Plan

SHAPES = [(64, 64), (64, 256), (128, 128)]


def make_matrices(counts: Sequence[int], blocks: int = 2) -> list[Matrix]:
    """``counts[i]`` matrices of the i-th shape, dealt over blocks in turn."""
    return [
        Matrix(f"b{i % blocks}.s{s}.{i}", *SHAPES[s], block=f"b{i % blocks}")
        for s, count in enumerate(counts)
        for i in range(count)
    ]


def linear_costs(*single: int) -> CostTable:
    """A batch costs its matrices one by one."""
    return CostTable({SHAPES[s]: {1: cost} for s, cost in enumerate(single)})


def exact_makespan(matrices: Sequence[Matrix], ranks: int, costs: CostTable) -> int:
    """The optimum, by trying every count vector on every rank."""
    members = Counter(m.shape for m in matrices)
    shapes = sorted(members)

    def load(row: tuple[int, ...]) -> int:
        return sum(costs.cost(shape, n) for shape, n in zip(shapes, row, strict=True))

    @cache
    def best(left: tuple[int, ...], ranks: int) -> int:
        if ranks == 1:
            return load(left)
        rows = product(*(range(n + 1) for n in left))
        return min(
            max(load(row), best(tuple(n - k for n, k in zip(left, row, strict=True)), ranks - 1)) for row in rows
        )

    return best(tuple(members[shape] for shape in shapes), ranks)


def recomputed_loads(plan: Plan, costs: CostTable) -> list[int]:
    """Nanoseconds per rank, from the owners alone."""
    held = Counter((plan.owners[m.name], m.shape) for m in plan.matrices)
    return [sum(costs.cost(shape, n) for (r, shape), n in held.items() if r == rank) for rank in range(plan.world)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Matrix], int, CostTable]:
    """Two or three shapes, two to four ranks, arbitrary batch costs.

    One shape or one rank is no problem at all, and left to itself the strategy draws little else.
    """
    counts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    costs = {}
    for s in range(len(counts)):
        sizes = [1, *draw(st.lists(st.sampled_from([2, 3, 4, 8]), unique=True, max_size=3))]
        costs[SHAPES[s]] = {k: draw(st.integers(1, 1000)) for k in sizes}
    return make_matrices(counts), draw(st.integers(2, 4)), CostTable(costs)
