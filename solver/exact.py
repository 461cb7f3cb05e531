"""The exact methods: raise the bound, shorten the makespan, until they are within the gap."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .child import SolverFailed, run_search
from .compact_milp import MilpSolver, assign_within, search_space
from .heuristics import shorten
from .inputs import SolveOptions, is_int
from .pattern_milp import PatternPool, knapsack_items
from .problem import Counts, Problem

# Items; beyond it one pricing problem takes about a second, and classes are so large that the envelope bound is tight.
_LARGEST_KNAPSACK = 20_000
_LARGEST_MODEL = 50_000  # binaries; beyond it, building the model takes longer than any time limit
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
    """

    counts: Counts
    bound: int
    stage: str
    proof: str = ""
    note: str = ""


def refine(problem: Problem, start: Solution, options: SolveOptions) -> Solution:
    """``start`` or better, with a bound at least as high, searched for in a child process.

    Column generation raises the bound as far as the gap asks for. If the gap stays open, shorter counts are looked for:
    by the pattern MILP at a few capacities, and, below the search-space threshold, by the compact MILP over all ranks,
    whose "no" raises the bound too. Whatever the solver does, the best so far is returned, with a warning where it
    failed.
    """
    makespan = problem.makespan(start.counts)
    if _within(makespan, start.bound, options):
        return replace(start, proof="the envelope bound")
    if options.method == "greedy":
        return replace(start, note="method 'greedy' runs no MILP")
    makespan = min(makespan, problem.ceiling + 1)
    binaries, items = search_space(problem, makespan), knapsack_items(problem, makespan)
    if options.method == "auto" and binaries > options.search_space_threshold and items > _LARGEST_KNAPSACK:
        note = f"the MILP has {binaries} binaries, and its pricing problem {items} items: too many"
        return replace(start, note=note)
    try:
        found, incomplete = _checked(problem, start, run_search((problem, start, options), options.time_limit_s))
    except SolverFailed as failure:
        found, incomplete = replace(start, note=f"failed: {failure}"), True
    if incomplete:
        warnings.warn(f"dmuon.solver: the MILP {found.note}. The plan is the best so far.", stacklevel=6)
    return found


def _checked(problem: Problem, start: Solution, answer: dict[str, Any]) -> tuple[Solution, bool]:
    """What the child found, if it holds, and whether it was cut off."""
    try:
        counts = np.array(answer["counts"], dtype=np.int64).reshape(start.counts.shape)
        bound, stage, proof, note = (answer[name] for name in ("bound", "stage", "proof", "note"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SolverFailed("its answer cannot be read") from error
    sound = is_int(bound) and all(isinstance(text, str) for text in (stage, proof, note))
    if not (sound and problem.is_complete(counts) and start.bound <= bound <= problem.makespan(counts)):
        raise SolverFailed("its answer does not hold")
    return Solution(counts, bound, stage, proof, note), bool(answer["incomplete"])


def search(
    problem: Problem, start: Solution, options: SolveOptions, cbc: str, report: Callable[[dict[str, Any]], None]
) -> None:
    """Improve ``start`` until it is proven within the gap, or the time is over.

    Args:
        cbc: the file that is CBC.
        report: takes the best so far, whenever it has become better and at the end.
    """
    found = _Search(problem, start, options, report)
    try:
        solver = MilpSolver(cbc)
        found.run(solver)
        if solver.clocked:
            later = "a time limit on one MILP had a say, so that another run may find another plan"
            found.note = "; ".join(filter(None, (found.note, later)))
    except Exception as failure:  # whatever PuLP, its solver and their files do
        kind = "" if isinstance(failure, SolverFailed) else f"{type(failure).__name__}: "
        found.note, found.incomplete = f"failed: {kind}{failure}", True
    found.tell(done=True)


class _Search:
    """State of one refinement; every attribute holds at any time, so that it can end at any time."""

    def __init__(
        self, problem: Problem, start: Solution, options: SolveOptions, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.problem, self.options, self.report = problem, options, report
        self.counts, self.bound, self.stage = start.counts, start.bound, start.stage
        self.proof = self.note = ""
        self.envelope = start.bound  # needs no solver
        # A start that breaks a limit is longer than anything that breaks none.
        self.makespan = min(problem.makespan(start.counts), problem.ceiling + 1)
        self.incomplete = False
        self.deadline = time.monotonic() + options.time_limit_s

    def run(self, solver: MilpSolver) -> None:
        self.tell()
        pool = PatternPool(self.problem, solver, self.deadline)
        pool.add_counts(self.counts)
        if knapsack_items(self.problem, self.makespan) <= _LARGEST_KNAPSACK:
            self._raise_bound(pool)
            if self._proven("column generation"):
                return
            self._dive(pool)
            if self._proven("the pattern MILP"):
                return
        largest = _LARGEST_MODEL if self.options.method == "milp" else self.options.search_space_threshold
        if search_space(self.problem, self.makespan) <= largest:
            self._bisect(solver)
            if self._proven("the compact MILP"):
                return
        self.incomplete = time.monotonic() > self.deadline
        self.note = (
            f"stopped at the time limit of {self.options.time_limit_s:g} s"
            if self.incomplete
            else f"found nothing shorter; the gap stays {(self.makespan - self.bound) / self.makespan:.2%}"
        )

    def tell(self, done: bool = False) -> None:
        """Report the best so far."""
        found = {"counts": self.counts.tolist(), "bound": self.bound, "stage": self.stage, "proof": self.proof}
        self.report({**found, "note": self.note, "incomplete": self.incomplete, "done": done})

    def _raise_bound(self, pool: PatternPool) -> None:
        """Try what the gap asks for; if that is out of reach, bisect for the highest bound that can be proven."""
        high = math.ceil(self.makespan * (1 - self.options.gap_target)) - 1
        if high < self.bound:
            return
        if pool.refute(high) == "infeasible":
            self._raise_to(high + 1)
            return
        while (high - self.bound) * _FINEST > self.makespan and time.monotonic() < self.deadline:
            middle = (self.bound + high) // 2
            if pool.refute(middle) == "infeasible":
                self._raise_to(middle + 1)
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
            if counts is not None:
                self._adopt(counts, "patterns")

    def _bisect(self, solver: MilpSolver) -> None:
        """Ask the compact MILP for capacities between bound and makespan, first for one that would end the search.

        What it finds may lie above the capacity by its tolerance; so its yes counts, and not the makespan alone.
        """
        upper, capacity = self.makespan, self._goal()
        while not _within(upper, self.bound, self.options):
            status, counts = assign_within(self.problem, capacity, solver, self.deadline - time.monotonic())
            if status == "unknown":
                return
            if counts is None:
                self._raise_to(max(self.bound, capacity + 1))
            else:
                self._adopt(counts, "milp")
                upper = min(capacity, self.makespan)
            capacity = min(upper - 1, max(self._goal(), (self.bound + upper) // 2))

    def _raise_to(self, bound: int) -> None:
        self.bound = bound
        self.tell()

    def _adopt(self, counts: Counts, stage: str) -> None:
        counts = shorten(self.problem, counts, self.bound)
        makespan = self.problem.makespan(counts)
        if makespan < self.bound:
            claimed, self.bound = self.bound, self.envelope
            raise SolverFailed(f"a bound of {claimed} ns was claimed; an assignment takes {makespan} ns")
        if makespan < self.makespan:
            self.counts, self.makespan, self.stage = counts, makespan, stage
            self.tell()

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
