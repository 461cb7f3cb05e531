"""Plans that the planner would not make."""

from __future__ import annotations

from dataclasses import replace

from dmuon import OwnerPlan


def rotated(plan: OwnerPlan) -> OwnerPlan:
    """The same plan with every matrix one rank further."""
    old = plan.solution
    owners = {name: (owner + 1) % plan.world for name, owner in old.owners.items()}
    return replace(plan, solution=replace(old, owners=owners, loads_ns=old.loads_ns[-1:] + old.loads_ns[:-1]))
