"""A pool of worker processes that runs a function on every rank of a fresh gloo process group."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.tensor.debug

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
        return _qualified_name(kind) in self.bases


@dataclass(slots=True)
class _Worker:
    process: Any  # multiprocessing.context.SpawnProcess
    connection: Connection
    log: Path


class RankPool:
    """Runs functions on 1 to ``most`` ranks in processes that stay alive from call to call.

    The pool is ended after a failure that may have left a worker in an unknown state, and built again by
    the next call.
    """

    def __init__(self, most: int = MAX_WORLD) -> None:
        self._most = most
        self._directory = tempfile.TemporaryDirectory(prefix="dmuon-ranks-")
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None  # type: ignore[name-defined]
        self._calls = itertools.count()
        self._logs = itertools.count()

    def __call__(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        pg_timeout: float = 30.0,
        expect: type[BaseException] | None = None,
        match: str = "",
    ) -> list[Any]:
        """Runs `fn(rank, world, *args)` on every rank and returns the results in rank order.

        With `expect`, every rank must raise that exception, with a message in which `match` (a regular
        expression) is found; the outcomes are returned.

        Raises:
            RankFailure: a rank raised, died, did not end within `timeout` seconds, or (with `expect`)
                did not raise as expected.
        """
        if expect is not None:
            outcomes = self.outcomes(world, fn, *args, timeout=timeout, pg_timeout=pg_timeout)
            wrong = [o for o in outcomes if not (o.raised(expect) and re.search(match, o.message))]
            if wrong:
                pattern = f" matching {match!r}" if match else ""
                title = f"ranks {[o.rank for o in wrong]} did not raise {expect.__name__}{pattern}"
                raise RankFailure(_describe(title, outcomes))
            return list(outcomes)
        outcomes, first = self._run(world, fn, args, timeout, pg_timeout, grace=FAILURE_GRACE_SECONDS)
        if first is not None:
            self.close()
            verb = {HANG: f"hung for {timeout:g} s", DEATH: "died"}.get(first.error or "", "raised")
            failed = sum(not o.ok for o in outcomes)
            title = f"{fn.__qualname__}: {failed} of {world} ranks failed; rank {first.rank} {verb} first"
            raise RankFailure(_describe(title, outcomes))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        pg_timeout: float = 30.0,
    ) -> list[Outcome]:
        """Runs `fn(rank, world, *args)` on every rank and returns each rank's result or exception.

        Every rank is given all of `timeout` seconds; one that is still running then is ended and gets the
        error `WorkerHung`, one whose process ended gets `WorkerDied`.
        """
        return self._run(world, fn, args, timeout, pg_timeout, grace=None)[0]

    def close(self) -> None:
        """Kills all workers; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
            worker.log.unlink(missing_ok=True)
        self._workers.clear()

    def pids(self) -> list[int]:
        """The process ids of the live workers, by rank."""
        return [worker.process.pid for worker in self._workers]

    def _run(
        self,
        world: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        pg_timeout: float,
        grace: float | None,
    ) -> tuple[list[Outcome], Outcome | None]:
        if not 1 <= world <= self._most:
            raise ValueError(f"world is {world}, this pool has 1 to {self._most} ranks")
        call = _dump((fn, args))  # a function that cannot be pickled fails here, in the caller
        try:
            self._grow(world)
            assert self._store is not None
            prefix = f"call{next(self._calls)}"
            for worker in self._workers[:world]:
                os.truncate(worker.log, 0)
                header = (sys.path, world, prefix, self._store.port, pg_timeout)
                worker.connection.send_bytes(pickle.dumps(header))
                worker.connection.send_bytes(call)
            outcomes, first = self._collect(world, timeout, grace)
            if any(outcome.error in (HANG, DEATH) for outcome in outcomes):
                self.close()
            else:
                self._release(world, fn)
        except BaseException:  # also the test's own time limit or Ctrl-C: workers are in an unknown state
            self.close()
            raise
        return outcomes, first

    def _grow(self, world: int) -> None:
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close()
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        started = []
        for rank in range(len(self._workers), world):
            ours, theirs = self._context.Pipe()
            log = Path(self._directory.name) / f"worker{next(self._logs)}.log"
            log.touch()
            process = self._context.Process(
                target=_work, args=(rank, theirs, str(log)), name=f"rank{rank}", daemon=True
            )
            process.start()
            theirs.close()
            started.append(_Worker(process, ours, log))
            self._workers.append(started[-1])
        deadline = time.monotonic() + BOOT_SECONDS * max(1, len(started) / MAX_WORLD)
        for worker in started:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailure(f"{worker.process.name} did not start in {BOOT_SECONDS:g} s")
            try:
                worker.connection.recv_bytes()
            except EOFError:
                raise RankFailure(f"{worker.process.name} died at start:\n{_tail(worker.log)}") from None

    def _collect(self, world: int, timeout: float, grace: float | None) -> tuple[list[Outcome], Outcome | None]:
        """Waits for every rank's reply; returns the outcomes and the first failure."""
        outcomes: dict[int, Outcome] = {}
        first: Outcome | None = None
        deadline = time.monotonic() + timeout
        pending = {worker.connection: rank for rank, worker in enumerate(self._workers[:world])}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection, rank in list(pending.items()):
                if connection not in ready:
                    continue
                del pending[connection]
                outcomes[rank] = outcome = self._receive(rank)
                if first is None and not outcome.ok:
                    first = outcome
                    if grace is not None:
                        deadline = min(deadline, time.monotonic() + grace)
        hung = sorted(pending.values())
        stacks = self._dump_stacks(hung)
        for rank in hung:
            message = "still running when the other ranks had failed" if first else "still running"
            outcomes[rank] = Outcome(rank, error=HANG, message=message, output=stacks[rank])
        ordered = [outcomes[rank] for rank in range(world)]
        return ordered, first or next((o for o in ordered if not o.ok), None)

    def _receive(self, rank: int) -> Outcome:
        worker = self._workers[rank]
        try:
            reply = _load(worker.connection.recv_bytes())
        except (EOFError, OSError):  # the pipe closes when the process ends
            worker.process.join(5)
            message = f"process ended with exit code {worker.process.exitcode}"
            return Outcome(rank, error=DEATH, message=message, output=_tail(worker.log))
        if "error" in reply:
            reply["output"] = _tail(worker.log)
        return Outcome(rank, **reply)

    def _release(self, world: int, fn: Callable[..., Any]) -> None:
        """Lets the workers destroy their process group, now that no rank needs it."""
        for worker in self._workers[:world]:
            worker.connection.send_bytes(b"release")
        deadline = time.monotonic() + CLEANUP_SECONDS
        for rank, worker in enumerate(self._workers[:world]):
            try:
                problem: Any = None
                if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    problem = pickle.loads(worker.connection.recv_bytes())
                else:
                    problem = "hung:\n" + self._dump_stacks([rank])[rank]
            except EOFError:
                problem = f"process died\n{_tail(worker.log)}"
            if problem is not None:
                raise RankFailure(f"{fn.__qualname__}: rank {rank} failed to destroy its process group: {problem}")

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)  # the handler writes without a reply
        return {rank: _tail(self._workers[rank].log) for rank in ranks}


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


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)  # plain bytes: no shared memory that could outlive or precede its sender
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


