"""A pool of worker processes that runs a function on every rank of a gloo process group.

Calls that succeed leave the default group, the meshes over it and what DTensor derived from them to the next call over
as many ranks. All other groups, and the store's keys, are a call's own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.forks import CONTEXT
from harness.worker import Call, dump, load, qualified_name, work

MAX_WORLD = 4
BOOT_SECONDS = 90.0  # starting a worker: one import of torch on a busy machine
FAILURE_GRACE_SECONDS = 3.0  # after the first failure, for the other ranks to report theirs
CLEANUP_SECONDS = 20.0
OUTPUT_TAIL_CHARACTERS = 6000
DEATH = "WorkerDied"
HANG = "WorkerHung"


class RankFailure(AssertionError):
    """At least one rank raised, died or hung; the message holds every rank's traceback or stacks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank did: returned `value`, or failed with the exception type named `error`."""

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    bases: tuple[str, ...] = ()
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    def raised(self, kind: type[BaseException]) -> bool:
        """Whether the rank raised `kind` or a subclass of it."""
        return qualified_name(kind) in self.bases


@dataclass(slots=True)
class _Worker:
    process: Any  # multiprocessing.context.ForkServerProcess
    connection: Connection
    log: Path


class RankPool:
    """Runs functions on 1 to ``most`` ranks in processes that stay alive from call to call.

    The pool is ended after a failure that may have left a worker in an unknown state, and built again by
    the next call. After an error that all ranks survived, the next call gets new groups.
    """

    def __init__(self, most: int = MAX_WORLD) -> None:
        self.most = most
        self.generations: Counter[int] = Counter()
        self.directory = tempfile.TemporaryDirectory(prefix="dmuon-ranks-")
        self.workers: list[_Worker] = []
        self.store: dist.TCPStore | None = None  # type: ignore[name-defined]
        self.calls = itertools.count()
        self.logs = itertools.count()

    def __call__(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        fresh: bool = False,
        expect: type[BaseException] | None = None,
        match: str = "",
    ) -> list[Any]:
        """Runs `fn(rank, world, *args)` on every rank and returns the results in rank order.

        With `expect`, every rank must raise that exception, with a message in which `match` (a regular
        expression) is found; the outcomes are returned.

        With `fresh` the call gets groups that no other call has used or will, and no other groups exist meanwhile:
        what ends the default group, or counts groups, asks for it.

        Raises:
            RankFailure: a rank raised, died, did not end within `timeout` seconds, or (with `expect`)
                did not raise as expected.
        """
        if expect is not None:
            outcomes, _ = self.run(world, fn, args, timeout, fresh, grace=None)
            wrong = [o for o in outcomes if not (o.raised(expect) and re.search(match, o.message))]
            if wrong:
                pattern = f" matching {match!r}" if match else ""
                title = f"ranks {[o.rank for o in wrong]} did not raise {expect.__name__}{pattern}"
                raise RankFailure(_describe(title, outcomes))
            return list(outcomes)
        outcomes, first = self.run(world, fn, args, timeout, fresh, grace=FAILURE_GRACE_SECONDS)
        if first is not None:
            self.close()
            verb = {HANG: f"hung for {timeout:g} s", DEATH: "died"}.get(first.error or "", "raised")
            failed = sum(not o.ok for o in outcomes)
            title = f"{fn.__qualname__}: {failed} of {world} ranks failed; rank {first.rank} {verb} first"
            raise RankFailure(_describe(title, outcomes))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Kills all workers; the next call starts new ones."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
            worker.log.unlink(missing_ok=True)
        self.workers.clear()

    def run(
        self,
        world: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        fresh: bool,
        grace: float | None,
    ) -> tuple[list[Outcome], Outcome | None]:
        """Each rank's result or exception, and the first failure.

        Every rank is given all of `timeout` seconds, or `grace` after the first failure; one that is still running
        then is ended and gets the error `WorkerHung`, one whose process ended gets `WorkerDied`.
        """
        if not 1 <= world <= self.most:
            raise ValueError(f"world is {world}, this pool has 1 to {self.most} ranks")
        program = dump((fn, args))  # a function that cannot be pickled fails here, in the caller
        try:
            self.grow(world)
            assert self.store is not None
            number, generation = next(self.calls), self.generations[world]
            header = Call(sys.path, world, number, generation, fresh, self.store.port)
            for worker in self.workers[:world]:
                os.truncate(worker.log, 0)
                worker.connection.send_bytes(pickle.dumps(header))
                worker.connection.send_bytes(program)
            outcomes, first = self.collect(world, timeout, grace)
            if any(outcome.error in (HANG, DEATH) for outcome in outcomes):
                self.close()
            else:
                intact = self.release(world, fn)
                if fresh or not intact:
                    self.generations.update(range(1, self.most + 1))
                elif not all(outcome.ok for outcome in outcomes):
                    self.generations[world] += 1
        except BaseException:  # also the test's own time limit or Ctrl-C: workers are in an unknown state
            self.close()
            raise
        return outcomes, first

    def grow(self, world: int) -> None:
        if any(not worker.process.is_alive() for worker in self.workers):
            self.close()
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        started = []
        for rank in range(len(self.workers), world):
            ours, theirs = CONTEXT.Pipe()
            log = Path(self.directory.name) / f"worker{next(self.logs)}.log"
            log.touch()
            process = CONTEXT.Process(target=work, args=(rank, theirs, str(log)), name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            started.append(_Worker(process, ours, log))
            self.workers.append(started[-1])
        deadline = time.monotonic() + BOOT_SECONDS * max(1, len(started) / MAX_WORLD)
        for worker in started:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailure(f"{worker.process.name} did not start in {BOOT_SECONDS:g} s")
            try:
                worker.connection.recv_bytes()
            except EOFError:
                raise RankFailure(f"{worker.process.name} died at start:\n{_tail(worker.log)}") from None

    def collect(self, world: int, timeout: float, grace: float | None) -> tuple[list[Outcome], Outcome | None]:
        """Waits for every rank's reply; returns the outcomes and the first failure."""
        outcomes: dict[int, Outcome] = {}
        first: Outcome | None = None
        deadline = time.monotonic() + timeout
        pending = {worker.connection: rank for rank, worker in enumerate(self.workers[:world])}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection, rank in list(pending.items()):
                if connection not in ready:
                    continue
                del pending[connection]
                outcomes[rank] = outcome = self.receive(rank)
                if first is None and not outcome.ok:
                    first = outcome
                    if grace is not None:
                        deadline = min(deadline, time.monotonic() + grace)
        hung = sorted(pending.values())
        stacks = self.dump_stacks(hung)
        for rank in hung:
            message = "still running when the other ranks had failed" if first else "still running"
            outcomes[rank] = Outcome(rank, error=HANG, message=message, output=stacks[rank])
        ordered = [outcomes[rank] for rank in range(world)]
        return ordered, first or next((o for o in ordered if not o.ok), None)

    def receive(self, rank: int) -> Outcome:
        worker = self.workers[rank]
        try:
            reply = load(worker.connection.recv_bytes())
        except (EOFError, OSError):  # the pipe closes when the process ends
            worker.process.join(5)
            message = f"process ended with exit code {worker.process.exitcode}"
            return Outcome(rank, error=DEATH, message=message, output=_tail(worker.log))
        if "error" in reply:
            reply["output"] = _tail(worker.log)
        return Outcome(rank, **reply)

    def release(self, world: int, fn: Callable[..., Any]) -> bool:
        """Lets the workers destroy the call's groups, now that no rank needs them; whether they kept their default."""
        for worker in self.workers[:world]:
            worker.connection.send_bytes(b"release")
        deadline = time.monotonic() + CLEANUP_SECONDS
        all_intact = True
        for rank, worker in enumerate(self.workers[:world]):
            problem: str | None
            try:
                if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    problem, intact = pickle.loads(worker.connection.recv_bytes())
                    all_intact = all_intact and intact
                else:
                    problem = "hung:\n" + self.dump_stacks([rank])[rank]
            except EOFError:
                problem = f"process died\n{_tail(worker.log)}"
            if problem is not None:
                raise RankFailure(f"{fn.__qualname__}: rank {rank} failed to destroy its process groups: {problem}")
        return all_intact

    def dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)  # the handler writes without a reply
        return {rank: _tail(self.workers[rank].log) for rank in ranks}


def _describe(title: str, outcomes: list[Outcome]) -> str:
    lines = [title]
    for outcome in outcomes:
        if outcome.ok:
            continue
        lines.append(f"\n--- rank {outcome.rank}: {outcome.error}: {outcome.message}")
        if outcome.traceback:
            lines.append(outcome.traceback.rstrip())
        if outcome.output:
            lines.append(f"--- rank {outcome.rank}, output and stacks:\n{outcome.output.rstrip()}")
    lines.append("\nreturned normally: " + (", ".join(f"rank {o.rank}" for o in outcomes if o.ok) or "none"))
    return "\n".join(lines)


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace")
    return text if len(text) <= OUTPUT_TAIL_CHARACTERS else "[...]" + text[-OUTPUT_TAIL_CHARACTERS:]
