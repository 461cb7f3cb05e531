"""Which rank owns which matrix: solved on rank 0, broadcast, and verified on every rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from dmuon.comm import agree
from dmuon.costs import find_costs
from dmuon.policy import Route
from dmuon.solver import CostTable, Matrix, Plan, SolveOptions
from dmuon.solver import plan as solve_plan

__all__ = ["Costs", "OwnerPlan", "check_options", "make_plan"]

Costs = Literal["flops"] | str | os.PathLike[str] | CostTable | None


@dataclass(frozen=True)
class OwnerPlan:
    """Who owns what, and at what predicted cost.

    Attributes:
        matrices: every owned matrix, in the order of the model.
        solution: the solver's plan (owners, makespan, bound, loads).
        chunks: ``(small side, large side)`` to the number of matrices that one batched update takes.
        cost_source: where the costs came from, for people.
        world: number of ranks.
    """

    matrices: tuple[Matrix, ...]
    solution: Plan
    chunks: dict[tuple[int, int], int]
    cost_source: str
    world: int

    @property
    def owners(self) -> dict[str, int]:
        """Canonical parameter name to owning rank of the mesh."""
        return dict(self.solution.owners)

    @property
    def digest(self) -> str:
        """SHA-256 that is equal on all ranks exactly when they hold the same plan."""
        return self.solution.digest

    @property
    def balance(self) -> float:
        """Largest predicted load over the mean load; 1 is perfect."""
        loads = list(self.solution.loads_ns)
        mean = sum(loads) / len(loads)
        return max(loads) / mean if mean > 0 else 1.0

    def report(self) -> str:
        """Makespan, proven bound, gap, and a bar per rank."""
        return f"costs: {self.cost_source}\n{self.solution.report()}"


def check_options(costs: object, solve: object) -> None:
    """Raise TypeError for a value that :func:`make_plan` cannot take."""
    if not (costs is None or isinstance(costs, (str, os.PathLike, CostTable))):
        raise TypeError(
            f"costs must be None, 'flops', the path of a cost cache or a CostTable, got {type(costs).__name__}"
        )
    if not (solve is None or isinstance(solve, SolveOptions)):
        raise TypeError(f"solve must be a dmuon.solver.SolveOptions, got {type(solve).__name__}")


def make_plan(
    routes: Sequence[Route],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    comm_itemsize: Callable[[Route], int],
) -> OwnerPlan:
    """Find costs, solve on rank 0, broadcast, and verify. Collective over ``group``.

    Raises:
        ValueError: on every rank, when the costs are unusable, the solver failed, or a received plan does not fit
            this rank's model.
    """
    matrices = tuple(
        Matrix(r.fqn, r.param.shape[0], r.param.shape[1], r.block or "", r.param.numel() * comm_itemsize(r))
        for r in routes
        if r.muon
    )
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def share(item: object) -> list[object]:
        items: list[object] = [None] * world
        dist.all_gather_object(items, item, group=group)
        return items

    if isinstance(costs, CostTable):
        table, source = costs, "given"
    else:
        table, source = find_costs(
            dict(Counter(m.shape for m in matrices)),
            world=world,
            rank=rank,
            device=device,
            costs=costs,
            share=share if world > 1 else None,
        )
    sent: list[Any] = [None, None, None]
    if rank == 0:
        try:
            # Batches decide rounding: like the owners, their sizes are rank 0's.
            chunks = {shape: table.chunk(shape) for shape in sorted({m.shape for m in matrices})}
            sent = [None, solve_plan(matrices, world, table, solve or SolveOptions()).to_json(), chunks]
        except Exception as fault:  # every rank must hear of it, whatever it is
            sent[0] = str(fault) if isinstance(fault, ValueError) else f"{type(fault).__name__}: {fault}"
    if world > 1:
        dist.broadcast_object_list(sent, group_src=0, group=group)
    error, solution = sent[0], None
    if error is None:
        try:
            solution = Plan.from_json(sent[1])
            error = _mismatch(matrices, solution, world)
        except ValueError as fault:
            error = str(fault)
    digests = agree(group, error, None if solution is None else solution.digest)
    assert solution is not None
    other = [r for r, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise ValueError(
            f"rank {other[0]} holds another owner plan than rank 0 (digests {digests[other[0]]} and {digests[0]}); run "
            "the same version of dmuon on every rank"
        )
    return OwnerPlan(matrices, solution, sent[2], source, world)


def _mismatch(matrices: Sequence[Matrix], solution: Plan, world: int) -> str | None:
    names = {m.name for m in matrices}
    planned = dict(solution.owners)
    if set(planned) != names:
        return f"the plan does not cover this model: {sorted(set(planned) ^ names)[0]!r} is on one side only"
    wrong = sorted(name for name, owner in planned.items() if not 0 <= owner < world)
    if wrong:
        return f"the plan gives {wrong[0]!r} to rank {planned[wrong[0]]}, but there are {world} ranks"
    return None
