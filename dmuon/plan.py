"""Which rank owns which matrix: solved on rank 0, broadcast, and verified on every rank."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from dmuon.comm import agree
from dmuon.policy import Route
from dmuon.solver import CostTable, Matrix, Plan, SolveOptions
from dmuon.solver import plan as solve_plan

__all__ = ["Costs", "OwnerPlan", "make_plan"]

Costs = Literal["flops"] | str | CostTable | None


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
        ValueError: on every rank, when the ranks' models differ, the costs are unusable, or a received plan does not
            fit this rank's model.
    """
    matrices = tuple(
        Matrix(r.fqn, r.param.shape[0], r.param.shape[1], r.block or "", r.param.numel() * comm_itemsize(r))
        for r in routes
        if r.muon
    )
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    _require_same_model(matrices, group)

    def share(item: object) -> list[object]:
        items: list[object] = [None] * world
        dist.all_gather_object(items, item, group=group)
        return items

    if isinstance(costs, CostTable):
        table, source = costs, "given"
    elif costs == "flops":
        table, source = CostTable.from_flops({m.shape for m in matrices}), "flops"
    else:
        from dmuon.costs import find_costs

        table, source = find_costs(
            dict(Counter(m.shape for m in matrices)),
            world=world,
            rank=rank,
            device=device,
            costs=costs,
            share=share if world > 1 else None,
        )
    sent: list[Any] = [None, None]
    if rank == 0:
        try:
            sent[0] = solve_plan(matrices, world, table, solve or SolveOptions()).to_json()
        except Exception as error:  # every rank must hear of it, whatever it is
            sent[1] = f"{type(error).__name__}: {error}"
    if world > 1:
        dist.broadcast_object_list(sent, group_src=0, group=group)
    error, solution = sent[1], None
    if error is None:
        try:
            solution = Plan.from_json(sent[0])
            error = _mismatch(matrices, solution, world)
        except ValueError as fault:
            error = str(fault)
    digests = agree(group, error, None if solution is None else solution.digest)
    assert solution is not None
    if len(set(digests)) > 1:
        raise ValueError(f"ranks hold different owner plans: digests {sorted(set(digests))}")
    chunks = {shape: table.chunk(shape) for shape in sorted({m.shape for m in matrices})}
    chunks = agree(group, None, chunks)[0]  # rank 0's: batches decide rounding, so all ranks use the same
    return OwnerPlan(matrices, solution, chunks, source, world)


def _require_same_model(matrices: Sequence[Matrix], group: dist.ProcessGroup) -> None:
    description = [(m.name, m.rows, m.cols, m.block) for m in matrices]
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    seen = agree(group, None, (digest, description))
    for rank, (other_digest, other) in enumerate(seen):
        if other_digest != seen[0][0]:
            differing = sorted({str(d[0]) for d in set(map(tuple, other)) ^ set(map(tuple, seen[0][1]))})
            raise ValueError(
                f"rank {rank} selects other matrices than rank 0, first difference: "
                f"{differing[0] if differing else 'their order'}; build the same model on every rank"
            )


def _mismatch(matrices: Sequence[Matrix], solution: Plan, world: int) -> str | None:
    names = {m.name for m in matrices}
    planned = dict(solution.owners)
    if set(planned) != names:
        return f"the plan does not cover this model: {sorted(set(planned) ^ names)[0]!r} is on one side only"
    wrong = sorted(name for name, owner in planned.items() if not 0 <= owner < world)
    if wrong:
        return f"the plan gives {wrong[0]!r} to rank {planned[wrong[0]]}, but there are {world} ranks"
    return None
