"""Owner assignment: which rank runs Newton–Schulz for which matrix. No torch; PuLP only when a MILP is solved."""

from .costs import CostTable, unmeasured_batch
from .inputs import Infeasible, Matrix, Method, Rank, Shape, SolveOptions
from .planner import plan
from .result import Plan

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
