"""What the ranks tell each other, and the lines of the report: judged over all ranks, printed by the first one."""

from __future__ import annotations

import base64
import faulthandler
import gc
import json
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

import dmuon
from dmuon.platform.files import write_bytes

_MINUTE = timedelta(minutes=1)


class Stopped(Exception):
    """An error on some ranks only: they no longer run the same collectives, so nothing more can be checked."""


class Ranks:
    """All processes of the launch, or this one alone where nothing launched several.

    They exchange Python objects through the rendezvous store, which works where collectives fail.

    Args:
        backend: back end of process groups.
        timeout: limit of their collectives; :meth:`gather` waits three times as long for the slowest rank, or a minute.

    Raises:
        RuntimeError, ValueError: the processes did not find each other.
    """

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self.rank, self.world = 0, 1
        self.timeout = timeout
        self._store: Store = dist.HashStore()  # type: ignore[attr-defined]
        if "RANK" in os.environ:
            found = dist.rendezvous("env://", timeout=max(timeout, _MINUTE))  # type: ignore[attr-defined]
            self._store, self.rank, self.world = next(found)
        self._backend = backend
        self._rounds = 0

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """The default group; with it end all others, each of which holds a communicator on NCCL."""
        self._rounds += 1
        store = PrefixStore(f"dmuon-check/group/{self._rounds}", self._store)  # names of groups recur
        dist.init_process_group(self._backend, store=store, rank=self.rank, world_size=self.world, timeout=self.timeout)
        yield
        gc.collect()  # the modules and the hooks of a dedicated model refer to each other
        dist.destroy_process_group()

    def gather(self, item: Any) -> list[Any]:
        """Every rank's ``item``, by rank; all ranks make the same series of calls.

        Raises:
            RuntimeError: a rank did not come in time, or the store is gone with its process.
        """
        self._rounds += 1
        keys = [f"dmuon-check/gather/{self._rounds}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], base64.b64encode(pickle.dumps(item)).decode())
        self._store.wait(keys, max(3 * self.timeout, _MINUTE))
        # These bytes were written by this program on another rank.
        return [pickle.loads(base64.b64decode(self._store.get(key))) for key in keys]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report; of what a check has measured, it passes if ``value`` is at most ``limit``.

    Attributes:
        unit: how ``value`` is named when it is printed; empty where it is a count of what is wrong.
        where: on which topology, or of which ranks.
    """

    check: str
    text: str
    value: float = 0
    limit: float = 0
    unit: str = ""
    status: Literal["pass", "fail", "skip", "warn", "info"] = "info"
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.status:<6}{self.check:<13}" + (f"{self.where:<28}" if self.where else "")
        return fill(
            head + self.text, 100, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False
        )


class Board:
    """Collects lines; every rank holds all of them. Rank 0 prints them, and writes them to a file as they come.

    Args:
        path: where rank 0 writes, if anywhere: a run that hangs or dies leaves what came before.
    """

    def __init__(self, ranks: Ranks, path: Path | None = None) -> None:
        self.ranks = ranks
        self.lines: list[Line] = []
        self._path = path

    @property
    def failed(self) -> int:
        """How many lines failed."""
        return sum(line.status == "fail" for line in self.lines)

    def add(self, line: Line) -> None:
        """Add a line; the same on all ranks."""
        self.lines.append(line)
        if self.ranks.rank == 0:
            print(line, flush=True)
            if self._path is not None:
                status = int(self.failed > 0) if line.check == "all" else None  # that is the last one
                report = {"exit_status": status, "world": self.ranks.world, "lines": [*map(asdict, self.lines)]}
                write_bytes(self._path, f"{json.dumps(report, indent=1)}\n".encode())

    def judge(self, check: str, where: str, work: Callable[[], list[Line]]) -> None:
        """Run ``work`` on every rank and add a line for each that it returns; an error is a line named ``check``.

        What takes much longer than one collective may ends the process, with the stacks of its threads and exit
        status 1; torchrun then ends the others.

        Raises:
            Stopped: not all ranks had the same error, or a collective failed.
        """
        said: str | None = None
        fatal = False
        readings: list[Line] = []
        seconds = 4 * self.ranks.timeout.total_seconds()
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        try:
            readings = work()
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            fatal = isinstance(error, (dmuon.CollectiveError, dist.DistError))
            traceback.print_exc()
            print(f"dmuon-check: rank {self.ranks.rank}: {check} {where}: {said}", file=sys.stderr, flush=True)
        everyone = self.ranks.gather((said, fatal, readings))
        faulthandler.cancel_dump_traceback_later()
        errors = {rank: text for rank, (text, _, _) in enumerate(everyone) if text is not None}
        if not errors:
            for rows in zip(*(theirs for _, _, theirs in everyone), strict=True):
                fails = [row for row in enumerate(rows) if not row[1].value <= row[1].limit]  # NaN fails
                rank, line = max(fails or enumerate(rows), key=lambda row: row[1].value)
                text = f"{line.text}; {line.unit} {line.value:.2g} (limit {line.limit:.2g})" if line.unit else line.text
                text += f", on rank {rank}" if fails else ""
                self.add(replace(line, status="fail" if fails else "pass", where=where, text=text))
            return
        rank, text = next(iter(errors.items()))
        self.add(Line(check, f"on {len(errors)} ranks, first rank {rank}: {text}", status="fail", where=where))
        kinds = {text and re.sub(r"\d+", "", text) for text, _, _ in everyone}
        if len(kinds) > 1 or any(hopeless for _, hopeless, _ in everyone):
            raise Stopped(f"{check} {where}")

    def count(self) -> None:
        """Add the last line, which counts those before."""
        total = sum(line.status in ("pass", "fail") for line in self.lines)
        text = f"{self.failed} of {total} failed" if self.failed else f"{total} checks"
        self.add(Line("all", text, status="fail" if self.failed else "pass"))
