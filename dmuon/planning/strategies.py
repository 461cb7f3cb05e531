"""Which matrices gain if they have not just an owner: strategy ``"auto"``, by predictions of plans and links.

Greedy. As long as it lets the slowest rank end earlier, the largest matrix is sharded over all ranks; then the rest is
planned anew. If nothing is sharded and all matrices are small, they are replicated where an exchange less takes more
off than computing all of them adds. What is predicted to gain less than a prediction may be wrong has an owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from dmuon.kernels import coefficient_sequence, slice_cost, sliced_variant, storage_dtype
from dmuon.layout.matrices import Strategy
from dmuon.planning.device_key import NsOptions
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.solver import Matrix, Shape

_ERROR = 0.2  # of predictions; less is no reason to change a plan
_MOST_TRIED = 64  # plans


@dataclass(frozen=True, slots=True)
class Link:
    """What it takes to send: a byte that an all-to-all brings, and any collective; in nanoseconds."""

    ns_per_byte: float
    latency_ns: float


@dataclass(frozen=True, slots=True)
class Choice:
    """How a matrix is orthogonalized that has not just an owner.

    Attributes:
        predicted_ns: what it takes on each rank.
        step_ns: what all matrices are predicted to take together, and by owners alone.
    """

    strategy: Strategy
    predicted_ns: float
    step_ns: tuple[float, float]


def choose(
    matrices: Sequence[Matrix],
    candidates: Collection[str],
    small: Collection[str],
    plan: OwnerPlan,
    replan: Callable[[Sequence[Matrix]], OwnerPlan],
    link: Link,
    device: torch.device,
    ns: NsOptions,
) -> tuple[dict[str, Choice], OwnerPlan | None]:
    """By name, what is chosen for matrices that have not just owners, and the plan for the others, if there are any.

    The same on all ranks that have the same arguments; ``replan`` may be collective.

    Args:
        candidates: names of those that may be sharded.
        small: names of those that may be replicated.
        plan: of all matrices.
        replan: plans some of them.
        ns: the Newton–Schulz run that costs are of.
    """
    assert plan.costs is not None, "a plan that was made now"
    exchange, before = 2 * link.latency_ns, max(plan.solution.starts_ns, default=0)
    by_owners = plan.solution.makespan_ns + exchange
    best: tuple[float, OwnerPlan | None] = by_owners, plan
    rest, chosen = list(matrices), dict[str, float]()
    by_size = sorted((m for m in matrices if m.name in candidates), key=lambda m: (-m.rows * m.cols, m.name))
    for matrix in by_size[:_MOST_TRIED]:
        alone = plan.costs.cost(matrix.shape, 1) - link.ns_per_byte * matrix.nbytes
        together = sharded_ns(matrix.shape, alone, plan.world, link, device, ns)
        fewer = [other for other in rest if other is not matrix]
        total = together + sum(chosen.values())
        if total >= best[0]:
            break
        planned = replan(fewer) if fewer else None
        total += before if planned is None else planned.solution.makespan_ns + exchange
        if total >= best[0]:
            break
        best, rest = (total, planned), fewer
        chosen[matrix.name] = together
    if not chosen and len(small) == len(matrices):
        everything = replicated_ns(matrices, plan, link)
        if before + everything < (1 - _ERROR) * by_owners:
            of_one = Choice("replicated", everything / len(matrices), (before + everything, by_owners))
            return dict.fromkeys(small, of_one), plan
    if best[0] > (1 - _ERROR) * by_owners:
        return {}, plan
    return {name: Choice("sharded", ns, (best[0], by_owners)) for name, ns in chosen.items()}, best[1]


def sharded_ns(
    shape: Shape, alone_ns: float, world: int, link: Link, device: torch.device, options: NsOptions
) -> float:
    """What a matrix takes that all ranks orthogonalize together.

    Args:
        alone_ns: what Newton–Schulz takes of it on one rank.
    """
    storage = storage_dtype(torch.float32, device, options.dtype)
    sequence = coefficient_sequence(options.coefficients, options.steps)
    restarts = sliced_variant(shape, 1, world, sequence, storage, device).restarts
    operations = 2 * slice_cost(shape, world, options.steps, restarts)
    m, n = shape
    sums = (len(restarts) + 1) * (link.latency_ns + 2 * 4 * m * m * link.ns_per_byte)
    slices = 2 * (link.latency_ns + 4 * m * n / world * link.ns_per_byte)
    return alone_ns * operations / options.flops(shape, device) + sums + slices


def replicated_ns(matrices: Sequence[Matrix], plan: OwnerPlan, link: Link) -> float:
    """What all of them take on each rank, with the one exchange before."""
    assert plan.costs is not None
    counts: Mapping[Shape, int] = Counter(matrix.shape for matrix in matrices)
    elements = sum(matrix.rows * matrix.cols for matrix in matrices)
    moved = link.ns_per_byte * sum(matrix.nbytes for matrix in matrices)
    computed = sum(plan.costs.cost(shape, count) for shape, count in counts.items()) - moved
    return computed + link.latency_ns + 4 * elements * link.ns_per_byte
