"""Owner assignment: which rank runs Newton–Schulz for which matrix. No torch; PuLP only when a MILP is solved."""

from .inputs import CostTable, Infeasible, Matrix, Method, Rank, Shape, SolveOptions, unmeasured_batch
from .planner import Plan, plan

__all__ = [
    "CostTable",
    "Infeasible",
    "Matrix",
    "Method",
    "Plan",
    "Rank",
    "Shape",
    "SolveOptions",
    "plan",
    "unmeasured_batch",
]
