"""The planning problem over shape classes, in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .costs import CostTable
from .types import Matrix, Shape

__all__ = ["Counts", "Ints", "Problem", "build_problem"]

Ints = NDArray[np.int64]
Counts = Ints  # (ranks, classes): matrices of each class per rank

_LARGEST_TOTAL = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """How many matrices of each shape class go over how many ranks, and at what cost.

    Attributes:
        shapes: the classes, sorted.
        members: matrices per class, ``(classes,)``.
        costs: per class, the cost of owning ``0 … members`` of it in nanoseconds, ``(members + 1,)``.
        chunks: per class, matrices per batch, at most ``members``.
        nbytes: mean bytes of a matrix per class, ``(classes,)``.
        ranks: number of ranks.
    """

    shapes: tuple[Shape, ...]
    members: tuple[int, ...]
    costs: tuple[Ints, ...]
    chunks: tuple[int, ...]
    nbytes: Ints
    ranks: int

    def loads(self, counts: Counts) -> Ints:
        """Nanoseconds per row of ``counts``."""
        total = np.zeros(len(counts), dtype=np.int64)
        for s, cost in enumerate(self.costs):
            total += cost[counts[:, s]]
        return total

    def makespan(self, counts: Counts) -> int:
        """Nanoseconds of the slowest rank."""
        return int(self.loads(counts).max())

    def rank_bytes(self, counts: Counts) -> Ints:
        """Bytes per row of ``counts``."""
        return np.asarray(counts @ self.nbytes, dtype=np.int64)

    def is_complete(self, counts: Counts) -> bool:
        """Whether ``counts`` hands out every matrix once."""
        return bool((counts >= 0).all()) and counts.sum(axis=0).tolist() == list(self.members)


def build_problem(matrices: Sequence[Matrix], ranks: int, table: CostTable) -> Problem:
    """Group ``matrices`` into shape classes.

    Raises:
        ValueError: a shape without costs, or costs so large that their sum would overflow.
    """
    members: dict[Shape, list[Matrix]] = {}
    for matrix in matrices:
        members.setdefault(matrix.shape, []).append(matrix)
    shapes = tuple(sorted(members))
    total = sum(table.cost(shape, 1) * len(members[shape]) for shape in shapes)
    total = max(total, sum(table.cost(shape, len(members[shape])) for shape in shapes))
    if total >= _LARGEST_TOTAL:
        raise ValueError(f"the costs add up to {total} ns, more than a century; check that they are nanoseconds")
    return Problem(
        shapes=shapes,
        members=tuple(len(members[shape]) for shape in shapes),
        costs=tuple(table.costs_up_to(shape, len(members[shape])) for shape in shapes),
        chunks=tuple(min(table.chunk(shape), len(members[shape])) for shape in shapes),
        nbytes=np.array(
            [sum(m.nbytes for m in members[shape]) // len(members[shape]) for shape in shapes], dtype=np.int64
        ),
        ranks=ranks,
    )
