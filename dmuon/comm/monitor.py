"""What this rank communicates: named when it fails or waits long, and compared between ranks before it can do harm.

Also what it communicates along a line of ranks: parts of one region that they gather from each other, or reduce to each
other.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.kernels import streams_of
from dmuon.layout.buffer import Spans, Transport
from dmuon.layout.topology import GlobalRank, Position
from dmuon.platform.host import keep_for_ever, logger
from dmuon.platform.streams import await_device
from dmuon.platform.torch_private import all_gather_single, default_store, in_one_launch, reduce_scatter_single

OPTION, LANE = "option ", "lane "  # what begins the names of what a monitor has noted
DIGEST_BITS = 0x7FFFFFFF  # of a digest, which travels as int32, and so does its negative
LATE = "A rank was killed, raised elsewhere, or is late: see the logs of the others"
_EXIT_SECONDS = 2.0
_LEAVE_SECONDS = 0.5
_SECONDS = 30.0  # of waiting, before it is told
_POLL_SECONDS = 5.0
_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_REMEDY = "run the same blocks, backwards and steps in the same order on every rank"
_OPTIONS_REMEDY = (
    "give every rank's optimizer the same options (a scheduler that goes by a rank's own loss does not), and freeze "
    "the same parameters"
)
_log = logger(__name__)


class CollectiveError(RuntimeError):
    """A collective of dmuon failed, or the ranks issued different ones; no more can be started on this model."""


class FirstError:
    """Keeps the first exception of several ``with`` blocks that all have to run, since others wait for each of them.

    Args:
        error: one that was found before.
        through: kinds that end everything at once.
    """

    def __init__(self, error: Exception | None = None, *, through: tuple[type[Exception], ...] = ()) -> None:
        self.error = error
        self._through = through

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._through):
            return False
        self.error = self.error or error
        return True

    def throw(self) -> None:
        """Raise it, if there is one."""
        if self.error is not None:
            raise self.error


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Call every one of them, whatever the others raise; then raise the first exception."""
    first = FirstError()
    for action in actions:
        with first:
            action()
    first.throw()


def first_line(error: Exception) -> str:
    """What it says, without the stack that a back end appends."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


# -- groups that are made once, and collectives that nobody waits for any more ---------------------------------------
#
# A back end keeps threads and connections for each group, an accelerator's also memory, and ranks would have to come
# together to destroy one. So nothing of dmuon's is destroyed before the default group is: as with the groups of a
# DeviceMesh, the same ranks get the same group for the same purpose, whichever model or optimizer asks. Several of them
# may be alive at once: their collectives come in one order on all ranks, which their votes compare. Behind a failure
# groups are not used again: what some ranks have started there may still wait for the others.

# By the default group, and by what a group is for. Another default group, perhaps on another store, has none yet.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# What was started and not waited for yet, with the tensors that it reads and writes, whoever drops its Pending. Of the
# CPU alone: an accelerator's back end keeps what its collectives use by itself. With the name of the monitor.
_under_way: dict[dist.Work, str] = {}


def groups_made() -> dict[Hashable, dist.ProcessGroup]:
    """The groups that were made under the present default group, by what they are for."""
    assert dist.group.WORLD is not None
    return _made.setdefault(dist.group.WORLD, {})


def forget_groups() -> None:
    """Make all groups anew from now on. Whoever has one keeps it."""
    if dist.group.WORLD is not None:
        groups_made().clear()


def settle_at_exit() -> None:
    """Give collectives that nobody has waited for a moment to end; those that do not are never freed.

    Such is what was sent ahead for a forward that never came. [Note: who keeps a tensor alive] does not end here: a
    thread of a back end that drops the last reference to a tensor needs the interpreter for it, and aborts the process
    if that has ended.
    """
    _settle(_EXIT_SECONDS)
    keep_for_ever(_under_way)


def _settle(seconds: float, name: str | None = None) -> None:
    """Let go of collectives that have ended without anybody's waiting; those of one monitor, or all, have some time."""
    deadline = time.monotonic() + seconds
    while True:
        for work in [*_under_way]:  # other threads may start some
            if work.is_completed():
                _under_way.pop(work, None)
        if not any(name in (None, of) for of in [*_under_way.values()]) or time.monotonic() > deadline:
            return
        time.sleep(0.001)


# -- who has not come ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Wait:
    """One collective for which the host waits.

    Attributes:
        key: of the store, the same on all ranks that wait for this.
        ranks: that take part, or some of them do.
    """

    what: str
    key: str
    ranks: Sequence[int]
    began: float = field(default_factory=time.monotonic)
    told: bool = False


_waits: set[Wait] = set()
_watcher: threading.Thread | None = None


