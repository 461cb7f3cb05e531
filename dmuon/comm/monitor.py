"""What this rank communicates: named when it fails, and compared between ranks before it can do harm."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from dmuon.kernels import streams_of
from dmuon.layout.topology import GlobalRank, listed

_EXIT_SECONDS = 2.0
_POLL_SECONDS = 0.02  # between looks for what other ranks report
_HEARD = 64  # reports that a rank reads
_TOLD = 8  # reports that a message repeats
_REMEMBERED = 512  # collectives per lane
_Journal = dict[str, tuple[int, list[str]]]  # by lane, how many collectives were started, and the last ones
_OPTIONS = "options"  # a lane, not of collectives but of what an optimizer goes by
_REMEDY = "run the same blocks, backwards and steps in the same order on every rank"
_OPTIONS_REMEDY = (
    "give every rank's optimizer the same options (a scheduler that goes by a rank's own loss does not), and freeze "
    "the same parameters"
)


class CollectiveError(RuntimeError):
    """A collective of dmuon failed, or the ranks issued different ones; no more can be started on this model."""


class Watched(Protocol):
    """The process groups of a model, which stay as long as its monitor."""

    def leave(self, works: Iterable[dist.Work]) -> None:
        """Keep collectives that nobody will wait for."""


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Call every one of them, whatever the others raise; then raise the first exception."""
    fault: Exception | None = None
    for action in actions:
        try:
            action()
        except Exception as error:  # of whatever kind a back end raises
            fault = fault or error
    if fault is not None:
        raise fault


def first_line(error: Exception) -> str:
    """What it says, without the stack that a back end appends."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


class Pending:
    """Collectives under way, and what they are."""

    def __init__(self, monitor: Monitor, what: str, works: Sequence[dist.Work | None]) -> None:
        self._monitor = monitor
        self._what = what
        self._works = [work for work in works if work is not None]
        assert len(self._works) == len(works), "an asynchronous collective returns its work"

    def __del__(self) -> None:
        if self._works:
            self._monitor.leave(self._works)

    def wait_at_exit(self) -> None:
        """Wait a moment, whatever comes of it.

        A back end's thread that frees tensors of its last collectives while the interpreter ends aborts the process.
        """
        for work in self._works:
            with suppress(Exception):
                work.wait(timedelta(seconds=_EXIT_SECONDS))

    def wait_on_host(self) -> None:
        """Wait until they have ended; :meth:`wait` is still due on the stream that uses the result."""
        works = list(self._works)
        self.wait()
        self._works = works
        self._monitor.synchronize()

    def wait(self) -> None:
        """Wait for all of them, on the device's stream where there is one.

        Raises:
            CollectiveError: one of them failed; none is left unwaited.
        """
        works, self._works = self._works, []
        try:
            run_all(work.wait for work in works)
        except Exception as error:
            self._monitor.leave(works)  # those that go on
            self._monitor.fail(self._what, error)


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank tells the others when something failed.

    Attributes:
        message: what failed, and where.
        arrival: how many ranks had reported before.
        journal: what it has started.
    """

    rank: GlobalRank
    message: str
    arrival: int
    journal: _Journal


class _Lane:
    """Collectives that come in the same order on all ranks."""

    def __init__(self) -> None:
        self.digest = 0
        self.count = 0
        self.recent: deque[str] = deque(maxlen=_REMEMBERED)

    def note(self, what: str) -> None:
        self.digest = zlib.crc32(what.encode() + b"\n", self.digest)
        self.count += 1
        self.recent.append(what)


