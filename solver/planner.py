"""Who owns what: the planner, from matrices and costs to a frozen plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType

from .costs import CostTable
from .inputs import Matrix, Rank, SolveOptions
from .result import Plan


def plan(
    matrices: Iterable[Matrix], ranks: int | Sequence[Rank], costs: CostTable, options: SolveOptions | None = None
) -> Plan:
    """Assign every matrix to an owner so that the slowest rank finishes early.

    Minimises ``max_r Σ_s T_s(n[s, r])`` over counts per class: heuristics and local search first, the exact methods
    where these are not proven within the gap. Then, at those counts, spreads each block over the ranks, and labels
    ranks that are alike by the XOR layout. Whatever happens to a MILP solver, the best plan so far is returned, with a
    warning that says what happened.

    Args:
        ranks: a number of equal ranks on one node, or one ``Rank`` each.

    Raises:
        ValueError: no matrices, no ranks, two matrices of one name, a shape without costs, or limits that leave no room
            (named).
    """
    found: Plan = _assignment().plan(matrices, ranks, costs, options or SolveOptions())
    return found


def baseline(
    name: str, matrices: Iterable[Matrix], ranks: int | Sequence[Rank], costs: CostTable, bound_ns: int | None = None
) -> Plan:
    """The plan of a simpler rule, for comparison.

    ``"round-robin"`` deals the matrices out in the order of their names; ``"lpt"`` gives the longest matrix next, by
    the cost of one matrix alone, to the rank with the least work; ``"greedy"`` is LPT that knows what batches cost.

    Args:
        bound_ns: a bound that was proven elsewhere, to compare with.

    Raises:
        ValueError: as ``plan``; another name.
    """
    found: Plan = _assignment().baseline(name, matrices, ranks, costs, bound_ns)
    return found


def _assignment() -> ModuleType:
    """What searches, which is loaded when there is something to plan, and not by ``import dmuon``."""
    return import_module(f"{__package__}.assignment")