@contextmanager
def waiting(what: str, key: str, ranks: Sequence[int]) -> Iterator[None]:
    """Inside, this rank waits. A thread looks at who does every few seconds; a step pays for the note alone."""
    global _watcher
    wait = Wait(what, key, ranks)
    _waits.add(wait)
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="dmuon-waits", daemon=True)
        _watcher.start()
    try:
        yield
    finally:
        _waits.discard(wait)


def _of_torch() -> str | None:
    """The collective of FSDP2 or of a checkpoint in which the main thread stands.

    One that the program calls itself, such as a barrier, may take as long as it likes.
    """
    inner = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not Path(frame.f_code.co_filename).is_relative_to(_TORCH / "distributed"):
        return None
    name = frame.f_code.co_name
    while frame.f_back and any(map(Path(frame.f_code.co_filename).is_relative_to, (_TORCH, _OURS))):
        inner, frame = frame, frame.f_back
    if inner is None or Path(inner.f_code.co_filename).name in ("c10d_logger.py", "distributed_c10d.py"):
        return None
    return f"{name}() of torch.distributed, for {Path(frame.f_code.co_filename).name}:{frame.f_lineno},"


def _watch() -> None:
    marked: set[Wait] = set()
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    used, of_torch = time.clock_gettime(clock), None
    while True:
        time.sleep(_POLL_SECONDS)
        with suppress(Exception):  # of a store whose host is gone, or of a default group that is
            # A thread that has waited all the time has computed nothing.
            before, used = used, time.clock_gettime(clock)
            what = _of_torch() if used - before < 0.02 * _POLL_SECONDS and not _waits - {of_torch} else None
            if of_torch is not None and of_torch.what != what:
                _waits.discard(of_torch)
                of_torch = None
            if of_torch is None and what is not None:
                of_torch = Wait(what, what, range(dist.get_world_size()))
                _waits.add(of_torch)
            for over in marked - _waits:
                marked.discard(over)
                default_store().delete_key(f"{over.key} {dist.get_rank()}")
            for wait in _waits.copy():
                waited = time.monotonic() - wait.began
                if waited >= _POLL_SECONDS and wait not in marked:
                    marked.add(wait)
                    default_store().set(f"{wait.key} {dist.get_rank()}", "")
                if waited >= _SECONDS and not wait.told:
                    wait.told = True
                    _tell(wait, waited)


def _tell(wait: Wait, seconds: float) -> None:
    """By the first of the ranks that wait."""
    there = [rank for rank in wait.ranks if default_store().check([f"{wait.key} {rank}"])]
    if there and there[0] == dist.get_rank():
        missing = [rank for rank in wait.ranks if rank not in there]
        named = " ".join(map(str, missing[:16])) + (" …" if missing[16:] else "")
        whom = f"ranks {named} do not wait for it too: let every rank come there" if missing else "all ranks have come"
        _log.warning("%s has waited for %.0f s, and %s", wait.what, seconds, whom)


