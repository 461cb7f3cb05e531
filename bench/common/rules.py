"""Plans of simpler rules than the planner's, to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from dmuon.solver import CostTable, Matrix, Plan


def baseline(rule: Literal["round-robin", "lpt"], matrices: Sequence[Matrix], ranks: int, costs: CostTable) -> Plan:
    """Matrices dealt out in the order of their names; or the longest next, to the rank with the least work.

    By the cost of one matrix alone: neither knows of batches.
    """
    ordered = sorted(matrices, key=lambda m: m.name)
    if rule == "round-robin":
        owners = {m.name: i % ranks for i, m in enumerate(ordered)}
    else:
        owners, work = {}, [(0, 0, rank) for rank in range(ranks)]  # nanoseconds and elements
        for m in sorted(ordered, key=lambda m: (-costs.cost(m.shape, 1), m.key)):
            ns, elements, rank = min(work)
            owners[m.name], work[rank] = rank, (ns + costs.cost(m.shape, 1), elements + m.rows * m.cols, rank)
    loads = [0] * ranks
    for (rank, key), count in Counter((owners[m.name], m.key) for m in ordered).items():
        loads[rank] += costs.cost((min(key[:2]), max(key[:2])), count)
    named = {m.name: owners[m.name] for m in ordered}
    return Plan(named, tuple(ordered), tuple(loads), bound_ns=1, stage=rule, reason="a baseline")
