"""The exact methods: raise the bound, shorten the makespan, until they are within the gap."""

from __future__ import annotations

import math
import random
import time
import warnings
from dataclasses import dataclass, replace

import numpy as np

from .compact_milp import MilpSolver, assign_within, part_of, search_space
from .inputs import SolveOptions
from .local_search import shorten
from .milp_process import SolverFailed
from .pattern_milp import PatternPool, knapsack_items
from .problem import Counts, Problem

# Items; beyond it one pricing problem takes about a second, and classes are so large that the envelope bound is tight.
_LARGEST_KNAPSACK = 20_000
_LARGEST_MODEL = 50_000  # binaries; beyond it, building the model takes longer than any time limit
_DIVES = (1.0, 0.5, 0.0, 0.75, 0.25)  # capacities to dive at, from the bound (0) to the goal (1)
_REPACK_BINARIES = 800  # of one MILP over a few ranks
_REPACK_S = 1.0  # for it
_REPACK_FAILURES = 12
_CHOOSE_S = 3.0  # for the choice among counts that are equally good
_FINEST = 1000  # capacities nearer to each other than this part of the makespan are not told apart


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Counts and what is known of them.

    Attributes:
        bound: nanoseconds that no assignment can go below.
        stage: what found the counts.
        proof: what proved that they are within the gap; empty if nothing did.
        note: why the search ended, where it is not the proof, and what else is to be said.
    """

    counts: Counts
    bound: int
    stage: str
    proof: str = ""
    note: str = ""


def refine(problem: Problem, start: Solution, options: SolveOptions, failures: list[str] | None = None) -> Solution:
    """``start`` or better, with a bound at least as high.

    Column generation raises the bound as far as the gap asks for. If the gap stays open, shorter counts are looked for:
    by the pattern MILP at a few capacities, by small MILPs that repack the slowest rank with a few others, and, below
    the search-space threshold, by the compact MILP over all ranks, whose "no" raises the bound too. Whatever the solver
    does, the best so far is returned, with a warning where it failed.

    Args:
        failures: of solvers since the caller began: after one, none is tried again. This one's are added.
    """
    makespan = problem.makespan(start.counts)
    if _within(makespan, start.bound, options):
        return replace(start, proof="the envelope bound")
    if options.method == "greedy":
        return replace(start, note="method 'greedy' runs no MILP")
    if failures:
        return replace(start, note=f"failed before: {failures[0]}")
    makespan = min(makespan, problem.ceiling + 1)
    binaries, items = search_space(problem, makespan), knapsack_items(problem, makespan)
    if options.method == "auto" and binaries > options.search_space_threshold and items > _LARGEST_KNAPSACK:
        note = f"the MILP has {binaries} binaries, and its pricing problem {items} items: too many"
        return replace(start, note=note)
    search = _Search(problem, start, options)
    try:
        with warnings.catch_warnings():
            # PuLP 3.3 announces what 4.0 removes; the dependency is pinned below 4.
            warnings.simplefilter("ignore", DeprecationWarning)
            search.run()
    except SolverFailed as failure:
        search.note, search.incomplete = f"failed: {failure}", True
        if failures is not None:
            failures.append(str(failure))
    if search.incomplete:
        warnings.warn(f"dmuon.solver: the MILP {search.note}. The plan is the best so far.", stacklevel=5)
    notes = [search.note] * bool(search.note)
    if search.clocked:
        notes.append("a time limit on one MILP had a say, so that another run may find another plan")
    return Solution(search.counts, search.bound, search.stage, search.proof, "; ".join(notes))


class _Search:
    """State of one refinement; every attribute holds at any time, so that it can end at any time."""

    def __init__(self, problem: Problem, start: Solution, options: SolveOptions) -> None:
        self.problem, self.options = problem, options
        self.counts, self.bound, self.stage = start.counts, start.bound, start.stage
        self.proof = self.note = ""
        self.envelope = start.bound  # needs no solver
        # A start that breaks a limit is longer than anything that breaks none.
        self.makespan = min(problem.makespan(start.counts), problem.ceiling + 1)
        self.incomplete = False
        self.clocked = False  # a limit of time on one MILP decided something
        self.deadline = time.monotonic() + options.time_limit_s

    def run(self) -> None:
        with MilpSolver(self.options.backend, self.deadline) as solver:
            self._run(solver)

    def _run(self, solver: MilpSolver) -> None:
        pool = PatternPool(self.problem, solver, self.deadline)
        pool.add_counts(self.counts)
        if knapsack_items(self.problem, self.makespan) <= _LARGEST_KNAPSACK:
            self._raise_bound(pool)
            if self._proven("column generation"):
                return
            self._dive(pool)
            if self._proven(f"the pattern MILP ({solver.name})"):
                return
        self._repack(solver)
        if self._proven(f"the bound; MILPs over a few ranks ({solver.name}) found it"):
            return

        largest = _LARGEST_MODEL if self.options.method == "milp" else self.options.search_space_threshold
        if search_space(self.problem, self.makespan) <= largest:
            self._bisect(solver)
            if self._proven(f"the compact MILP ({solver.name})"):
                return
        self.incomplete = time.monotonic() > self.deadline
        self.note = (
            f"stopped at the time limit of {self.options.time_limit_s:g} s"
            if self.incomplete
            else f"found nothing shorter; the gap stays {(self.makespan - self.bound) / self.makespan:.2%}"
        )

    def _raise_bound(self, pool: PatternPool) -> None:
        """Try what the gap asks for; if that is out of reach, bisect for the highest bound that can be proven."""
        high = math.ceil(self.makespan * (1 - self.options.gap_target)) - 1
        if high < self.bound:
            return
        if pool.refute(high) == "infeasible":
            self.bound = high + 1
            return
        while (high - self.bound) * _FINEST > self.makespan and time.monotonic() < self.deadline:
            middle = (self.bound + high) // 2
            if pool.refute(middle) == "infeasible":
                self.bound = middle + 1
            else:
                high = middle

    def _dive(self, pool: PatternPool) -> None:
        """Try patterns at a few capacities: a tight one packs most ranks well, a wide one leaves room on the last."""
        goal = self._goal()
        for part in _DIVES:
            capacity = self.bound + int((goal - self.bound) * part)
            if self._done() or not self.bound <= capacity < self.makespan:
                return
            counts = pool.assign(capacity)
            self.clocked |= pool.clocked
            if counts is not None:
                self._adopt(counts, "patterns")

    def _repack(self, solver: MilpSolver) -> None:
        """Hand what the slowest rank and a few others own to the compact MILP, until all are within the gap."""
        goal, failures, choose = self._goal(), 0, random.Random(0)
        while failures < _REPACK_FAILURES and not self._done():
            order = np.argsort(-self.problem.loads(self.counts), kind="stable").tolist()
            others = order[1:] if failures == 0 else choose.sample(order[1:], len(order) - 1)
            group = order[:1]
            for rank in reversed(others):
                if search_space(self._part([*group, rank]), goal) > _REPACK_BINARIES:
                    break
                group.append(rank)
            seconds = min(_REPACK_S, self.deadline - time.monotonic())
            status, rows = assign_within(self._part(group), goal, solver, seconds, choose_s=seconds)
            self.clocked |= status in ("feasible", "unknown")
            if rows is None:
                failures += 1
                if len(group) == len(order):
                    return  # the whole problem: other samples are the same
                continue
            failures = 0
            counts = self.counts.copy()
            counts[group] = rows
            before = self.makespan
            self._adopt(counts, "milp")
            if self.makespan == before:
                self.counts = counts  # one of several slowest ranks is relieved

    def _bisect(self, solver: MilpSolver) -> None:
        """Ask the compact MILP for capacities between bound and makespan, first for one that would end the search.

        What is asked next depends on yes and no alone, never on the counts that come back: solvers agree on those.
        """
        upper, capacity = self.makespan, self._goal()  # there are counts within upper
        best = None
        while not _within(upper, self.bound, self.options):
            status, counts = assign_within(self.problem, capacity, solver, self.deadline - time.monotonic())
            if status == "unknown":
                break
            if counts is None:
                self.bound = max(self.bound, capacity + 1)
            else:
                upper, best = capacity, counts
            capacity = min(upper - 1, max(self._goal(), (self.bound + upper) // 2))
        if best is not None:
            left = self.deadline - time.monotonic()
            status, chosen = assign_within(self.problem, upper, solver, left, choose_s=min(_CHOOSE_S, left))
            self.clocked |= status != "optimal"
            self._adopt(best if chosen is None else chosen, "milp")

    def _adopt(self, counts: Counts, stage: str) -> None:
        counts = shorten(self.problem, counts, self.bound)
        makespan = self.problem.makespan(counts)
        if makespan < self.bound:
            claimed, self.bound = self.bound, self.envelope
            raise SolverFailed(f"a bound of {claimed} ns was claimed; an assignment takes {makespan} ns")
        if makespan < self.makespan:
            self.counts, self.makespan, self.stage = counts, makespan, stage

    def _part(self, ranks: list[int]) -> Problem:
        return part_of(self.problem, self.counts[ranks].sum(axis=0).tolist(), ranks)

    def _goal(self) -> int:
        """The longest makespan that is within the gap."""
        return int(self.bound / (1 - self.options.gap_target))

    def _done(self) -> bool:
        return _within(self.makespan, self.bound, self.options) or time.monotonic() > self.deadline

    def _proven(self, by: str) -> bool:
        if not _within(self.makespan, self.bound, self.options):
            return False
        self.proof = by
        return True


def _within(makespan: int, bound: int, options: SolveOptions) -> bool:
    return makespan - bound <= options.gap_target * makespan
