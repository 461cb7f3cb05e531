"""What a device may do in another order than the program says: streams, events, the host, and memory, as clocks.

Every operation is one tick of its stream. A stream, an event and the host *know*, of each stream, the last tick that
has ended before whatever they do next: a vector clock. Two accesses of the same bytes, one of them a write, are a race
if the stream of the later one does not know the tick of the earlier one. Nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Knowledge = dict["Stream", int]  # of each stream, the last tick that has ended


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Where in the program something was queued: a function, and what it did there."""

    function: str
    what: str

    def __str__(self) -> str:
        return f"{self.what} in {self.function}"


@dataclass(frozen=True, slots=True, order=True)
class Race:
    """Two accesses of the same memory in no order.

    Attributes:
        kind: ``memory``: one of them writes. ``reuse``: memory that ``later`` allocated may be given away while
            ``earlier`` uses it. ``host``: the host reads what ``earlier`` has perhaps not written yet.
    """

    kind: Literal["memory", "reuse", "host"]
    earlier: Site
    later: Site

    def __str__(self) -> str:
        match self.kind:
            case "memory":
                return f"{self.later} does not wait for {self.earlier}"
            case "reuse":
                return f"memory of {self.later} may be given away before {self.earlier} has ended"
            case "host":
                return f"the host does not wait for {self.earlier} before {self.later}"


@dataclass(slots=True, eq=False)
class Stream:
    """Operations in one order.

    Attributes:
        known: what has ended before the next operation begins.
    """

    name: str
    ticks: int = 0
    known: Knowledge = field(default_factory=dict)


class Clock:
    """Streams and the host that queues work on them."""

    def __init__(self) -> None:
        self.host: Knowledge = {}

    def tick(self, stream: Stream) -> int:
        """Queue one operation. It begins after all that the host knows to have ended."""
        _learn(stream.known, self.host)
        stream.ticks += 1
        stream.known[stream] = stream.ticks
        return stream.ticks

    def moment(self, stream: Stream) -> Knowledge:
        """What has ended once everything queued on ``stream`` so far has: what an event tells that is recorded now."""
        return dict(stream.known)

    def wait(self, stream: Stream, moment: Knowledge) -> None:
        """What is queued on ``stream`` from now on begins after ``moment``."""
        _learn(stream.known, moment)

    def wait_on_host(self, moment: Knowledge) -> None:
        """The host goes on after ``moment``."""
        _learn(self.host, moment)

    def host_knows(self, stream: Stream, tick: int) -> bool:
        return self.host.get(stream, 0) >= tick

    def knows(self, stream: Stream, other: Stream, tick: int) -> bool:
        """Whether what is queued on ``stream`` next begins after ``tick`` of ``other``."""
        return stream.known.get(other, 0) >= tick or self.host_knows(other, tick)


def _learn(known: Knowledge, more: Knowledge) -> None:
    for stream, tick in more.items():
        if known.get(stream, 0) < tick:
            known[stream] = tick


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of the bytes ``[start, end)`` of a block."""

    stream: Stream
    tick: int
    start: int
    end: int
    writes: bool
    site: Site

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end

    def covers(self, other: Access) -> bool:
        """Whether whoever comes after this one, in its stream's order, comes after ``other``."""
        within = self.start <= other.start and other.end <= self.end
        return within and (self.writes or not other.writes) and (self.writes or self.stream is other.stream)


@dataclass(slots=True, eq=False)
class Block:
    """Memory that was allocated at once.

    Attributes:
        stream: current when it was allocated; its pool gets the memory back. None: nobody gets it back.
        accesses: that a later one might conflict with.
        recorded: streams that the allocator waits for before it gives the memory away again.
    """

    stream: Stream | None
    site: Site
    accesses: list[Access] = field(default_factory=list)
    recorded: set[Stream] = field(default_factory=set)


class Memory:
    """A caching allocator, and who uses what it has given.

    Freed memory goes to the pool of the stream on which it was allocated, and from there to that stream's next
    allocation, whatever its size: so is found what on a device only happens with the wrong sizes.

    Attributes:
        races: how often each was seen.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pools: dict[Stream, list[Block]] = {}
        self.races: Counter[Race] = Counter()

    def allocate(self, stream: Stream, nbytes: int, site: Site) -> Block:
        """A block of what earlier ones have given back.

        As if ``stream`` wrote it: what it has queued on the memory before may still run.
        """
        first = Access(stream, self.clock.tick(stream), 0, nbytes, True, site)
        for freed in self.pools.pop(stream, ()):
            for access in freed.accesses:
                if access.stream not in freed.recorded and not self.ordered(stream, access):
                    self.races[Race("reuse", access.site, freed.site)] += 1
        return Block(stream, site, accesses=[first])

    def access(self, block: Block, stream: Stream, start: int, end: int, writes: bool, site: Site) -> None:
        """Queue an operation that uses the bytes ``[start, end)``."""
        if start >= end:
            return
        access = Access(stream, self.clock.tick(stream), start, end, writes, site)
        for earlier in block.accesses:
            conflict = (writes or earlier.writes) and earlier.overlaps(start, end)
            if conflict and not self.ordered(stream, earlier):
                self.races[Race("memory", earlier.site, site)] += 1
        block.accesses = [earlier for earlier in block.accesses if not access.covers(earlier)]
        block.accesses.append(access)

    def read_on_host(self, block: Block, site: Site) -> None:
        """The host reads now what it has not waited for."""
        for access in block.accesses:
            if access.writes and not self.clock.host_knows(access.stream, access.tick):
                self.races[Race("host", access.site, site)] += 1

    def record(self, block: Block, stream: Stream) -> None:
        """Once freed, the block is given away only when what ``stream`` has queued until then has ended."""
        block.recorded.add(stream)

    def free(self, block: Block) -> None:
        if block.stream is not None:
            self.pools.setdefault(block.stream, []).append(block)

    def ordered(self, stream: Stream, earlier: Access) -> bool:
        return earlier.stream is stream or self.clock.knows(stream, earlier.stream, earlier.tick)
