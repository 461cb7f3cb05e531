"""Who owns what: heuristics, exact methods where these are not proven, even bytes, and labels; and the plan."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .exact import Solution, refine
from .heuristics import batch_greedy, level_bytes, longest_first, multifit, shorten
from .inputs import ClassKey, CostTable, Matrix, Rank, Shape, SolveOptions, check_matrices, check_ranks
from .problem import Counts, Problem, build_problem, lower_bound

_MOST_ROWS = 32  # of the report
_BAR = 24  # characters of the bar of the slowest rank


@dataclass(frozen=True)
class Plan:
    """An owner for each matrix.

    Attributes:
        owners: rank index per matrix name; every matrix once, sorted by name.
        matrices: the matrices, sorted by name.
        loads_ns: cost per rank in nanoseconds.
        bound_ns: nanoseconds that no assignment can go below, proven.
        stage: what found the assignment: ``"lpt"``, ``"greedy"``, ``"multifit"``, each perhaps with ``"+search"``, or
            ``"milp"`` or ``"patterns"``.
        reason: why the search ended there.
        estimated: the shapes whose costs are estimates.
        starts_ns: of each rank, nanoseconds of work that it has before; empty if none has any.

    Raises:
        ValueError: owners of other matrices, or that are no ranks.
    """

    owners: Mapping[str, int]
    matrices: tuple[Matrix, ...]
    loads_ns: tuple[int, ...]
    bound_ns: int
    stage: str
    reason: str
    estimated: tuple[Shape, ...] = ()
    starts_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if list(self.owners) != [m.name for m in self.matrices]:
            raise ValueError("plan: owners and matrices must name the same matrices, sorted; plan again")
        for name, rank in self.owners.items():
            if not 0 <= rank < self.world:
                raise ValueError(
                    f"plan: the owner of {name!r} is rank {rank}, outside 0 … {self.world - 1}; plan again"
                )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.loads_ns)

    @property
    def ends_ns(self) -> tuple[int, ...]:
        """Nanoseconds per rank, with the work that it has before."""
        pairs = zip(self.loads_ns, self.starts_ns or (0,) * self.world, strict=True)
        return tuple(load + start for load, start in pairs)

    @property
    def makespan_ns(self) -> int:
        """Nanoseconds until the last rank is done."""
        return max(self.ends_ns)

    @property
    def gap(self) -> float:
        """``(makespan - bound) / makespan``: the most that any other assignment could save."""
        return (self.makespan_ns - self.bound_ns) / max(1, self.makespan_ns)

    @property
    def rank_matrices(self) -> tuple[int, ...]:
        """Matrices per rank."""
        owned = Counter(self.owners.values())
        return tuple(owned[rank] for rank in range(self.world))

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes per rank."""
        nbytes = [0] * self.world
        for m in self.matrices:
            nbytes[self.owners[m.name]] += m.nbytes
        return tuple(nbytes)

    @property
    def block_balance(self) -> dict[str, tuple[int, int]]:
        """Per block, its largest owner's bytes, and an even share: the mean over all ranks, or the largest matrix."""
        owned: dict[str, dict[int, int]] = {}
        largest: dict[str, int] = {}
        for m in self.matrices:
            row = owned.setdefault(m.block, {})
            row[self.owners[m.name]] = row.get(self.owners[m.name], 0) + m.nbytes
            largest[m.block] = max(largest.get(m.block, 0), m.nbytes)
        return {
            block: (max(row.values()), max(largest[block], -(-sum(row.values()) // self.world)))
            for block, row in owned.items()
        }

    @property
    def digest(self) -> str:
        """SHA-256 of world size, owners, shapes and blocks: equal on all ranks, or they do not run the same plan."""
        content = [self.world, [[m.name, m.rows, m.cols, m.block, self.owners[m.name]] for m in self.matrices]]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def report(self) -> str:
        """The plan as text for people: makespan, bound, gap, stage, and a row per rank.

        Of many ranks, only the most and the least loaded have a row.
        """
        if not self.matrices:
            return f"no matrices over {self.world} ranks"
        balance = self.block_balance.values()
        largest, even = sum(most for most, _ in balance), sum(even for _, even in balance)
        estimated = f"estimated for {len(self.estimated)} of {len({m.shape for m in self.matrices})} shapes"
        before = f" with what was planned before, up to {_ms(max(self.starts_ns))}" if self.starts_ns else ""
        lines = [
            f"{len(self.matrices)} matrices in {len(balance)} block{'s' * (len(balance) > 1)} over {self.world} ranks",
            f"makespan  {_ms(self.makespan_ns)}{before}",
            f"bound     {_ms(self.bound_ns)}  (gap {self.gap:.2%})",
            f"stage     {self.stage}: {self.reason}",
            f"costs     {estimated if self.estimated else 'measured'}",
            f"blocks    largest owner {largest / len(balance) / 2**20:.1f} MiB on average, "
            f"{largest / even:.2f} times an even share",
            f"digest    {self.digest}",
            "",
            f"{'rank':>6} {'load':>12} {'of makespan':>12}  {'':<{_BAR}} {'matrices':>8} {'MiB':>10}",
        ]
        owned = zip(self.loads_ns, self.rank_matrices, self.rank_bytes, strict=True)
        makespan = self.makespan_ns
        rows = [
            f"{rank:>6} {_ms(load):>12} {load / makespan:>12.1%}  "
            f"{'#' * round(_BAR * load / makespan):<{_BAR}} {count:>8} {nbytes / 2**20:>10.1f}"
            for rank, (load, count, nbytes) in enumerate(owned)
        ]
        return "\n".join(lines + _shorten(rows, self.loads_ns))

    def to_json(self) -> dict[str, Any]:
        """Plain types that ``json.dumps`` takes and ``from_json`` reads."""
        return {
            "matrices": [
                [m.name, m.rows, m.cols, m.block, m.nbytes, m.pool, self.owners[m.name]] for m in self.matrices
            ],
            "loads_ns": list(self.loads_ns),
            "bound_ns": self.bound_ns,
            "stage": self.stage,
            "reason": self.reason,
            "estimated": [list(shape) for shape in self.estimated],
            "starts_ns": list(self.starts_ns),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote, to which nothing was done since: files have a checksum."""
        rows = [(Matrix(*row[:6]), row[6]) for row in data["matrices"]]
        return cls(
            owners={m.name: rank for m, rank in rows},
            matrices=tuple(m for m, _ in rows),
            loads_ns=tuple(data["loads_ns"]),
            bound_ns=data["bound_ns"],
            stage=data["stage"],
            reason=data["reason"],
            estimated=tuple((small, large) for small, large in data["estimated"]),
            starts_ns=tuple(data.get("starts_ns", ())),  # files of earlier versions lack it
        )


def _shorten(rows: Sequence[str], loads: Sequence[int]) -> list[str]:
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda rank: (-loads[rank], rank))
    half = _MOST_ROWS // 2
    middle = order[half:-half]
    between = f"   … {len(middle)} more ranks, {_ms(loads[middle[0]])} to {_ms(loads[middle[-1]])} …"
    return [rows[r] for r in order[:half]] + [between] + [rows[r] for r in order[-half:]]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"


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
    problem: Problem, matrices: tuple[Matrix, ...], owners: Mapping[str, int], solution: Solution, costs: CostTable
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
