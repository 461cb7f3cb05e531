"""Small planning problems, exact answers by exhaustion, the matrices of large models, and a search without a child."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from hypothesis import strategies as st

from dmuon.solver import CostTable, Matrix, Plan, Rank, exact

Case = tuple[list[Matrix], int, CostTable]
LimitedCase = tuple[list[Matrix], list[Rank], CostTable]
SHAPES = [(64, 64), (64, 256), (128, 128)]


def make_matrices(counts: Sequence[int], blocks: int = 2) -> list[Matrix]:
    """``counts[i]`` matrices of the i-th shape, dealt over blocks in turn."""
    return [
        Matrix(f"b{i % blocks}.s{s}.{i}", *SHAPES[s], block=f"b{i % blocks}")
        for s, count in enumerate(counts)
        for i in range(count)
    ]


def decoder(layers: int, hidden: int, narrow: int, inner: int) -> list[Matrix]:
    """A Llama-like model: attention with few key and value heads, and a gated MLP."""
    sides = {"q": (hidden, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, hidden)}
    sides |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return [Matrix(f"{i}.{name}", *shape, f"layers.{i}") for i in range(layers) for name, shape in sides.items()]


LLAMA_8B, LLAMA_70B = (4096, 1024, 14336), (8192, 1024, 28672)


def linear_costs(*single: int) -> CostTable:
    """A batch costs its matrices one by one."""
    return shape_costs(*({1: cost} for cost in single))


def shape_costs(*batches: dict[int, int]) -> CostTable:
    """What batches of the i-th shape cost; of a shape that has no matrices, nothing."""
    return CostTable({SHAPES[s]: costs for s, costs in enumerate(batches) if costs})


BATCHED = shape_costs({1: 70, 4: 200}, {1: 110, 4: 390}, {1: 130, 4: 500})
STEEP = shape_costs({1: 100, 4: 110}, {1: 60, 2: 66}, {1: 130})
ALMOST_FREE = shape_costs(*[{1: 100, 2: 105, 4: 110}] * 3)  # a batch of four costs little more than one
GRAHAM = make_matrices([2, 2, 3]), 3, linear_costs(5, 4, 3)  # the worst case of LPT on three ranks: 11 ns, not 9


def wave_costs(matrices: Sequence[Matrix]) -> CostTable:
    """Whole waves of 132 processors, 20 µs each, over 128 x 128 tiles."""
    tiles = {m.shape: math.ceil(m.rows / 128) * math.ceil(m.cols / 128) for m in matrices}
    return CostTable(
        {
            shape: {k: 20_000 * math.ceil(k * count / 132) + 50_000 for k in (1, 2, 4, 8, 16, 32)}
            for shape, count in tiles.items()
        }
    )


def owners_of(ranks: int | Sequence[Rank]) -> list[Rank]:
    return [Rank(i) for i in range(ranks)] if isinstance(ranks, int) else list(ranks)


def exact_makespan(matrices: Sequence[Matrix], ranks: int | Sequence[Rank], costs: CostTable) -> int | None:
    """The optimum, by trying every count vector on every rank; ``None`` where the ranks' limits leave no room."""
    members = Counter(m.key for m in matrices)
    classes = sorted(members)
    state = {m.key: m.state_bytes for m in matrices}
    owners = owners_of(ranks)

    def load(rank: Rank, row: tuple[int, ...]) -> float:
        held = [(key, n) for key, n in zip(classes, row, strict=True) if n]
        if any(not rank.may_own(pool) for (_, _, pool), _ in held):
            return math.inf
        if rank.memory is not None and sum(n * state[key] for key, n in held) > rank.memory:
            return math.inf
        return rank.start_ns + sum(
            math.ceil(costs.cost((min(rows, cols), max(rows, cols)), n) / rank.speed) for (rows, cols, _), n in held
        )

    @cache
    def best(left: tuple[int, ...], index: int) -> float:
        if index == len(owners) - 1:
            return load(owners[index], left)
        rows = product(*(range(n + 1) for n in left))
        return min(
            max(load(owners[index], row), best(tuple(n - k for n, k in zip(left, row, strict=True)), index + 1))
            for row in rows
        )

    found = best(tuple(members[key] for key in classes), 0)
    return None if found == math.inf else int(found)


def recomputed_loads(plan: Plan, costs: CostTable) -> list[int]:
    """Nanoseconds per rank, from the owners alone."""
    held = Counter((plan.owners[m.name], m.key) for m in plan.matrices)
    return [
        sum(costs.cost((min(key[:2]), max(key[:2])), n) for (r, key), n in held.items() if r == rank)
        for rank in range(plan.world)
    ]


@st.composite
def problems(draw: st.DrawFn) -> Case:
    """Two or three shapes, two to four ranks, arbitrary batch costs.

    One shape or one rank is no problem at all, and left to itself the strategy draws little else.
    """
    counts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    costs = {}
    for s in range(len(counts)):
        sizes = [1, *draw(st.lists(st.sampled_from([2, 3, 4, 8]), unique=True, max_size=3))]
        costs[SHAPES[s]] = {k: draw(st.integers(1, 1000)) for k in sizes}
    return make_matrices(counts), draw(st.integers(2, 4)), CostTable(costs)


@st.composite
def unequal_ranks(draw: st.DrawFn, matrices: Sequence[Matrix]) -> list[Rank]:
    """Two to four ranks that may differ in speed, memory, pools and work that they have before."""
    smallest, total = min(m.state_bytes for m in matrices), sum(m.state_bytes for m in matrices)
    pools = sorted({m.pool for m in matrices})
    return [
        Rank(
            index,
            speed=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
            memory=draw(st.one_of(st.none(), st.integers(smallest, total))),
            pools=draw(st.one_of(st.none(), st.frozensets(st.sampled_from(pools)))),
            start_ns=draw(st.sampled_from([0, 0, 100, 1500])),
        )
        for index in range(draw(st.integers(2, 4)))
    ]


@st.composite
def limited_problems(draw: st.DrawFn) -> LimitedCase:
    """As ``problems``, over unequal ranks, the matrices in one or two pools."""
    matrices, _, costs = draw(problems())
    pooled = [replace(m, pool=draw(st.sampled_from(["", "experts"]))) for m in matrices]
    return pooled, draw(unequal_ranks(pooled)), costs


def search_here(question: tuple[Any, ...], seconds: float) -> tuple[exact.Solution, str]:
    """What ``dmuon.solver.child.run_search`` does in a process of its own, which takes a third of a second to start."""
    answers: list[exact.Solution] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP announces what its next version removes
        exact.search(*question, answers.append)
    return answers[-1], "never"