# -- collectives under way -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Pending:
    """Collectives under way, and what they are."""

    _monitor: Monitor
    _what: str
    _works: list[dist.Work]

    def wait(self) -> None:
        """Wait for all of them, on the device's stream where there is one.

        Raises:
            CollectiveError: one of them failed; none is left unwaited.
        """
        works, self._works = self._works, []
        fault: Exception | None = None
        with self._monitor.waiting(self._what):
            for work in works:
                try:
                    work.wait()
                except Exception as error:  # of whatever kind a back end raises
                    fault = fault or error
        if fault is not None:  # some may go on
            self._monitor.fail(self._what, fault)
        for work in works:
            _under_way.pop(work, None)


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

    Collectives of one *lane* come in one order on all ranks. Lanes have no order between them: they go over process
    groups of their own, and a rank may start a fill before a reduction where another one starts it after. So a digest
    sums up each lane by itself, and a vote compares all digests at once. A rank that has skipped a collective, or taken
    another one for it, is found before the next step mixes what belongs to different parameters; the collective itself
    may have hung by then, which the time limit of its group ends.

    Attributes:
        device: of the collectives.
        name: the same on all ranks, and of no other monitor.
        step: finished steps of the optimizer, for messages; whoever ends a step counts it.
        counts: by lane, how many collectives of this model were noted so far.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, asynchronous: bool = True) -> None:
        """Collective over ``group``, over which ranks vote. Monitors of one group have one journal."""
        self._rank = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self.device = device
        self._asynchronous = asynchronous
        self._keeps = streams_of(device) is None
        self._journal = _journals.setdefault(group, _Journal())
        self._number = self._journal.monitors
        self._journal.monitors += 1
        self.counts: Counter[str] = Counter()
        self._options: dict[str, str] = {}
        self.name = f"{group.group_name} {self._number}"
        self.step = 0
        # What a model that is gone has sent ahead goes with it.
        weakref.finalize(self, _settle, _LEAVE_SECONDS, self.name).atexit = False

    def start(
        self, lane: str | None, what: str, launch: Callable[[], dist.Work | list[dist.Work | None] | None]
    ) -> Pending:
        """Launch collectives, one or several.

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
            launched = launch()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.fail(what, error)
        works: list[dist.Work] = []
        for work in launched if isinstance(launched, list) else (launched,):
            assert work is not None, "an asynchronous collective returns its work"
            works.append(work)
        # Whoever started them may be gone before they have ended, as a model that is deleted; a back end of the CPU
        # then reads memory that is nobody's.
        if self._keeps:
            _under_way.update(dict.fromkeys(works, self.name))
        pending = Pending(self, what, works)
        if not self._asynchronous:  # nothing is left for whoever waits for it later, on whatever stream
            pending.wait()
            self.synchronize()
        return pending

    def synchronize(self) -> None:
        """The host waits for the current stream of the device, if it has streams."""
        await_device(self.device)

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Around a blocking collective."""
        if self._journal.broken is not None:
            self._refuse(what)
        try:
            with self.waiting(what):
                yield
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            self.fail(what, error)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Inside, the host waits for a collective, so that the log can say who has not come."""
        return waiting(what, f"{self.name} {self.step} {what}", self._ranks)

    def note(self, lane: str, what: str) -> None:
        """Remember what all ranks do in one order, whether or not it communicates."""
        self.counts[lane] += 1
        noted = self._journal.lanes[lane]
        noted.count += 1
        noted.last = f"{what} of model {self._number}" if self._number else what
        noted.digest = zlib.crc32(noted.last.encode() + b"\n", noted.digest)

    def note_options(self, options: Iterable[tuple[str, str]]) -> None:
        """What an optimizer will go by, ``(name, value)``: the next vote compares what has changed since the last."""
        for name, value in options:
            if self._options.get(name) != value:
                self._options[name] = value
                self.note("options", f"{name}={value}")

    @property
    def digest(self) -> int:
        """31 bits of everything that was noted, lane by lane, and of whose vote this is.

        It never starts anew: ranks whose collectives have once gone out of step stay so, and an exception that all of
        them caught at one place leaves them in step.
        """
        lanes = [str(self._number)]
        for name, lane in sorted(self._journal.lanes.items()):
            lanes.append(f"{name} {lane.digest}")
        return zlib.crc32(repr(lanes).encode()) & DIGEST_BITS

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


# -- parts of a region, along a line of ranks ------------------------------------------------------------------------

Works = list[dist.Work | None]  # of collectives that were started; None of none


@dataclass(frozen=True, slots=True)
class Line:
    """Ranks that hold parts of regions, and a process group of dmuon's own over them.

    Attributes:
        ranks: by position on the line.
        position: of this rank.
    """

    ranks: tuple[GlobalRank, ...]
    position: Position
    group: dist.ProcessGroup


Parts = Mapping[int, Tensor]  # of a region, by position on a line; those that are not empty


def scratch(transport: Transport, spans: Spans, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Parts]:
    """Memory for a reduction: the region and its parts, which are views of it where they travel together.

    Separate ones can be freed one by one; the region is nothing then.
    """
    together = transport == "single"
    region = torch.empty(spans.size if together else 0, dtype=dtype, device=device)
    parts: dict[int, Tensor] = {}
    for position, (start, end) in spans.filled.items():
        if together:
            parts[position] = region[start - spans.start : end - spans.start]
        else:
            parts[position] = region.new_empty(end - start)
    return region, parts


def gather(transport: Transport, region: Tensor, parts: Parts, line: Line) -> Works:
    """Start filling every part from the rank at its position on ``line``; this rank's own part holds its content.

    Args:
        region: 1-D, all parts in order.
        parts: views of it.
    """
    if transport == "single":
        own = parts.get(line.position, region[:0])
        return [all_gather_single(region, own, group=line.group, async_op=True)]
    launches = []
    for position, part in parts.items():
        launches.append(partial(dist.broadcast, part, src=line.ranks[position], group=line.group, async_op=True))
    return in_one_launch(line.group, region.device, launches)


def reduce(transport: Transport, region: Tensor, parts: Parts, line: Line) -> tuple[Tensor, Works]:
    """Start averaging every part to the rank at its position on ``line``; the other parts are garbage then.

    Returns:
        Where this rank's own part arrives, and the works.
    """
    average = dist.ReduceOp.AVG
    own = parts.get(line.position, region[:0])
    if transport == "single":
        result = torch.empty_like(own)  # which outlives the region
        work = reduce_scatter_single(result, region, op=average, group=line.group, async_op=True)
        return result, [work]
    launches = []
    for position, part in parts.items():
        launches.append(partial(dist.reduce, part, line.ranks[position], average, group=line.group, async_op=True))
    return own, in_one_launch(line.group, region.device, launches)
