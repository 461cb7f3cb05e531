"""Random sequences of everything a training program may do, on several ranks and in a single-process twin beside them.

Every rank draws the same actions from the same seed, and applies each to its part of a dedicated model and to a whole
twin of its own, which trains on the global batch. They must never diverge, and no action may hang.

What is compared, and how tightly:

- Gradients after every synchronizing backward, logits of every evaluation, norms of clipping.
- Whole weights after about half of the actions. Reading them touches the runtime, so that always doing so would hide
  what a missing clean-up does to the next action.
- Every ``RESYNC`` actions also momentum, AdamW state and options of the optimizer; then the twin takes over weights and
  state bit by bit. What was compared is within rounding of the twin, so nothing is forgiven, and rounding never adds up
  over more than ``RESYNC`` actions: tolerances stay tight however long the run is.

``python tests/programs/fuzz.py --actions 2000 --seed 0`` runs it at length; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.pool import RankFailure, RankPool

from programs.fuzz_actions import ACTIONS, possible_actions
from programs.fuzz_twin import MODES, Case, Report, Run, Twin, check_rest, check_weights, modes_of, resynchronize

RESYNC = 10
SHOWN = 12  # actions in a failure message
COLLECTIVE_SECONDS = 40.0  # a collective that takes longer raises: the failure then names the action
LEAST_SECONDS, SECONDS_PER_ACTION = 120.0, 1.0  # a run that takes longer hangs


class Divergence(AssertionError):
    """The model and its twin differ, or an action failed; the message says how to replay it."""


def deck(case: Case) -> Iterator[str]:
    """Names in random order, each as often as its weight says before the deck is shuffled anew."""
    draw = random.Random(case.seed)
    possible = possible_actions(case.mode)
    while True:
        names = [name for name, entry in ACTIONS.items() if name in possible for _ in range(entry.weight)]
        draw.shuffle(names)
        yield from names


def play(run: Run) -> None:
    """All actions of the case.

    Raises:
        Divergence: something differed or failed.
    """
    case = run.case
    names = deck(case)
    for index in range(case.actions):
        name = next(names)
        run.history.append(f"{index} {name}")
        print(run.history[-1], flush=True)
        try:
            draw = random.Random(f"{case.seed}/{index}")
            ACTIONS[name].run(run, draw)
            check_rest(run)
            last = index + 1 == case.actions
            if last or (index + 1) % RESYNC == 0:
                resynchronize(run)
            elif draw.random() < 0.5:
                check_weights(run)
        except Exception as error:
            raise Divergence(describe(run, index, error)) from error
        run.report.actions[name] += 1


def describe(run: Run, index: int, error: Exception) -> str:
    """The failure of action ``index``, what led to it, and how to replay it."""
    case = run.case
    first_line = (str(error).splitlines() or [""])[0]
    return "\n".join(
        [
            f"{case.mode}, seed {case.seed}: action {index} on rank {run.rank} of {case.world}: "
            f"{type(error).__name__}: {first_line}",
            "last actions:",
            *(f"  {entry}" for entry in run.history[-SHOWN:]),
            f"replay: {case.replay(index + 1)}",
        ]
    )


def run_case(rank: int, world: int, case: Case, twin: type[Twin] = Twin) -> Report:
    """What one rank does; for ``RankPool``."""
    assert world == case.world
    run = Run(case, rank, twin())
    play(run)
    return run.report


def run_segment(pool: RankPool, case: Case, twin: type[Twin] = Twin) -> Report:
    """Run ``case`` on the ranks of ``pool``.

    Raises:
        RankFailure: a rank failed or hung; the message holds the actions of that rank and the command to replay them.
    """
    limit = LEAST_SECONDS + SECONDS_PER_ACTION * case.actions
    try:
        return pool(case.world, run_case, case, twin, timeout=limit, pg_timeout=COLLECTIVE_SECONDS)[0]  # type: ignore[no-any-return]
    except RankFailure as failure:
        raise RankFailure(f"{failure}\n\nreplay: {case.replay(case.actions)}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random actions on a dedicated model and on its twin.")
    parser.add_argument("--actions", type=int, default=2000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first segment; each next one adds one")
    parser.add_argument("--mode", choices=list(MODES), help="default: all that fit, one after another")
    parser.add_argument("--world", type=int, default=3, help="ranks (default: %(default)s)")
    parser.add_argument("--segment", type=int, default=100, help="actions on one model (default: %(default)s)")
    options = parser.parse_args(arguments)
    modes = [options.mode] if options.mode else modes_of(options.world)
    pool = RankPool()
    counts: Counter[str] = Counter()
    failures = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dmuon-fuzz-") as folder:
        for number, done in enumerate(range(0, options.actions, options.segment)):
            mode = modes[number % len(modes)]
            size = min(options.segment, options.actions - done)
            case = Case(mode, options.seed + number, size, options.world, folder)
            began = time.monotonic()
            try:
                report = run_segment(pool, case)
            except RankFailure as failure:
                failures += 1
                print(f"{mode} seed {case.seed}: FAILED\n{failure}", flush=True)
                continue
            counts += report.actions
            worst = ", ".join(f"{kind} {error:.0e}" for kind, error in sorted(report.worst.items()))
            seconds = time.monotonic() - began
            print(f"{mode} seed {case.seed}: {size} actions in {seconds:.1f} s; largest errors: {worst}", flush=True)
    pool.close()
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    seconds = time.monotonic() - start
    print(f"{counts.total()} actions without a difference, {failures} segments failed, {seconds:.0f} s: {kinds}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
