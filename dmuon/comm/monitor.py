"""What this rank communicates: named when it fails, and compared between ranks before it can do harm."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn, cast

import torch
import torch.distributed as dist

from dmuon.comm.lifetime import forget_groups, leave
from dmuon.kernels import streams_of
from dmuon.layout.topology import GlobalRank

OPTION, LANE = "option ", "lane "  # what begins the names of what a monitor has noted
LATE = "A rank was killed, raised elsewhere, or is late: see the logs of the others"
_EXIT_SECONDS = 2.0
_LEAVE_SECONDS = 0.5  # for what was published last by a model that nobody uses any more
_REMEDY = "run the same blocks, backwards and steps in the same order on every rank"
_OPTIONS_REMEDY = (
    "give every rank's optimizer the same options (a scheduler that goes by a rank's own loss does not), and freeze "
    "the same parameters"
)


class CollectiveError(RuntimeError):
    """A collective of dmuon failed, or the ranks issued different ones; no more can be started on this model."""


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

    def __init__(self, monitor: Monitor, what: str, works: list[dist.Work | None]) -> None:
        self._monitor = monitor
        self._what = what
        assert None not in works, "an asynchronous collective returns its work"
        self._works = cast(list[dist.Work], works)

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
        fault: Exception | None = None
        for work in works:
            try:
                work.wait()
            except Exception as error:  # of whatever kind a back end raises
                fault = fault or error
        if fault is not None:
            self._monitor.leave(works)  # those that go on
            self._monitor.fail(self._what, fault)


@dataclass(slots=True)
class _Lane:
    """Collectives that come in the same order on all ranks: how many, the last one, and a checksum of all."""

    count: int = 0
    last: str = ""
    digest: int = 0


@dataclass(slots=True)
class _Journal:
    """What was started over some process groups, by all models and optimizers that share them.

    Attributes:
        monitors: how many models and optimizers there were.
        broken: what has failed; nothing more is started.
    """

    lanes: defaultdict[str, _Lane] = field(default_factory=lambda: defaultdict(_Lane))
    monitors: int = 0
    broken: str | None = None


_journals: weakref.WeakKeyDictionary[dist.ProcessGroup, _Journal] = weakref.WeakKeyDictionary()


class Monitor:
    """Names one model's collectives on this rank, and sums them up for votes.

    Attributes:
        name: the same on all ranks, and of no other monitor.
        step: finished steps of the optimizer, for messages.
    """

    def __init__(
        self, rank: GlobalRank, group: dist.ProcessGroup, device: torch.device, *, asynchronous: bool = True
    ) -> None:
        """Collective over ``group``, over which ranks vote. Monitors of one group have one journal."""
        self._rank = rank
        self._device = device
        self._asynchronous = asynchronous
        self._journal = _journals.setdefault(group, _Journal())
        self._number = self._journal.monitors
        self._journal.monitors += 1
        self._counts: Counter[str] = Counter()
        self._options: dict[str, str] = {}
        self.name = f"{group.group_name} {self._number}"
        self.step = 0

    def start(self, lane: str | None, what: str, launch: Callable[[], list[dist.Work | None]]) -> Pending:
        """Launch collectives.

        Args:
            lane: collectives of one lane come in the same order on all ranks; None for those of some ranks only, which
                are not compared.
            what: names them, the same on all ranks.

        Raises:
            CollectiveError: the launch failed, or something before it.
            torch.OutOfMemoryError: as it came; the model can still be used if it came on all ranks.
        """
        if self._journal.broken is not None:
            self._refuse(what)
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
            leave(works, patience=_LEAVE_SECONDS if self._journal.broken is None else 0.0)

    def synchronize(self) -> None:
        """The host waits for the current stream of the device, if it has streams."""
        module = streams_of(self._device)
        if module is not None:
            module.current_stream(self._device).synchronize()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Around a blocking collective."""
        if self._journal.broken is not None:
            self._refuse(what)
        try:
            yield
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            self.fail(what, error)

    def note(self, lane: str, what: str) -> None:
        """Remember what all ranks do in one order, whether or not it communicates."""
        self._counts[lane] += 1
        noted = self._journal.lanes[lane]
        noted.count += 1
        noted.last = f"{what} of model {self._number}" if self._number else what
        noted.digest = zlib.crc32(noted.last.encode() + b"\n", noted.digest)

    def count(self, lane: str) -> int:
        """How many of this lane were noted so far."""
        return self._counts[lane]

    def note_options(self, options: Iterable[tuple[str, str]]) -> None:
        """What an optimizer will go by, ``(name, value)``: the next vote compares what has changed since the last."""
        for name, value in options:
            if self._options.get(name) != value:
                self._options[name] = value
                self.note("options", f"{name}={value}")

    def begin_step(self) -> None:
        """The optimizer takes a step: the other ranks must, too, before the next gradients are used."""
        self.note("step", f"step {self.step} of the optimizer")

    def end_step(self) -> None:
        """From here on messages count the step as finished."""
        self.step += 1

    @property
    def digest(self) -> int:
        """31 bits of everything that was noted, lane by lane, and of whose vote this is.

        It never starts anew: ranks whose collectives have once gone out of step stay so, and an exception that all of
        them caught at one place leaves them in step.
        """
        lanes = [str(self._number)]
        for name, lane in sorted(self._journal.lanes.items()):
            lanes.append(f"{name} {lane.digest}")
        return zlib.crc32(repr(lanes).encode()) & 0x7FFFFFFF

    def noted(self) -> dict[str, str]:
        """What :attr:`digest` sums up, in words: options, and the last one of each lane."""
        told = {f"{OPTION}{name}": f"{name}={value}" for name, value in self._options.items()}
        for name, lane in self._journal.lanes.items():
            if name != "options":
                told[f"{LANE}{name}"] = f"{lane.last}, number {lane.count} of its kind, checksum {lane.digest:08x}"
        return told | {f"{LANE}vote": f"a vote of model {self._number}"}

    def disagree(self, difference: str, *, of_options: bool) -> NoReturn:
        """Raise: the digests differ. Every rank of the vote gets here."""
        what = f"the ranks issued different collectives: {difference}; {_REMEDY}"
        if of_options:
            what = f"the ranks have different options: {difference}; {_OPTIONS_REMEDY}"
        self._break(f"rank {self._rank}, step {self.step}: {what}")

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise: a collective failed on this rank."""
        message = f"rank {self._rank}, step {self.step}: {what} failed: {first_line(error)}"
        if self._journal.broken is not None:
            raise CollectiveError(f"{message}. Before that: {self._journal.broken}") from error
        self._break(f"{message}. {LATE}", error)

    def _refuse(self, what: str) -> NoReturn:
        raise CollectiveError(f"{what} was not started, because an earlier collective failed: {self._journal.broken}")

    def _break(self, message: str, cause: Exception | None = None) -> NoReturn:
        self._journal.broken = message
        forget_groups()
        raise CollectiveError(message) from cause