class Monitor:
    """Journal of one model's collectives on this rank.

    Attributes:
        step: finished steps of the optimizer, for messages.
        patience: seconds that a fault waits for the other ranks to report what they were doing.
        groups: that it watches; they stay as long as it does.
    """

    def __init__(
        self,
        ranks: Sequence[GlobalRank],
        rank: GlobalRank,
        store: Store,
        name: str,
        *,
        device: torch.device,
        groups: Watched,
        asynchronous: bool = True,
        patience: float = 5.0,
    ) -> None:
        """``name`` is the same on all of them and nowhere else."""
        self._device = device
        self.step = 0
        self.patience = patience
        self.groups = groups
        self._ranks = tuple(ranks)
        self._rank = rank
        self._store = store
        self._name = name
        self._asynchronous = asynchronous
        self._lanes: dict[str, _Lane] = {}
        self._options: dict[str, str] = {}
        self._broken: str | None = None

    def start(self, lane: str | None, what: str, launch: Callable[[], Sequence[dist.Work | None]]) -> Pending:
        """Launch collectives.

        Args:
            lane: collectives of one lane come in the same order on all ranks; None for those of some ranks only, which
                are not compared.
            what: names them, the same on all ranks.

        Raises:
            CollectiveError: the launch failed, or something before it.
            torch.OutOfMemoryError: as it came; the model can still be used if it came on all ranks.
        """
        self._refuse_if_broken(what)
        if lane is not None:
            self.note(lane, what)
        try:
            works = launch()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.fail(what, error)
        pending = Pending(self, what, works)
        if not self._asynchronous:
            pending.wait_on_host()
        return pending

    def leave(self, works: Sequence[dist.Work]) -> None:
        """Nobody will wait for these. An accelerator's back end keeps what they use by itself."""
        if streams_of(self._device) is None:
            self.groups.leave(works)

    def synchronize(self) -> None:
        """The host waits for the current stream of the device, if it has streams."""
        module = streams_of(self._device)
        if module is not None:
            module.current_stream(self._device).synchronize()

    @contextmanager
    def watch(self, what: str, lane: str | None = None) -> Iterator[None]:
        """Around a blocking collective, which is noted in ``lane`` if it fails: other ranks may not have it."""
        self._refuse_if_broken(what)
        try:
            yield
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if lane is not None:
                self.note(lane, what)
            self.fail(what, error)

    def note(self, lane: str, what: str) -> None:
        """Remember what all ranks do in one order, whether or not it communicates."""
        self._lanes.setdefault(lane, _Lane()).note(what)

    def count(self, lane: str) -> int:
        """How many of this lane were noted so far."""
        return self._lanes[lane].count if lane in self._lanes else 0

    def note_options(self, options: Iterable[tuple[str, str]]) -> None:
        """What an optimizer will go by, ``(name, value)``: the next vote compares what has changed since the last."""
        for name, value in options:
            if self._options.get(name) != value:
                self._options[name] = value
                self.note(_OPTIONS, f"{name}={value}")

    def begin_step(self) -> None:
        """The optimizer takes a step: the other ranks must, too, before the next gradients are used."""
        self.note("step", f"step {self.step} of the optimizer")

    def end_step(self) -> None:
        """From here on messages count the step as finished."""
        self.step += 1

    @property
    def digest(self) -> int:
        """31 bits of everything that was noted, lane by lane.

        It never starts anew: ranks whose collectives have once gone out of step stay so, and an exception that all of
        them caught at one place leaves them in step.
        """
        lanes = [(name, self._lanes[name].digest) for name in sorted(self._lanes)]
        return zlib.crc32(repr(lanes).encode()) & 0x7FFFFFFF

    def disagree(self) -> NoReturn:
        """Raise: the digests differ. Every rank of the model gets here."""
        message = f"rank {self._rank}, step {self.step}: the ranks issued different collectives"
        reports, unheard = self._others(message)
        options = self._difference(reports, [_OPTIONS], ended=True)
        if options is not None:
            message = f"rank {self._rank}, step {self.step}: the ranks have different options"
            self._break(". ".join([f"{message}: {options}; {_OPTIONS_REMEDY}", *unheard]))
        difference = self._difference(reports, self._compared(reports), ended=True) or self._crossing(reports)
        which = f": {difference}" if difference else ", which ones is not known"
        self._break(". ".join([f"{message}{which}; {_REMEDY}", *unheard]))

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise what is known about a collective that failed on this rank."""
        message = f"rank {self._rank}, step {self.step}: {what} failed: {first_line(error)}"
        try:
            if self._broken is not None:
                raise CollectiveError(f"{message}. Before that: {self._broken}")
            reports, unheard = self._others(message)
            parts = [message, *unheard]
            if reports:
                told = [report.message for report in reports[:_TOLD]]
                told += [f"and {len(reports) - _TOLD} more"] if len(reports) > _TOLD else []
                parts.append("The others, as they came: " + "; ".join(told))
            difference = self._difference(reports, self._compared(reports), ended=False) or self._crossing(reports)
            if difference:
                parts.append(f"The ranks issued different collectives: {difference}; {_REMEDY}")
            self._break(". ".join(parts))
        except CollectiveError as fault:
            raise fault from error

    def _refuse_if_broken(self, what: str) -> None:
        if self._broken is not None:
            raise CollectiveError(f"{what} was not started, because an earlier collective failed: {self._broken}")

    def _break(self, message: str) -> NoReturn:
        self._broken = message
        raise CollectiveError(message)

    def _compared(self, reports: Sequence[_Report]) -> list[str]:
        """The lanes of collectives that any rank has."""
        return sorted((self._lanes.keys() | {name for report in reports for name in report.journal}) - {_OPTIONS})

    def _difference(self, reports: Sequence[_Report], lanes: Sequence[str], *, ended: bool) -> str | None:
        """The first collective of ``lanes``, one by one, that another rank has and this one has not.

        Args:
            ended: all ranks have come to the same place, so that one that another rank has beyond the last counts.
        """
        for name in lanes:
            entries = _numbered(self._journal().get(name))
            for report in sorted(reports, key=lambda r: r.rank):
                others = _numbered(report.journal.get(name))
                compared = sorted((entries.keys() | others.keys()) if ended else (entries.keys() & others.keys()))
                oldest = max(min(entries, default=0), min(others, default=0))
                for i in compared:
                    if i >= oldest and entries.get(i) != others.get(i):
                        own, other = entries.get(i, "nothing more"), others.get(i, "nothing more")
                        return f"{other!r} on rank {report.rank} where rank {self._rank} has {own!r}"
        return None

    def _crossing(self, reports: Sequence[_Report]) -> str | None:
        """What this rank has and another has not, if that rank is ahead in another lane."""
        journal = self._journal()
        for report in sorted(reports, key=lambda r: r.rank):
            ahead = _first_beyond(journal, report.journal)
            behind = _first_beyond(report.journal, journal)
            if ahead is not None and behind is not None:
                return f"{behind!r} on rank {report.rank} where rank {self._rank} has {ahead!r}"
        return None

    def _journal(self) -> _Journal:
        return {name: (lane.count, list(lane.recent)) for name, lane in self._lanes.items()}

    def _others(self, message: str) -> tuple[list[_Report], list[str]]:
        """Tell the other ranks.

        Returns:
            What they tell within a few seconds, and sentences about those that were not heard.
        """
        reports: dict[GlobalRank, _Report] = {}
        arrived: list[GlobalRank] = []
        trouble: list[str] = []
        deadline = time.monotonic() + self.patience

        def converse() -> None:
            try:
                arrival = int(self._store.add(self._key("count"), 1)) - 1
                report = _Report(self._rank, message, arrival, self._journal())
                self._store.set(self._key(self._rank), json.dumps(asdict(report)))
                if self._store.has_extended_api():  # type: ignore[attr-defined]
                    self._store.append(self._key("ranks"), f"{self._rank} ")  # type: ignore[attr-defined]
                while len(arrived) < len(self._ranks) and time.monotonic() < deadline:
                    arrived[:] = self._arrived()
                    for rank in arrived[:_HEARD]:
                        if rank != self._rank and rank not in reports:
                            reports[rank] = _Report(**json.loads(self._store.get(self._key(rank))))
                    time.sleep(_POLL_SECONDS * max(1.0, len(self._ranks) / 64))  # all ranks ask one host
            except Exception as error:  # the store lives in a process that may be gone too
                trouble.append(f"is gone ({type(error).__name__})")

        # In a thread: the host of the store may have stopped without closing its connections.
        thread = threading.Thread(target=converse, name="dmuon-fault", daemon=True)
        thread.start()
        thread.join(self.patience + 1.0)
        if thread.is_alive():
            trouble.append("does not answer")
        heard = dict(reports)
        spoke = {self._rank, *heard, *arrived}
        silent = listed([rank for rank in self._ranks if rank not in spoke])
        unheard = []
        if silent and trouble:
            unheard = [
                f"Nothing is known of rank {silent}: the store of the default process group, which carries such "
                f"messages, {trouble[0]}, perhaps with the rank that hosts it"
            ]
        elif silent:
            unheard = [f"Silent: rank {silent} (killed, raised elsewhere, or still computing: see its own log)"]
        return sorted(heard.values(), key=lambda report: report.arrival), unheard

    def _arrived(self) -> list[GlobalRank]:
        """The ranks that have told what they know; in the order in which they did, where the store keeps that."""
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return [GlobalRank(int(rank)) for rank in self._store.get(self._key("ranks")).split()]
        return [rank for rank in self._ranks if self._store.check([self._key(rank)])]

    def _key(self, who: int | str) -> str:
        return f"dmuon/fault/{self._name}/{who}"


def _first_beyond(journal: _Journal, other: _Journal) -> str | None:
    """The first collective of ``journal`` that ``other`` has not come to, of the last lane where there is one."""
    for name in sorted(journal, reverse=True):  # a step of the optimizer says most
        entries, count = _numbered(journal[name]), other.get(name, (0, []))[0]
        if count in entries:
            return entries[count]
    return None


def _numbered(lane: tuple[int, list[str]] | None) -> dict[int, str]:
    """The remembered collectives of a lane by their position since the beginning."""
    if lane is None:
        return {}
    count, recent = lane
    return {count - len(recent) + i: what for i, what in enumerate(recent)}
