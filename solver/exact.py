"""The exact methods: raise the bound, shorten the makespan, until they are within the gap."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from .child import SolverFailed, run_search
from .heuristics import shorten
from .inputs import SolveOptions
from .pattern_milp import PatternPool
from .problem import Counts, Problem

# Items; beyond it one pricing problem takes about a second, and classes are so large that the envelope bound is tight.
_LARGEST_KNAPSACK = 20_000
_DIVES = (1.0, 0.5, 0.0, 0.75, 0.25)  # capacities to dive at, from the bound (0) to the goal (1)
_FINEST = 1000  # capacities nearer to each other than this part of the makespan are not told apart


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Counts and what is known of them.

    Attributes:
        bound: nanoseconds that no assignment can go below.
        stage: what found the counts.
        proof: what proved that they are within the gap; empty if nothing did.
        note: why the search ended, where it is not the proof, and what else is to be said.
        cut_off: the search did not end by itself.
    """

    counts: Counts
    bound: int
    stage: str
    proof: str = ""
    note: str = ""
    cut_off: bool = False


def refine(problem: Problem, start: Solution, options: SolveOptions) -> Solution:
    """``start`` or better, with a bound at least as high, searched for in a child process.

    Column generation raises the bound as far as the gap asks for. If the gap stays open, the pattern MILP looks for
    shorter counts at a few capacities, and where there are few patterns, the one over all of them decides. Whatever the
    solver does, the best so far is returned, with a warning where it failed.
    """
    makespan = problem.makespan(start.counts)
    if _within(makespan, start.bound, options):
        return replace(start, proof="the envelope bound")
    if options.method == "greedy":
        return replace(start, note="method 'greedy' runs no MILP")
    items = int(problem.most(makespan).max(axis=1).sum())
    if options.method == "auto" and items > _LARGEST_KNAPSACK:
        return replace(start, note=f"the MILP's pricing problem has {items} items: too many")
    try:
        found: Solution
        found, fault = run_search((problem, start, options), options.time_limit_s)
        handed_out = bool((found.counts >= 0).all()) and found.counts.sum(axis=0).tolist() == list(problem.members)
        if not handed_out or not start.bound <= found.bound <= problem.makespan(found.counts):
            raise SolverFailed("its answer does not hold")
        if found.cut_off and not found.note:
            found = replace(found, note=f"failed: {fault}")
    except SolverFailed as failure:
        found = replace(start, note=f"failed: {failure}", cut_off=True)
    if found.cut_off:
        warnings.warn(f"dmuon.solver: the MILP {found.note}. The plan is the best so far.", stacklevel=6)
    return found


def search(problem: Problem, start: Solution, options: SolveOptions, report: Callable[[Solution], None]) -> None:
    """Improve ``start`` until it is proven within the gap, or the time is over.

    Args:
        report: takes the best so far, whenever it has become better and at the end.
    """
    found = _Search(problem, start, options, report)
    try:
        pool = PatternPool(problem, found.deadline)
        found.run(pool)
        if pool.clocked:
            later = "a time limit on one MILP had a say, so that another run may find another plan"
            found.tell(note="; ".join(filter(None, (found.best.note, later))))
    except Exception as failure:  # whatever PuLP, its solver and their files do
        kind = "" if isinstance(failure, SolverFailed) else f"{type(failure).__name__}: "
        found.tell(note=f"failed: {kind}{failure}", cut_off=True)


class _Search:
    """State of one refinement; ``best`` holds at any time, so that it can end at any time."""

    def __init__(
        self, problem: Problem, start: Solution, options: SolveOptions, report: Callable[[Solution], None]
    ) -> None:
        self.problem, self.options, self.report = problem, options, report
        self.best = start
        self.envelope = start.bound  # needs no solver
        self.makespan = problem.makespan(start.counts)
        self.deadline = time.monotonic() + options.time_limit_s

    def run(self, pool: PatternPool) -> None:
        self.tell(cut_off=True)  # until the end is told
        for kind, row in zip(self.problem.kind_of.tolist(), self.best.counts, strict=True):
            pool.add(kind, row)
        methods = {
            "column generation": self._raise_bound,
            "the pattern MILP": self._dive,
            "the MILP of all patterns": self._bisect,
        }
        for proof, improve in methods.items():
            improve(pool)
            if self._is_within():
                self.tell(proof=proof, cut_off=False)
                return
        late = time.monotonic() > self.deadline
        gap = (self.makespan - self.best.bound) / self.makespan
        stopped = f"stopped at the time limit of {self.options.time_limit_s:g} s"
        self.tell(note=stopped if late else f"found nothing shorter; the gap stays {gap:.2%}", cut_off=late)

    def tell(self, **news: object) -> None:
        """Note what is new of the best so far, and report it."""
        self.best = replace(self.best, **news)  # type: ignore[arg-type]
        self.report(self.best)

    def _raise_bound(self, pool: PatternPool) -> None:
        """Try what the gap asks for; if that is out of reach, bisect for the highest bound that can be proven."""
        high = math.ceil(self.makespan * (1 - self.options.gap_target)) - 1
        if high < self.best.bound:
            return
        if pool.refute(high) == "infeasible":
            self.tell(bound=high + 1)
            return
        while (high - self.best.bound) * _FINEST > self.makespan and time.monotonic() < self.deadline:
            middle = (self.best.bound + high) // 2
            if pool.refute(middle) == "infeasible":
                self.tell(bound=middle + 1)
            else:
                high = middle

    def _dive(self, pool: PatternPool) -> None:
        """Try patterns at a few capacities: a tight one packs most ranks well, a wide one leaves room on the last."""
        bound = self.best.bound
        for part in _DIVES:
            capacity = bound + int((self._goal() - bound) * part)
            if self._is_within() or time.monotonic() > self.deadline or not bound <= capacity < self.makespan:
                return
            counts = pool.assign(capacity)
            if counts is not None:
                self._adopt(counts)

    def _bisect(self, pool: PatternPool) -> None:
        """If there are few patterns, ask for capacities between bound and makespan, first for one that is enough."""
        if not pool.add_all(self.makespan - 1):
            return
        capacity = self._goal()
        while not self._is_within() and time.monotonic() < self.deadline:
            status, counts = pool.cover(capacity)
            if counts is not None:
                self._adopt(counts)
            elif status == "infeasible":
                self.tell(bound=capacity + 1)
            else:
                return
            capacity = min(self.makespan - 1, max(self._goal(), (self.best.bound + self.makespan) // 2))

    def _adopt(self, counts: Counts) -> None:
        counts = shorten(self.problem, counts, self.best.bound)
        makespan = self.problem.makespan(counts)
        if makespan < self.best.bound:
            claimed = self.best.bound
            self.tell(bound=self.envelope)
            raise SolverFailed(f"a bound of {claimed} ns was claimed; an assignment takes {makespan} ns")
        if makespan < self.makespan:
            self.makespan = makespan
            self.tell(counts=counts, stage="patterns")

    def _goal(self) -> int:
        """The longest makespan that is within the gap."""
        return int(self.best.bound / (1 - self.options.gap_target))

    def _is_within(self) -> bool:
        return _within(self.makespan, self.best.bound, self.options)


def _within(makespan: int, bound: int, options: SolveOptions) -> bool:
    return makespan - bound <= options.gap_target * makespan