class _OneThreadGloo(c10d.ProcessGroupGloo):  # type: ignore[name-defined, misc]
    """A gloo group with one worker thread, where torch starts two.

    torch 2.13's worker threads assign the name of the work they completed to one string without a lock. Names of over
    15 characters are on the heap, ALLGATHER_COALESCED among them, which is what DTensors gather with: two works that
    complete at once then corrupt the heap, and the process dies of it sooner or later. With 16 threads a loop of such
    gathers dies in seconds. dmuon's own collectives have shorter names.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_default_device()]  # type: ignore[attr-defined]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def _work(rank: int, connection: Connection, log: str) -> None:
    """The worker process: one call after another until the pipe closes."""
    c10d.ProcessGroupGloo = _OneThreadGloo  # type: ignore[attr-defined]
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # keeps the collection after each call cheap
    environment = dict(os.environ)
    directory = os.getcwd()
    connection.send_bytes(b"ready")
    while True:
        try:
            header = pickle.loads(connection.recv_bytes())
            call = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_execute(rank, header, call))
        if connection.recv_bytes() != b"release":
            return
        problem = None
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            # DTensor keeps what it derived from meshes that were equal but had other groups.
            torch.distributed.tensor.debug._clear_sharding_prop_cache()
        except Exception:
            problem = traceback.format_exc()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        gc.collect()
        connection.send_bytes(pickle.dumps(problem))


def _execute(rank: int, header: tuple[list[str], int, str, int, float], call: bytes) -> bytes:
    """Runs one call in a fresh process group; returns the reply, whatever happens."""
    path, world, prefix, port, pg_timeout = header
    try:
        sys.path[:] = path
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        random.seed(0)
        torch.manual_seed(0)
        limit = timedelta(seconds=pg_timeout)
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        store = dist.PrefixStore(prefix, client)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        fn, args = _load(call)
        return _dump({"value": fn(rank, world, *args)})
    except BaseException as error:
        return _dump(
            {
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "bases": tuple(_qualified_name(base) for base in type(error).__mro__),
            }
        )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
