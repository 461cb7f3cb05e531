"""Who owns what: the planner, from matrices and costs to a frozen plan."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bound import lower_bound
from .costs import CostTable
from .greedy import batch_greedy, longest_first
from .milp import SolverFailed, search_space, solve_milp
from .multifit import multifit
from .problem import Counts, Problem, build_problem
from .report import format_plan
from .search import level_bytes, shorten
from .spread import block_bytes, spread_blocks
from .types import Matrix, Rank, Shape, SolveOptions, check_matrices, check_ranks, is_int

__all__ = ["Plan", "baselines", "plan"]

_SCHEMA = 1


@dataclass(frozen=True)
class Plan:
    """An owner for each matrix.

    Attributes:
        owners: rank index per matrix name; every matrix once, sorted by name.
        matrices: the matrices, sorted by name.
        loads_ns: cost per rank in nanoseconds.
        bound_ns: nanoseconds that no assignment can go below, proven.
        stage: what found the assignment: ``"lpt"``, ``"greedy"``, ``"multifit"``, each perhaps with ``"+search"``, or
            ``"milp"``.
        reason: why the search ended there.
        estimated: the shapes whose costs are estimates.

    Raises:
        ValueError: owners, loads and bound that contradict each other.
    """

    owners: Mapping[str, int]
    matrices: tuple[Matrix, ...]
    loads_ns: tuple[int, ...]
    bound_ns: int
    stage: str
    reason: str
    estimated: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        if list(self.owners) != [m.name for m in self.matrices]:
            raise ValueError("plan: owners and matrices must name the same matrices, sorted; plan again")
        for name, rank in self.owners.items():
            if not 0 <= rank < self.world:
                raise ValueError(
                    f"plan: the owner of {name!r} is rank {rank}, outside 0 … {self.world - 1}; plan again"
                )
        if not all(is_int(ns) and ns >= 0 for ns in (*self.loads_ns, self.bound_ns)):
            raise ValueError("plan: loads must be whole nanoseconds, and so must the bound; plan again")
        if not 0 < self.bound_ns <= self.makespan_ns:
            raise ValueError(
                f"plan: bound {self.bound_ns} ns is not in (0, makespan {self.makespan_ns} ns]; plan again"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.loads_ns)

    @property
    def makespan_ns(self) -> int:
        """Nanoseconds of the slowest rank."""
        return max(self.loads_ns)

    @property
    def gap(self) -> float:
        """``(makespan - bound) / makespan``: the most that any other assignment could save."""
        return (self.makespan_ns - self.bound_ns) / self.makespan_ns

    @property
    def counts(self) -> tuple[dict[Shape, int], ...]:
        """Matrices of each shape, per rank."""
        table: tuple[dict[Shape, int], ...] = tuple({} for _ in self.loads_ns)
        for m in self.matrices:
            row = table[self.owners[m.name]]
            row[m.shape] = row.get(m.shape, 0) + 1
        return table

    @property
    def rank_matrices(self) -> tuple[int, ...]:
        """Matrices per rank."""
        return tuple(sum(row.values()) for row in self.counts)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes per rank."""
        held = [0] * self.world
        for m in self.matrices:
            held[self.owners[m.name]] += m.nbytes
        return tuple(held)

    @property
    def block_balance(self) -> dict[str, tuple[int, int]]:
        """Per block, its largest owner's bytes and the least that these could be (mean over ranks, largest matrix)."""
        least: dict[str, list[int]] = {}
        for m in self.matrices:
            least.setdefault(m.block, []).append(m.nbytes)
        return {
            block: (max(row.values()), max(-(-sum(least[block]) // self.world), max(least[block])))
            for block, row in block_bytes(self.matrices, self.owners).items()
        }

    @property
    def digest(self) -> str:
        """SHA-256 of world size, owners, shapes and blocks: equal on all ranks, or they do not run the same plan."""
        content = [self.world, [[m.name, m.rows, m.cols, m.block, self.owners[m.name]] for m in self.matrices]]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def report(self) -> str:
        """The plan as text for people."""
        return format_plan(self)

    def to_json(self) -> dict[str, Any]:
        """Plain types that ``json.dumps`` takes and ``from_json`` reads."""
        return {
            "schema": _SCHEMA,
            "digest": self.digest,
            "matrices": [[m.name, m.rows, m.cols, m.block, m.nbytes, self.owners[m.name]] for m in self.matrices],
            "loads_ns": list(self.loads_ns),
            "makespan_ns": self.makespan_ns,
            "bound_ns": self.bound_ns,
            "stage": self.stage,
            "reason": self.reason,
            "estimated": [list(shape) for shape in self.estimated],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote.

        Raises:
            ValueError: another schema, a field missing or ill-typed, or content that does not match its digest.
        """
        if not isinstance(data, Mapping) or data.get("schema") != _SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"plan: schema is {found!r}, not {_SCHEMA}; write it again with Plan.to_json")
        try:
            rows = [(Matrix(*row[:5]), row[5]) for row in data["matrices"]]
            result = cls(
                owners={m.name: rank for m, rank in rows},
                matrices=tuple(m for m, _ in rows),
                loads_ns=tuple(data["loads_ns"]),
                bound_ns=data["bound_ns"],
                stage=data["stage"],
                reason=data["reason"],
                estimated=tuple((small, large) for small, large in data["estimated"]),
            )
            digest, makespan = data["digest"], data["makespan_ns"]
        except KeyError as error:
            raise ValueError(f"plan: field {error} is missing; write it again with Plan.to_json") from error
        except (TypeError, IndexError) as error:
            raise ValueError(f"plan: a field is ill-typed ({error}); write it again with Plan.to_json") from error
        if result.digest != digest:
            raise ValueError(
                f"plan: owners, shapes or blocks were changed: digest {result.digest}, recorded {digest}; plan again"
            )
        if result.makespan_ns != makespan:
            raise ValueError(f"plan: loads reach {result.makespan_ns} ns, recorded makespan {makespan} ns; plan again")
        return result


def plan(
    matrices: Iterable[Matrix],
    ranks: int | Sequence[Rank],
    costs: CostTable,
    options: SolveOptions | None = None,
) -> Plan:
    """Assign every matrix to an owner so that the slowest rank finishes early.

    Minimises ``max_r Σ_s T_s(n[s, r])`` over counts per shape class: heuristics and local search first, the MILP
    where it pays. Then, at those counts, spreads each block over the ranks. Whatever happens to the MILP solver, the
    best plan so far is returned, with a warning that says what happened.

    Raises:
        ValueError: no matrices, no ranks, two matrices of one name, or a shape without costs.
    """
    options = options or SolveOptions()
    ordered, world = check_matrices(matrices), check_ranks(ranks)
    problem = build_problem(ordered, world, costs)
    bound = lower_bound(problem)
    stage, counts = _heuristic(problem, bound)
    counts, bound, stage, reason = _refine(problem, counts, bound, stage, options)
    makespan = problem.makespan(counts)
    counts = level_bytes(problem, counts, makespan)
    return Plan(
        owners=spread_blocks(problem, ordered, counts),
        matrices=ordered,
        loads_ns=tuple(problem.loads(counts).tolist()),
        bound_ns=bound,
        stage=stage,
        reason=reason,
        estimated=tuple(shape for shape in costs.estimated if shape in problem.shapes),
    )


def baselines(matrices: Iterable[Matrix], ranks: int | Sequence[Rank], costs: CostTable) -> dict[str, int]:
    """Makespan in nanoseconds of common practice: round robin by name, and LPT on the cost of one matrix.

    Raises:
        ValueError: as ``plan``.
    """
    ordered, world = check_matrices(matrices), check_ranks(ranks)
    problem = build_problem(ordered, world, costs)
    robin = np.zeros((world, len(problem.shapes)), dtype=np.int64)
    for i, m in enumerate(ordered):
        robin[i % world, problem.shapes.index(m.shape)] += 1
    return {"round robin": problem.makespan(robin), "LPT": problem.makespan(longest_first(problem))}


def _heuristic(problem: Problem, bound: int) -> tuple[str, Counts]:
    """The best of LPT, greedy and MULTIFIT, each improved by local search; the first of equals."""
    starts = [("lpt", longest_first(problem)), ("greedy", batch_greedy(problem))]
    known = min(problem.makespan(counts) for _, counts in starts)
    packed = multifit(problem, bound, known)
    if packed is not None:
        starts.append(("multifit", packed))
    best_stage, best = min(starts, key=lambda start: problem.makespan(start[1]))
    for stage, counts in starts:
        shorter = shorten(problem, counts, bound)
        if problem.makespan(shorter) < problem.makespan(best):
            best_stage, best = f"{stage}+search", shorter
    return best_stage, best


def _refine(
    problem: Problem, counts: Counts, bound: int, stage: str, options: SolveOptions
) -> tuple[Counts, int, str, str]:
    """Run the MILP where it pays: ``(counts, bound, stage, reason)``."""
    makespan = problem.makespan(counts)
    if makespan - bound <= options.gap_target * makespan:
        return counts, bound, stage, f"proven within {(makespan - bound) / makespan:.2%} of the optimum by the bound"
    if options.method == "greedy":
        return counts, bound, stage, "method 'greedy' runs no MILP"
    binaries = search_space(problem, makespan)
    if options.method == "auto" and binaries > options.search_space_threshold:
        return counts, bound, stage, f"the MILP has {binaries} binaries, more than {options.search_space_threshold}"
    try:
        result = solve_milp(problem, counts, bound, options)
    except SolverFailed as failure:
        warnings.warn(
            f"dmuon.solver: the MILP failed: {failure}. The plan is the best of the heuristics.", stacklevel=3
        )
        return counts, bound, stage, f"the MILP failed: {failure}"
    if not result.bound:
        warnings.warn(f"dmuon.solver: the MILP {result.note}. The plan is the best so far.", stacklevel=3)
    bound = max(bound, result.bound)
    if problem.makespan(result.counts) < makespan:
        return result.counts, bound, "milp", result.note
    return counts, bound, stage, f"the MILP found nothing shorter and {result.note}"
