"""Random faults at random moments: every round ends in bounded time, with right numbers or an error on every rank.

A round trains a toy on two to four ranks, with checkpoints, one load and an evaluation on its way, and one fault
(``FAULTS`` in ``chaos_rounds.py``). Then

- no rank hangs, aborts or leaves a process behind;
- ranks that come to the end have the numbers of one process, and, where the fault does no harm, the bits of a run
  without it; losses that were printed before an error are right too;
- every other rank ends with an error, which dmuon has named if it was its collective that failed;
- checkpoints that were whole before are unchanged; the next job goes on from the last one and ends with the bits of a
  run without a fault, and a job on another number of ranks and another topology ends with the numbers of one process.

``python tests/programs/chaos.py --rounds 500 --seed 0`` prints each round and a table of faults and outcomes. A round
is drawn from the seed and its number alone: ``--first N --rounds 1`` runs it again, ``--only FAULT`` every round with
that fault. ``--keep FOLDER`` leaves the logs there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from programs.chaos_faults import NOTHING
from programs.chaos_forks import Forks
from programs.chaos_jobs import LIMIT, Ended, run_job
from programs.chaos_rounds import FAULTS, MEASURED, SAVED_AFTER, Round, draw, part_of
from programs.chaos_verdict import FAILED, OUTCOMES, RIGHT, expected, judge, wrong_losses, wrong_weights
from programs.chaos_worker import digest_of

WORKER = Path(__file__).with_name("chaos_worker.py")
FIRST, LAST = (f"step-{n}" for n in SAVED_AFTER)

SOLVERS = {
    "killed": "kill -9 $$",
    "hangs": "while :; do sleep 0.1; done",
    "floods": "while :; do echo 0123456789012345678901234567890123456789; done",
    "garbage": 'for a in "$@"; do case "$a" in *.sol) echo "Optimal - objective value x, ? ?" > "$a";; esac; done',
    "fails": "exit 1",
}


@dataclass(frozen=True)
class Verdict:
    """Of one round; ``why`` says what is wrong, or what an error that has no name said."""

    round: Round
    outcome: str
    why: str
    seconds: float
    log: str = ""


@dataclass
class Healthy:
    """A job without a fault: its bits, its calls, and its folder."""

    folder: Path
    digest: str
    calls: list[dict[str, int]]


@dataclass
class Chaos:
    """Runs rounds; whatever they need in common is made once.

    Attributes:
        tamper: called with the round and its folder when its first job has ended; tests plant wrongs there.
        limit: seconds from a fault to the end of all ranks.
    """

    folder: Path
    forks: Forks = field(default_factory=lambda: Forks(WORKER))
    tamper: Callable[[Round, Path], None] = lambda _round, _folder: None
    keeps: bool = False
    limit: float = LIMIT
    _healthy: dict[tuple[str, str], Healthy] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, round_: Round) -> Verdict:
        """One round, all of its jobs."""
        begin = time.monotonic()
        folder = self.folder / f"round-{round_.number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            outcome, why, log = self._play(round_, folder)
        except Exception as error:  # of the program itself; the other rounds go on
            outcome, why, log = FAILED, f"{type(error).__name__}: {error}", ""
        if not self.keeps and outcome != FAILED:
            shutil.rmtree(folder, ignore_errors=True)
        return Verdict(round_, outcome, why, time.monotonic() - begin, log)

    def _play(self, round_: Round, folder: Path) -> tuple[str, str, str]:
        healthy = self._run_without_fault(round_.layout, round_.variant)
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        faults = self._faults(round_, folder, healthy)
        ended = self._job(round_, folder / "first", checkpoints, faults, rank_0_hosts_store=round_.rank_0_hosts_store)
        self.tamper(round_, folder)
        exact = not round_.kind.own_numbers and round_.layout not in MEASURED
        exact = exact and round_.fault not in (
            "solver", "bad cost cache", "full disk for costs", "other options", "other rate",
        )  # fmt: skip
        bits = healthy.digest if exact else None
        outcome, why = judge(round_, ended, folder / "first", bits)
        if outcome == FAILED:
            return outcome, why, str(ended)
        if round_.fault == "solver" and round_.detail != "missing" and not (folder / "first-cbc" / "asked").exists():
            return FAILED, "the solver was never asked", str(ended)
        if round_.fault == "torn checkpoint":
            shutil.rmtree(checkpoints / LAST)
        wrong = self._changed(folder, checkpoints, healthy if round_.fault == "torn checkpoint" else None)
        if wrong:
            return FAILED, wrong, str(ended)
        if not round_.kind.own_numbers and (outcome != RIGHT or "disk" in round_.fault):
            again = self._job(round_, folder / "again", checkpoints, None, resume="same")
            same = healthy.digest if exact else None
            wrong = self._wrong(again, round_.layout, folder / "again", same)
            if wrong:
                return FAILED, f"the next job: {wrong}", f"{ended}\n=== the next job\n{again}"
        if not round_.kind.own_numbers and round_.other:
            other = replace(round_, layout=round_.other, variant="")
            if round_.fault != "torn checkpoint" and (checkpoints / LAST).exists():
                shutil.rmtree(checkpoints / LAST)  # so that something is left to be trained
            moved = self._job(other, folder / "other", checkpoints, None, resume="other")
            if wrong := self._wrong(moved, other.layout, folder / "other", None):
                return FAILED, f"on {other.layout}: {wrong}", f"{ended}\n=== on {other.layout}\n{moved}"
        return outcome, why, str(ended)

    def _job(
        self,
        round_: Round,
        out: Path,
        checkpoints: Path,
        faults: list[dict[str, Any] | None] | None,
        *,
        resume: str = "",
        rank_0_hosts_store: bool = False,
    ) -> Ended:
        faults = faults or [None] * round_.world
        jobs = [
            {
                "layout": round_.layout, "variant": round_.variant, "checkpoints": str(checkpoints), "resume": resume,
                "fault": fault,
            }
            for fault in faults
        ]  # fmt: skip
        return run_job(self.forks, round_.world, out, jobs, rank_0_hosts_store=rank_0_hosts_store, limit=self.limit)

    def _wrong(self, ended: Ended, layout: str, out: Path, bits: str | None) -> str:
        """What is wrong with a job that has no fault."""
        if not ended.right:
            return "a rank failed, though there was no fault"
        if ended.left:
            return f"processes are left: {ended.left}"
        return wrong_losses(ended, layout, expected()) or wrong_weights(ended, out, expected(), bits)

    def _changed(self, folder: Path, checkpoints: Path, healthy: Healthy | None) -> str:
        """A checkpoint that is not as it was when it got its name."""
        source = folder / "first" if healthy is None else healthy.folder / "out"
        for path in checkpoints.glob("step-*"):
            digest = source / f"digest-{path.name}"
            if not digest.exists() or digest.read_text() != digest_of(path):
                return f"{path.name} was whole, and is another"
        return ""

    def _run_without_fault(self, layout: str, variant: str) -> Healthy:
        """Once for each."""
        with self._lock:
            key = (layout, variant)
            if key not in self._healthy:
                folder = self.folder / f"healthy-{layout}-{variant}"
                checkpoints = folder / "checkpoints"
                checkpoints.mkdir(parents=True)
                plain = replace(draw(0, 0), layout=layout, variant=variant)
                count = {**NOTHING, "name": "count"}
                ended = self._job(plain, folder / "out", checkpoints, [count] * plain.world)
                wrong = self._wrong(ended, layout, folder / "out", None)
                if wrong:
                    raise AssertionError(f"{layout} {variant} without a fault: {wrong}\n{ended}")
                calls = [json.loads((folder / "out" / f"calls-{r}.json").read_text()) for r in range(plain.world)]
                self._healthy[key] = Healthy(folder, ended.ranks[0].digest or "", calls)
            return self._healthy[key]

    def _cost_cache(self) -> Path:
        """A folder with measured costs of the toy."""
        with self._lock:
            folder = self.folder / "costs"
            if not folder.exists():
                folder.mkdir()
                (folder / "checkpoints").mkdir()
                plain = replace(draw(0, 0), layout="1d", variant="")
                measure = {**NOTHING, "name": "measure", "cache": str(folder / "cache")}
                self._job(plain, folder / "out", folder / "checkpoints", [measure] * 2)
            return folder / "cache"

    def _faults(self, round_: Round, folder: Path, healthy: Healthy) -> list[dict[str, Any] | None]:
        """By rank; files that belong to a fault are made here."""
        calls = healthy.calls[round_.victim].get(f"{round_.phase} {round_.step}", 0)
        fault: dict[str, Any] = {
            "name": round_.fault, "detail": round_.detail, "phase": round_.phase, "step": round_.step,
            "calls": 1 + int(round_.moment * calls),
        }  # fmt: skip
        every = round_.kind.planning or round_.fault in ("bad plan", "slow disk", "torn checkpoint")
        affected = {round_.victim}
        match round_.fault:
            case "solver":
                fault["path"] = str(_fake_solver(folder, round_.detail))
            case "bad plan":
                plan = folder / "plan.json"
                shutil.copy(healthy.folder / "checkpoints" / FIRST / "plan.json", plan)
                fault["path"] = str(_damage(plan, round_.detail, round_.moment))
            case "bad costs" | "bad cost cache":
                shutil.copytree(self._cost_cache(), folder / "cache")
                paths = [path for path in sorted((folder / "cache").rglob("*.json")) if path.is_file()]
                for path in paths:
                    _damage(path, round_.detail, round_.moment)
                fault["path"], fault["cache"] = str(paths[0]), str(folder / "cache")
            case "torn checkpoint":
                shutil.copytree(healthy.folder / "checkpoints", folder / "checkpoints", dirs_exist_ok=True)
                last = folder / "checkpoints" / LAST
                if round_.detail == "on one rank":
                    every = False
                    fault["instead"] = str(folder / "nowhere" / LAST)
                else:
                    _tear(last, round_.detail, round_.moment)
            case "empty batch" | "not a number":
                part = part_of(round_.layout, round_.victim)
                affected = {rank for rank in range(round_.world) if part_of(round_.layout, rank) == part}
            case "full disk":
                every = round_.detail.startswith("all")
        none: dict[str, Any] | None = None
        if round_.fault == "full disk":  # all ranks catch what a save raises, or none
            none = {**NOTHING, "detail": round_.detail}
        return [fault if every or rank in affected else none for rank in range(round_.world)]


def _fake_solver(folder: Path, what: str) -> Path:
    path = folder / "first-cbc" / "cbc"
    if what != "missing":
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n: > {path.parent}/asked\n{SOLVERS[what]}\n")
        path.chmod(0o755)
    return path


def _damage(path: Path, how: str, moment: float) -> Path:
    """A file of text that is not what it was."""
    text = path.read_text()
    path.unlink()
    match how:
        case "truncated":
            path.write_text(text[: int(moment * (len(text) - 2))])
        case "edited":
            digits = [i for i, letter in enumerate(text) if letter in "12345678"]
            at = digits[int(moment * len(digits))]
            path.write_text(text[:at] + str(int(text[at]) + 1) + text[at + 1 :])
        case "empty":
            path.write_text("")
        case "junk":
            path.write_bytes(bytes(range(256)) * 8)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    return path


def _tear(checkpoint: Path, how: str, moment: float) -> None:
    pieces = sorted(checkpoint.glob("*.distcp"))
    piece = pieces[int(moment * len(pieces))]
    match how:
        case "truncated":
            os.truncate(piece, int(0.9 * moment * piece.stat().st_size))
        case "missing":
            piece.unlink()
        case "metadata":
            os.truncate(checkpoint / ".metadata", int(0.9 * moment * (checkpoint / ".metadata").stat().st_size))
        case "empty":
            piece.write_bytes(b"")


def table(verdicts: list[Verdict]) -> str:
    """Faults by outcomes."""
    counts = Counter((v.round.fault, v.outcome) for v in verdicts)
    names = [name for name in FAULTS if any(v.round.fault == name for v in verdicts)]
    width = max(map(len, names), default=0)
    lines = [" " * width + "".join(f"{outcome:>14}" for outcome in OUTCOMES)]
    for name in names:
        lines.append(f"{name:<{width}}" + "".join(f"{counts[(name, o)] or '':>14}" for o in OUTCOMES))
    total = Counter(v.outcome for v in verdicts)
    lines.append(f"{'all':<{width}}" + "".join(f"{total[o]:>14}" for o in OUTCOMES))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random faults at random moments.")
    parser.add_argument("--rounds", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--only", choices=list(FAULTS), help="every round with this fault")
    parser.add_argument("--jobs", type=int, default=2, help="rounds side by side (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds from a fault to the end (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, help="folder for logs, which stay")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dmuon-chaos-") as temporary:
        folder = options.keep or Path(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        chaos = Chaos(folder.resolve(), keeps=options.keep is not None, limit=options.limit)
        numbers = range(options.first, options.first + options.rounds)
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = []
            for verdict in pool.map(lambda n: chaos.run(draw(options.seed, n, options.only)), numbers):
                verdicts.append(verdict)
                print(f"{verdict.round.number} {verdict.round}: {verdict.outcome}, {verdict.seconds:.1f} s", flush=True)
                if verdict.why:
                    print(f"    {verdict.why}", flush=True)
                if verdict.outcome == FAILED:
                    only = f" --only {options.only!r}" if options.only else ""
                    print(f"    {verdict.round.command()}{only}\n{verdict.log}", flush=True)
        chaos.forks.close()
    failed = [v for v in verdicts if v.outcome == FAILED]
    print(f"{table(verdicts)}\n{len(verdicts)} rounds of seed {options.seed} in {time.monotonic() - begin:.0f} s")
    for verdict in failed:
        print(f"FAILED {verdict.round.command()}  # {verdict.round}: {verdict.why[:200]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
