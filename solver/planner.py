"""Who owns what: heuristics, exact methods where these are not proven, even bytes, and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .costs import CostTable
from .exact import Solution, refine
from .heuristics import batch_greedy, level_bytes, longest_first, multifit, round_robin, shorten
from .inputs import BASELINES, ClassKey, Infeasible, Matrix, Rank, SolveOptions, check_matrices, check_ranks
from .problem import FORBIDDEN, Counts, Problem, build_problem, lower_bound
from .result import Plan
from .spread import spread_blocks, xor_labels


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
    options = options or SolveOptions()
    ordered, owners = check_matrices(matrices), check_ranks(ranks)
    problem = build_problem(ordered, owners, costs)
    bound = lower_bound(problem)
    starts = _starts(problem, bound)
    solution = refine(problem, _shortest(problem, starts, bound), options)
    _check_limits(problem, solution)
    even = _most_even(problem, solution, starts, options)
    spread = spread_blocks(ordered, _quota(problem, even.counts))
    return _finished(problem, ordered, xor_labels(spread, owners), even, costs)


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
    ordered, owners = check_matrices(matrices), check_ranks(ranks)
    problem = build_problem(ordered, owners, costs)
    rank_of: dict[str, int] | None = None
    if name == "round-robin":
        classes = {key: s for s, key in enumerate(problem.classes)}
        dealt = round_robin(problem, [classes[m.key] for m in ordered])
        rank_of = {m.name: rank for m, rank in zip(ordered, dealt, strict=True)}
        counts = count_table(problem, ordered, rank_of)
    elif name == "lpt":
        counts = longest_first(problem)
    elif name == "greedy":
        counts = batch_greedy(problem)
    else:
        raise ValueError(f"baseline {name!r} is unknown; use one of {', '.join(BASELINES)}")
    _check_limits(problem, Solution(counts, 1, name))
    if rank_of is None:
        rank_of = spread_blocks(ordered, _quota(problem, counts))
    bound = max(lower_bound(problem), bound_ns or 0)
    return _finished(problem, ordered, rank_of, Solution(counts, bound, name, note="a baseline"), costs)


def _finished(
    problem: Problem,
    matrices: tuple[Matrix, ...],
    owners: Mapping[str, int],
    solution: Solution,
    costs: CostTable,
) -> Plan:
    shapes = {m.shape for m in matrices}
    counts, starts = count_table(problem, matrices, owners), problem.starts[problem.kind_of]
    gap = (problem.makespan(counts) - solution.bound) / problem.makespan(counts)
    proof = f"proven within {gap:.2%} of the optimum by {solution.proof}" if solution.proof else ""
    return Plan(
        owners={m.name: owners[m.name] for m in matrices},
        matrices=matrices,
        loads_ns=tuple((problem.loads(counts) - starts).tolist()),
        bound_ns=solution.bound,
        stage=solution.stage,
        reason="; ".join(filter(None, (proof, solution.note))),
        estimated=tuple(shape for shape in costs.estimated if shape in shapes),
        starts_ns=tuple(starts.tolist()) if starts.any() else (),
    )


def count_table(problem: Problem, matrices: Sequence[Matrix], owners: Mapping[str, int]) -> Counts:
    """Matrices of each class per rank, ``(ranks, classes)``."""
    classes = {key: s for s, key in enumerate(problem.classes)}
    counts = np.zeros((problem.ranks, len(classes)), dtype=np.int64)
    np.add.at(counts, ([owners[m.name] for m in matrices], [classes[m.key] for m in matrices]), 1)
    return counts


def _quota(problem: Problem, counts: Counts) -> dict[ClassKey, list[int]]:
    return {key: counts[:, s].tolist() for s, key in enumerate(problem.classes)}


def _starts(problem: Problem, bound: int) -> list[tuple[str, Counts]]:
    """What the heuristics find, by name."""
    starts = [("lpt", longest_first(problem)), ("greedy", batch_greedy(problem))]
    makespan = min(problem.makespan(counts) for _, counts in starts)
    packed = multifit(problem, bound, makespan)
    return starts if packed is None else [*starts, ("multifit", packed)]


def _shortest(problem: Problem, starts: Sequence[tuple[str, Counts]], bound: int) -> Solution:
    """The best of ``starts``, each improved by local search; the first of equals."""
    best_stage, best = min(starts, key=lambda start: problem.makespan(start[1]))
    for stage, counts in starts:
        if problem.makespan(best) <= bound:
            break
        shorter = shorten(problem, counts, bound)
        if problem.makespan(shorter) < problem.makespan(best):
            best_stage, best = f"{stage}+search", shorter
    return Solution(best, bound, best_stage)


def _most_even(
    problem: Problem, solution: Solution, starts: Sequence[tuple[str, Counts]], options: SolveOptions
) -> Solution:
    """Of all that was found within the slack, with its bytes levelled, what leaves the fewest bytes on any rank.

    Assignments that are even in every class are also the ones that wrong costs hurt least.
    """
    makespan = problem.makespan(solution.counts)
    slack = min(int(makespan * (1 + options.byte_slack)), int(solution.bound / (1 - options.gap_target)))
    limit = max(makespan, slack)
    candidates = [replace(solution, counts=level_bytes(problem, solution.counts, limit))]
    for stage, counts in starts:
        if problem.makespan(counts) <= limit and not np.array_equal(counts, solution.counts):
            note = "; ".join(filter(None, (solution.note, "its bytes are more even than those of what was shorter")))
            candidates.append(replace(solution, counts=level_bytes(problem, counts, limit), stage=stage, note=note))
    return min(candidates, key=lambda item: int(problem.rank_bytes(item.counts).max()))


def _check_limits(problem: Problem, solution: Solution) -> None:
    if problem.makespan(solution.counts) >= FORBIDDEN:
        raise Infeasible(
            "no assignment within the limits on memory and pools was found; raise memory, widen pools, or add ranks"
        )
