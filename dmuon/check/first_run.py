"""The first run on GPUs: its sections one after the other, and a file that holds all of them at any time."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import dmuon
from dmuon.check.processes import Ended, run_ranks
from dmuon.check.sections import SECTIONS, Section
from dmuon.check.stage import Launch
from dmuon.platform.files import write_text

FORMAT = 1
_LEAST_SECONDS = 8.0  # in which a section's processes start
_SHOWN = 4  # failed lines a section, in the table

SectionStatus = Literal["ok", "failed", "skipped"]


@dataclass(slots=True)
class Outcome:
    """What became of a section.

    Attributes:
        status: ``skipped`` also where the time left something out.
        reason: why it is not ok; empty if it is.
        launches: one entry for each set of ranks: who ran, lines, facts, what was left out, and of ranks that ended
            badly why, what they raised and what they printed last.
    """

    name: str
    status: SectionStatus = "skipped"
    reason: str = "not reached"
    seconds: float = 0.0
    launches: list[dict[str, Any]] = field(default_factory=list)


def first_run(launch: Launch, seconds: float, path: Path) -> bool:
    """Run all sections; returns whether each is ok.

    Args:
        launch: the ranks of sections that communicate.
        seconds: for all of them together.
        path: of the file, written again after each section.
    """
    begin = time.monotonic()
    outcomes = [Outcome(section.name) for section in SECTIONS]

    def write(done: bool) -> None:
        report = {
            "format": FORMAT,
            "dmuon": dmuon.__version__,
            "began": began,
            "dry": launch.kind == "cpu",
            "ranks": asdict(launch),
            "budget_seconds": seconds,
            "seconds": round(time.monotonic() - begin, 1),
            "done": done,
            "ok": done and all(outcome.status == "ok" for outcome in outcomes),
            "sections": [asdict(outcome) for outcome in outcomes],
        }
        write_text(path, json.dumps(report, indent=1) + "\n")

    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write(done=False)
    due = begin
    refused = False
    for index, section in enumerate(SECTIONS):
        due += section.share * seconds
        if refused:
            outcomes[index].reason = "the environment was refused"
        else:
            outcomes[index] = _run(section, launch, due)
            refused = section.name == "environment" and outcomes[index].status == "failed"
        write(done=section is SECTIONS[-1])
        _tell(outcomes[index])
    ok = all(outcome.status == "ok" for outcome in outcomes)
    say(f"{'all ok' if ok else 'NOT ok'} after {time.monotonic() - begin:.0f} s; everything is in {path}")
    return ok


def _run(section: Section, launch: Launch, due: float) -> Outcome:
    outcome = Outcome(section.name)
    begin = time.monotonic()
    launches = section.launches(launch)
    faults: list[str] = []
    left_out: list[str] = []
    for number, each in enumerate(launches):
        remaining = due - time.monotonic()
        ranks = sum(one.world for one in launches[number:])
        limit = remaining * each.world / ranks if number + 1 < len(launches) else remaining
        if limit < _LEAST_SECONDS:
            left_out.append(f"all on {each}")
            continue
        entry = _entry(each, run_ranks(section.name, each, limit))
        outcome.launches.append(entry)
        faults += entry["faults"] + [f"{line['check']} {line['where']}" for line in _failed(entry)]
        left_out += entry["left_out"]
    outcome.seconds = round(time.monotonic() - begin, 1)
    if faults:
        outcome.status, outcome.reason = "failed", "; ".join(dict.fromkeys(faults))
    elif left_out:
        outcome.reason = f"its share of the time left out {len(left_out)}: {', '.join(left_out)}; raise --budget"
    else:
        outcome.status, outcome.reason = "ok", ""
    return outcome


def _entry(launch: Launch, ended: list[Ended]) -> dict[str, Any]:
    """One launch in the file."""
    first = max((each.result for each in ended if each.result), key=lambda result: len(result.lines), default=None)
    bad = {rank: each for rank, each in enumerate(ended) if each.fault}
    raised = {rank: each.result.tracebacks for rank, each in enumerate(ended) if each.result}
    return {
        "ranks": str(launch),
        "lines": first.lines if first else [],
        "facts": first.facts if first else {},
        "left_out": first.left_out if first else [],
        "faults": [f"rank {rank}: {each.fault}" for rank, each in bad.items()],
        "tracebacks": {str(rank): found for rank, found in raised.items() if found},
        "output": {str(rank): each.output for rank, each in bad.items()},
    }


def _failed(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in entry["lines"] if line["status"] == "fail"]


def _tell(outcome: Outcome) -> None:
    """A row of the table, and what failed or is worth knowing."""
    lines = [line for entry in outcome.launches for line in entry["lines"]]
    passed, failed = (sum(line["status"] == status for line in lines) for status in ("pass", "fail"))
    count = f"{passed} passed, {failed} failed" if lines else ""
    say(f"{outcome.status:<9}{outcome.name:<14}{outcome.seconds:>6.1f} s  {count}")
    for line in [line for line in lines if line["status"] == "fail"][:_SHOWN]:
        say(f"{'':<9}{line['check']} {line['where']}: {line['text']}")
    for line in [line for line in lines if line["status"] in ("warn", "info") and line["text"]]:
        say(f"{'':<9}{line['status']} {line['where']} {line['text']}")
    if outcome.status == "skipped":
        say(f"{'':<9}{outcome.reason}")
    for entry in outcome.launches:
        for fault in entry["faults"]:
            say(f"{'':<9}{fault}")


def say(text: str) -> None:
    print(text, flush=True)


def launch_of(kind: str, devices: int, ranks: int | None, timeout: float) -> Launch:
    """The ranks of a first run: one a GPU by NCCL; two by gloo on a single GPU, which NCCL refuses, and on the CPU.

    Raises:
        ValueError: more ranks than GPUs, or more GPUs than a first run takes.
    """
    if kind == "cuda" and devices > 1:
        world = min(devices, 8) if ranks is None else ranks
        if world > devices:
            raise ValueError(f"--ranks {world}: {devices} GPUs are here; take at most so many ranks")
        return replace(Launch("cuda", world, world, "nccl"), timeout=timeout)
    return Launch(kind, devices if kind == "cuda" else 1, ranks or 2, "gloo", timeout=timeout)
