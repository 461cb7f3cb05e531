"""One job of a round: its ranks are started, watched, asked for what a fault needs from outside, and all ended."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from programs.chaos_forks import Forks

TIMEOUT = 8.0  # of process groups, in seconds
LIMIT = 30.0  # from the fault to the end of the last rank
WHOLE = 90.0  # of a job that comes to no fault
SHORT_SECONDS, LONG_SECONDS = 0.5, TIMEOUT + 3.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        after: seconds after the first fault, or after the start where there was none.
        raised: what its excepthook told: kind, message, and whether it came through dmuon.
    """

    code: int
    text: str
    after: float
    hung: bool = False

    @property
    def raised(self) -> dict[str, Any] | None:
        found = re.findall(r"^(?:\[rank\d+\]: )?END (\{.*)$", self.text, re.MULTILINE)
        return json.loads(found[-1]) if found else None

    @property
    def digest(self) -> str | None:
        found = re.findall(r"^DIGEST (\w+)$", self.text, re.MULTILINE)
        return found[-1] if found else None


@dataclass
class Ended:
    """How a job ended; ``left`` are processes that it left behind."""

    ranks: list[RankEnd]
    faults: dict[int, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return all(rank.code == 0 and rank.digest is not None for rank in self.ranks)

    def __str__(self) -> str:
        lines = [f"--- rank {n}: {r.code} after {r.after:.1f} s\n{r.text}" for n, r in enumerate(self.ranks)]
        return "\n".join(lines + [f"left: {line}" for line in self.left])


def run_job(
    forks: Forks, world: int, out: Path, jobs: list[dict[str, Any]], *, rank_0_hosts_store: bool, limit: float = LIMIT
) -> Ended:
    """Run one job; nothing of it is left afterwards, and what was is told.

    Args:
        limit: seconds from the last fault until ranks that still run are killed.
    """
    out.mkdir(parents=True)
    store = None if rank_0_hosts_store else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin = time.monotonic()
    pids: list[int] = []
    try:
        for rank, job in enumerate(jobs):
            port = store.port if store is not None else 0
            base = {
                "rank": rank, "world": world, "port": port, "out": str(out), "timeout": TIMEOUT,
            }  # fmt: skip
            pids.append(forks.start(out / f"{rank}.log", base | job))
        hung, faults, left = _watch(forks, pids, out, begin, limit)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                if pid not in forks.ends([pid]):
                    os.kill(pid, signal.SIGKILL)
    while len(ends := forks.ends(pids)) < world:
        time.sleep(POLL_SECONDS)
    fault = min(faults.values(), default=begin)
    ranks = []
    for rank, pid in enumerate(pids):
        text = (out / f"{rank}.log").read_text(errors="replace")
        ranks.append(RankEnd(ends[pid].code, text, ends[pid].time - fault, rank in hung))
    return Ended(ranks, faults, left)


def _watch(
    forks: Forks, pids: list[int], out: Path, begin: float, limit: float
) -> tuple[set[int], dict[int, float], list[str]]:
    """Until all have ended, but for ranks that were stopped for ever: who hung, when faults came, and what is left."""
    faults: dict[int, float] = {}
    due: list[tuple[float, int]] = []  # when a process is to be continued
    while True:
        now = time.monotonic()
        ended = forks.ends(pids)
        for rank, pid in enumerate(pids):
            path = out / f"fault-{rank}.json"
            if rank not in faults and path.exists():
                stamp = json.loads(path.read_text())
                faults[rank] = stamp["time"]
                if stamp["ask"] == "interrupt all":
                    for other in set(pids) - {pid}:
                        _signal(other, signal.SIGINT)
                elif stamp["ask"].startswith("continue"):
                    seconds = SHORT_SECONDS if stamp["ask"].endswith("short") else LONG_SECONDS
                    due.append((stamp["time"] + seconds, pid))
        for entry in list(due):
            if now >= entry[0]:
                _signal(entry[1], signal.SIGCONT)
                due.remove(entry)
        running = [rank for rank, pid in enumerate(pids) if pid not in ended]
        waiting = {pid for _, pid in due}
        active = [rank for rank in running if pids[rank] in waiting or not _is_stopped(pids[rank])]
        if not active:
            return set(), faults, _left_by(pids, out, running)
        if now > (max(faults.values()) + limit if faults else begin + WHOLE):
            for rank in active:
                _signal(pids[rank], signal.SIGUSR1)
            time.sleep(0.5)
            return set(active), faults, _left_by(pids, out, running)
        time.sleep(POLL_SECONDS)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """Fields of /proc after the name: state, parent, group, session; empty of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]


def _left_by(pids: list[int], out: Path, running: list[int]) -> list[str]:
    """Processes of the sessions of these ranks, or that name their folder, which are none of them; they are killed."""
    mine = set(pids)
    sessions = {pid for rank, pid in enumerate(pids) if rank not in running}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        stat = _stat(pid)
        if pid in mine or pid == os.getpid() or not stat or stat[0] == "Z":
            continue
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if int(stat[3]) in sessions or f"{out}/" in command:
                found.append(f"{pid} {command}")
                _signal(pid, signal.SIGKILL)
    return found
