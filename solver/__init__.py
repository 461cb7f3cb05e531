"""Owner assignment: which rank runs Newton–Schulz for which matrix. No torch; PuLP only when a MILP is solved."""

from .costs import CostTable
from .planner import Plan, baselines, plan
from .types import Matrix, Method, Rank, Shape, SolveOptions

__all__ = ["CostTable", "Matrix", "Method", "Plan", "Rank", "Shape", "SolveOptions", "baselines", "plan"]
