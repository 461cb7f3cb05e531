"""Owners where some matrices may belong to some ranks only, such as the experts of one expert-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dmuon.simulation.network import Topology
from dmuon.simulation.workload import expert_number
from dmuon.solver import CostTable, Matrix, Plan, Rank, SolveOptions
from dmuon.solver import plan as solve_plan


def pooled(
    matrices: Sequence[Matrix], ranks: Sequence[Rank], topology: Topology
) -> tuple[tuple[Matrix, ...], tuple[Rank, ...]]:
    """The same matrices and ranks, with a pool for each part of the experts that ``topology`` divides."""
    if topology.ep == 1:
        return tuple(matrices), tuple(ranks)
    counts: dict[tuple[str, str], int] = {}  # of a block's gate_up projections there are twice as many as experts

    def stack(m: Matrix) -> tuple[str, str]:
        return m.block, m.name.partition("[")[0] if m.name.endswith("]") else ""

    for m in matrices:
        number = expert_number(m.name)
        if number is not None:
            counts[stack(m)] = max(counts.get(stack(m), 0), number + 1)

    def of(m: Matrix) -> Matrix:
        number = expert_number(m.name)
        return m if number is None else replace(m, pool=f"experts {number * topology.ep // counts[stack(m)]}")

    _, shard, _ = topology.coordinates()
    holders = (frozenset({"", f"experts {shard[rank.index] % topology.ep}"}) for rank in ranks)
    return tuple(map(of, matrices)), tuple(
        replace(rank, pools=pools) for rank, pools in zip(ranks, holders, strict=True)
    )


def plan_pools(matrices: Sequence[Matrix], ranks: Sequence[Rank], costs: CostTable, options: SolveOptions) -> Plan:
    """Plan each pool over its ranks, as expert groups are dedicated: on their own. Pools that are alike share a plan.

    Raises:
        ValueError: as the solver.
    """
    pools = dict.fromkeys(m.pool for m in matrices)
    if len(pools) < 2:
        return solve_plan(matrices, ranks, costs, options)
    owners: dict[str, int] = {}
    loads = [0] * len(ranks)
    bounds = []
    stages = set()
    known: dict[object, Plan] = {}
    for pool in pools:
        members = sorted((m for m in matrices if m.pool == pool), key=lambda m: m.name)
        able = [rank for rank in ranks if rank.pools is None or pool in rank.pools]
        first = able[0].node
        alone = [replace(rank, index=i, node=rank.node - first, pools=None) for i, rank in enumerate(able)]
        # By position: names of alike pools differ in their numbers only.
        names = [f"{i:06}" for i in range(len(members))]
        free = [replace(m, name=name, pool="") for m, name in zip(members, names, strict=True)]
        key = (tuple(free), tuple(alone))
        solved = known.get(key)
        if solved is None:
            solved = known[key] = solve_plan(free, alone, costs, options)
        owners.update((m.name, able[solved.owners[name]].index) for m, name in zip(members, names, strict=True))
        for rank, load in zip(able, solved.loads_ns, strict=True):
            loads[rank.index] += load
        bounds.append(solved.bound_ns)
        stages.add(solved.stage)
    ordered = tuple(sorted(matrices, key=lambda m: m.name))
    shapes = {m.shape for m in ordered}
    return Plan(
        owners={m.name: owners[m.name] for m in ordered},
        matrices=ordered,
        loads_ns=tuple(loads),
        bound_ns=max(bounds),
        stage="+".join(sorted(stages)),
        reason=f"{len(pools)} pools, each planned over its own ranks",
        estimated=tuple(shape for shape in costs.estimated if shape in shapes),
        pool_ranks={pool: sum(rank.pools is None or pool in rank.pools for rank in ranks) for pool in pools},
    )
