"""Who owns what: heuristics, exact methods where these are not proven, even bytes, and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .costs import CostTable
from .exact import Solution, refine
from .heuristics import batch_greedy, level_bytes, longest_first, multifit, shorten
from .inputs import ClassKey, Matrix, Rank, SolveOptions, check_matrices, check_ranks
from .problem import Counts, Problem, build_problem, lower_bound
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
        ValueError: no matrices, no ranks, two matrices of one name, a shape without costs, or a pool that no rank
            takes.
    """
    options = options or SolveOptions()
    ordered, owners = check_matrices(matrices), check_ranks(ranks)
    problem = build_problem(ordered, owners, costs)
    bound = lower_bound(problem)
    starts = _starts(problem, bound)
    solution = refine(problem, _shortest(problem, starts, bound), options)
    even = _most_even(problem, solution, starts, options)
    spread = spread_blocks(ordered, {key: even.counts[:, s].tolist() for s, key in enumerate(problem.classes)})
    return _finished(problem, ordered, xor_labels(spread, owners), even, costs)


def _finished(
    problem: Problem,
    matrices: tuple[Matrix, ...],
    owners: Mapping[str, int],
    solution: Solution,
    costs: CostTable,
) -> Plan:
    shapes = {m.shape for m in matrices}
    classes, starts = {key: s for s, key in enumerate(problem.classes)}, problem.starts[problem.kind_of]
    counts = np.zeros((problem.ranks, len(classes)), dtype=np.int64)
    np.add.at(counts, ([owners[m.name] for m in matrices], [classes[m.key] for m in matrices]), 1)
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


# -- from counts per rank to owners -----------------------------------------------------------------------------------


def spread_blocks(matrices: Sequence[Matrix], quota: Mapping[ClassKey, Sequence[int]]) -> dict[str, int]:
    """Name an owner for each matrix so that each rank owns exactly its quota of each class.

    A block's collective takes as long as its largest owner's bytes. So of each block a rank is due a share that is in
    proportion to the bytes that it still has to take, and the largest matrix goes to the rank to which most is due. The
    order of ``matrices`` does not matter.

    Args:
        quota: ``quota[class][rank]``: matrices of that class that the rank must own, and 0 where it may own none.

    Returns:
        rank per matrix name, in the order of ``matrices``.
    """
    left = {key: np.array(counts, dtype=np.int64) for key, counts in quota.items()}
    members, nbytes = Counter(m.key for m in matrices), Counter[ClassKey]()
    blocks: dict[str, list[Matrix]] = {}
    for m in matrices:
        nbytes[m.key] += m.nbytes
        blocks.setdefault(m.block, []).append(m)
    to_take = np.sum([counts * (nbytes[key] / members[key]) for key, counts in left.items()], axis=0)
    owners: dict[str, int] = {}
    for _, block in sorted(blocks.items()):
        due = to_take * (sum(m.nbytes for m in block) / to_take.sum())
        for m in sorted(block, key=lambda m: (-m.nbytes, m.key, m.name)):
            room = left[m.key]
            able = np.flatnonzero(room)
            most = able[due[able] == due[able].max()]
            rank = int(most[room[most].argmax()])  # of equals the one that must take most of the class, then the lowest
            owners[m.name] = rank
            room[rank] -= 1
            due[rank] -= m.nbytes
            to_take[rank] -= m.nbytes
    return {m.name: owners[m.name] for m in matrices}


def xor_labels(owners: Mapping[str, int], ranks: Sequence[Rank]) -> dict[str, int]:
    """The owners by their labels: owner ``k`` goes to node ``i = k mod N`` of ``N`` and to lane ``(k div N) XOR i``.

    A rank's lane is its position within its node: ranks of one lane share a rail of the network, ranks of one node its
    links. So owners that follow each other get other nodes and other rails.
    Where a node has no power of two of ranks, rotation by ``i`` replaces XOR. Relabelling moves whole ranks, and only
    interchangeable ranks, of equal traits, trade labels. On one node all labels stay.

    Args:
        ranks: in the order of their indices.

    Returns:
        rank per matrix name, in the order of ``owners``.
    """
    order = {node: i for i, node in enumerate(sorted({rank.node for rank in ranks}))}
    nodes = np.array([order[rank.node] for rank in ranks])
    lanes = np.empty_like(nodes)
    for node in order.values():
        members = np.flatnonzero(nodes == node)
        lanes[members] = np.arange(len(members))
    width = int(lanes.max()) + 1
    turn = lanes ^ (nodes % width) if width & (width - 1) == 0 else (lanes - nodes) % width
    step = np.lexsort((nodes, turn)).argsort()  # when a place is due
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, rank in enumerate(ranks):
        alike.setdefault(rank.traits, []).append(i)
    label = np.arange(len(ranks))
    for group in map(np.array, alike.values()):
        label[group] = group[step[group].argsort()]
    return {name: int(label[rank]) for name, rank in owners.items()}
